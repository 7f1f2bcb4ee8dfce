"""Calls to `generate` whose results are compared with and without an assistant."""

import copy

import torch
import transformers
from transformers import CompileConfig, LlamaForCausalLM

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.host.transformers_private import input_device

from .oracle_drafter import sequences_of
from .tiny_models import tiny_config, tiny_model

# One phrase twice over, longer than the tiny models' windows.
PHRASE = [5, 9, 33, 21, 60, 7, 44]
PROMPT = torch.tensor([PHRASE * 2])
NEW_TOKENS = 20
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}

# The prompt alone, and three rows of which two are padded.
_ROWS = torch.cat([PROMPT, PROMPT.flip(1), PROMPT + 3])
_MASK = torch.ones_like(_ROWS)
_MASK[1, :5] = _MASK[2, :9] = 0
INPUTS = {
    "one row": {"input_ids": PROMPT},
    "padded": {"input_ids": _ROWS * _MASK, "attention_mask": _MASK},
}


def prompts_of(lengths, seed=0):
    """Random prompts of these lengths, padded on the left."""
    width, generator = max(lengths), torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def padded(rows, length=18):
    """Prompts of different lengths."""
    return prompts_of([length - (5 * row) % 14 for row in range(rows)])


def late_token(text, earliest):
    """A token that a text has not used before a position; 66 where it repeats itself."""
    new = [token for token in text[earliest:].tolist() if token not in text[:earliest]]
    return new[0] if new else 66


def disturbed(model):
    """A draft model that is right most of the time: the model with a disturbed output layer."""
    draft = copy.deepcopy(model)
    weight = draft.get_output_embeddings().weight
    weight.data += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return draft


def build(kind=LlamaForCausalLM, **overrides):
    """A tiny model of a class or of the name of one, its configuration changed by `overrides`."""
    model_class = getattr(transformers, kind) if isinstance(kind, str) else kind
    return tiny_model(model_class, tiny_config(model_class.config_class, **overrides))


ROPES = {
    "default": {},
    "yarn": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [8.0] * 8},
}


def rope_model(kind, original, model_class=LlamaForCausalLM):
    """One whose positions go on beyond a length, at which some kinds' frequencies change."""
    own = {"original_max_position_embeddings": original} if kind in ("yarn", "longrope") else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind], **own}
    return build(model_class, max_position_embeddings=original, rope_parameters=rope, **own)


def run(model, ids=PROMPT, seed=0, **options):
    """One call under a seed; greedy unless `options` say otherwise."""
    ids = ids.to(input_device(model))
    torch.manual_seed(seed)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS} | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def outcome(call):
    """What a call returns, or the exception that it raises."""
    try:
        return call()
    except Exception as exception:
        return type(exception), str(exception)


def static(**options):
    """What a caller asks for to have forwards compiled, on a CPU as well."""
    config = CompileConfig(backend="eager", mode=None, fullgraph=True)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config, **options}


def knowing(*results, **options):
    """An assistant whose corpus holds these results, so that its drafts are accepted; it drafts for
    parts that tests have written."""
    corpus = [sequences_of(result)[0].tolist() for result in results]
    return SamAssistant(corpus, **({"budget": 16, "trust_forward": True} | options))


def same(model, ids=PROMPT, assistant=knowing, plain=None, calls=1, tier=None, **options):
    """Both results of a call, which agree, and the assistant.

    Args:
        assistant: or what makes it from plain decoding's result.
        plain: that result, where it is known.
        calls: how many calls agree with it.
        tier: at which each of them is served, if that is told.
    """
    plain = run(model, ids, **options) if plain is None else plain
    for _ in range(calls):
        made = assistant if isinstance(assistant, Assistant) else assistant(plain)
        assisted = run(model, ids, **options, assistant=made)
        assert torch.equal(sequences_of(plain), sequences_of(assisted))
        assert tier in (None, made.stats.last.tier), made.stats.last.reason
    return plain, assisted, made


def equal(model, **options):
    """The same of a call that took fewer forwards with the assistant."""
    plain, assisted, assistant = same(model, **options)
    assert assistant.stats.last.accepted > 0
    assert assistant.stats.last.steps < assistant.stats.last.tokens - 1
    return plain, assisted, assistant
