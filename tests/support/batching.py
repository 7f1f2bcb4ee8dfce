"""Requests for continuous batching, and drafters for them."""

import random

from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.types.token_tree import TokenTree

from .scripted import Scripted

LENGTH = 16


def greedy(**options):
    defaults = {"do_sample": False, "max_new_tokens": LENGTH, "eos_token_id": -1}
    return GenerationConfig(**(defaults | options))


def prompts(count=8, seed=0):
    random.seed(seed)
    lengths = [random.randrange(2, 30) for _ in range(count)]
    return [[random.randrange(1, 60) for _ in range(length)] for length in lengths]


def small(**options):
    """A configuration whose cache takes little: by default it takes most of the memory there is."""
    options = {"page_size": 16, "max_batch_tokens": 64, "num_blocks": 64} | options
    return ContinuousBatchingConfig(**options)


def _arguments(config, assistant, options):
    return {
        "generation_config": config or greedy(),
        "continuous_batching_config": small(**options),
        "warmup": False,
        **({} if assistant is None else {"assistant": assistant}),
    }


def run(model, inputs, config=None, assistant=None, **options):
    """The generated tokens of each request."""
    results = model.generate_batch(inputs, **_arguments(config, assistant, options))
    assert all(output.error is None for output in results.values())
    return [output.generated_tokens for output in results.values()]


def drafted(model, inputs, config=None, make=None, **options):
    """The figures of a run with drafts, whose tokens are those of one without; `make`: makes its
    assistant from both."""
    plain = run(model, inputs, config, **options)
    assistant = (make or half_knowing)(inputs, plain)
    assert run(model, inputs, config, assistant, **options) == plain
    return assistant.stats.total


def half_knowing(inputs, outputs, **options):
    """An assistant that drafts the outputs, every seventh token of which it knows wrongly."""
    texts = [[*prompt, *output] for prompt, output in zip(inputs, outputs, strict=True)]
    for text in texts:
        text[6::7] = [1 + token % 50 for token in text[6::7]]
    return SamAssistant(texts, **({"budget": 5} | options))


def manager_of(model, assistant, config=None, **options):
    return model.continuous_batching_context_manager(**_arguments(config, assistant, options))


def outputs(manager, requests, errors=False):
    """What a manager delivers until so many requests have finished; fails where its loop ends."""
    while requests:
        output = manager.get_result(timeout=1)
        if output is None:
            assert manager.is_running(), "the loop has ended before its requests"
            continue
        assert errors or output.error is None
        requests -= output.is_finished()
        yield output


def guess(token):
    """A drafter of one token behind every text, or of what breaks the contract."""
    return Scripted(lambda budget: TokenTree.chain([token] * 2, [0.9, 0.8]), name="guess")
