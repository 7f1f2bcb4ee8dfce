"""What `generate` takes and returns is the same with and without an assistant."""

import functools

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import GenerationConfig, pipeline
from transformers.cache_utils import LinearAttentionLayer
from transformers.masking_utils import flash_attention_mask

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.decoding import call, selection
from hf_retrieval_assist.decoding.call import Call
from hf_retrieval_assist.draft_models.draft_model import DraftModelDrafter
from hf_retrieval_assist.host import transformers_private
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.verification.service import ServiceDemand, choose_service
from hf_retrieval_assist.verification.tiers import Service, Tier
from hf_retrieval_assist.verification.tree_verifier import TreeVerifier
from tests.support.byte_model import byte_tokenizer
from tests.support.lossless import NEW_TOKENS, PROMPT, build, knowing, padded, run
from tests.support.oracle_drafter import agreeing, oracle_assistant
from tests.support.quick import cases
from tests.support.rounding import OF_MODEL, within
from tests.support.threads import in_threads
from tests.support.watching import a_librarys
from tests.support.wrapped_models import flash_like

INPUTS = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}


def equal(model, inputs=INPUTS, tier="tree", **kwargs):
    """Both results of a call, which agree, and its assistant, whose drafts were accepted."""
    kwargs = {"do_sample": False, "max_new_tokens": 16} | kwargs
    return agreeing(model, inputs, tier=tier, **kwargs)


@pytest.mark.parametrize(
    "model_class", ["LlamaForCausalLM", "BloomForCausalLM", "BambaForCausalLM"]
)
def test_forwards_go_on_while_other_processes_generate(model_class, monkeypatch):
    model = build(model_class)
    answers, forwards = [], []

    def wait_for_others(finished, synced_gpus, device):
        return not finished or bool(answers and answers.pop(0))

    model.register_forward_hook(lambda *arguments: forwards.append(1))
    monkeypatch.setattr(model, "_has_unfinished_sequences", a_librarys(wait_for_others))
    plain, _, _ = equal(model, tier="", max_new_tokens=12)
    assistant = oracle_assistant(plain)
    forwards.clear()
    answers += [True, True, False]
    options = {"do_sample": False, "max_new_tokens": 12, "assistant": assistant}
    assert torch.equal(plain, model.generate(**INPUTS, **options))
    assert not answers
    # The prefill, the steps that brought tokens, and two for the others.
    assert len(forwards) == 1 + assistant.stats.last.steps + 2


@pytest.mark.parametrize("model_class", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_mask_with_holes(model_class):
    mask = torch.ones_like(PROMPT)
    mask[0, [2, 3, 7]] = 0
    shown = torch.cat([mask[0], torch.ones(16)]).bool()
    inputs = INPUTS | {"attention_mask": mask}
    model = build(model_class, attn_implementation="eager")
    equal(model, inputs, make=lambda plain: oracle_assistant(plain[:, shown]))


def test_flash_attention_is_served_by_chains():
    transformers.AttentionInterface.register("flash_toy", flash_like)
    transformers.AttentionMaskInterface.register("flash_toy", flash_attention_mask)
    model = build()
    # Set past the check for its library.
    model.config._attn_implementation_internal = "flash_toy"
    equal(model, tier="chain")


ENCODERS = [
    ("BartForConditionalGeneration", 1),
    ("T5ForConditionalGeneration", 4),
    ("MarianMTModel", 1),
    ("T5ForConditionalGeneration", 1),
    ("WhisperForConditionalGeneration", 1),
]


@pytest.mark.parametrize(("model_class", "rows"), cases(ENCODERS, 2))
def test_encoder_decoder(model_class, rows):
    model = build(model_class)
    inputs = padded(rows)
    # The encoder's padding is none of the decoder's.
    options = {"make": oracle_assistant, "forced_eos_token_id": None, "num_beams": 1}
    if model_class == "WhisperForConditionalGeneration":  # whose result lacks the first token
        frames = 2 * model.config.max_source_positions
        inputs = {"input_features": torch.randn(rows, model.config.num_mel_bins, frames)}
        options["make"] = lambda plain: oracle_assistant(torch.nn.functional.pad(plain, (1, 0)))
    equal(model, inputs, tier="chain", max_new_tokens=20, **options)


@pytest.mark.parametrize(("seconds", "tokens"), [(0.0, 1), (1e6, NEW_TOKENS)])
def test_max_time(model, seconds, tokens):
    plain = run(model)
    assisted = run(model, max_time=seconds, assistant=knowing(plain))
    assert torch.equal(assisted, plain[:, : PROMPT.shape[1] + tokens])


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(["<pad>"], pad_token="<pad>")


@pytest.mark.parametrize("do_sample", [False, True])
def test_stop_strings(model, tokenizer, do_sample):
    free = run(model, do_sample=do_sample)[0].tolist()
    stop = tokenizer.decode(free[-9:-6])
    config = GenerationConfig(stop_strings=stop, max_new_tokens=NEW_TOKENS)
    for given in ({"stop_strings": [stop, "nowhere"]}, {"generation_config": config}):
        options = {
            "tokenizer": tokenizer,
            "do_sample": do_sample,
            "max_new_tokens": NEW_TOKENS,
        } | given
        plain, _, _ = equal(model, make=knowing, **options)
        assert plain.shape[1] < len(free)
    assert config.stop_strings == stop


def test_pipelines(model, tokenizer):
    text = tokenizer.decode(PROMPT[0])
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    pipe = functools.partial(pipeline, "text-generation", model=model, tokenizer=tokenizer)
    plain, given = pipe()(text, **options), {"assistant": knowing(run(model))}
    for of_pipeline, of_call in (({}, given), (given, {})):
        assert pipe(**of_pipeline)(text, **options, **of_call) == plain
        assert given["assistant"].stats.last.accepted > 0
    assert given["assistant"].stats.total.calls == 2


def test_threads_share_an_assistant(model):
    prompts = [PROMPT, PROMPT.flip(1), PROMPT[:, 3:], PROMPT + 2]
    plain = [run(model, ids) for ids in prompts]
    assistant = knowing(*plain)
    numbers = range(8)
    found = in_threads(lambda i: run(model, prompts[i % 4], assistant=assistant), numbers)
    assert all(torch.equal(found[i], plain[i % 4]) for i in numbers)
    assert assistant.stats.total.calls == 8
    assert assistant.stats.total.accepted > 0


@pytest.mark.parametrize(
    "inputs",
    [{}, {"inputs": PROMPT}, {"input_ids": PROMPT[:, :1]}, {"input_ids": PROMPT, "max_length": 20}],
    ids=lambda inputs: "-".join(inputs) or "none",
)
def test_ways_to_give_the_prompt(model, inputs):
    agreeing(model, {"max_length": 16} | inputs, make=knowing, do_sample=False)


@pytest.mark.parametrize("shortage", cases([torch.OutOfMemoryError, MemoryError]))
def test_a_shortage_during_the_self_test_is_not_the_models(shortage, told):
    model = build()
    plain = model.generate(**INPUTS, max_new_tokens=8)

    def fail(verifier, *arguments):
        raise shortage("nothing left")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TreeVerifier, "forward", fail)
        service = choose_service(model, INPUTS)
        assisted = model.generate(**INPUTS, max_new_tokens=8, assistant=SamAssistant(budget=8))
    assert service.tier is Tier.PLAIN
    assert "nothing left" in service.reason
    assert told.text.count("nothing left") == 1
    assert torch.equal(assisted, plain)
    assert choose_service(model, INPUTS).tier is Tier.TREE


def test_ids_of_another_dtype_give_the_dtype_of_plain_decoding(llama):
    plain, found, _ = equal(llama, {"input_ids": PROMPT.to(torch.int32)})
    assert found.dtype == plain.dtype


def test_ids_that_were_left_elsewhere_do_not_bound_what_the_models_device_verifies(monkeypatch):
    """Here on the CPU, for a model that seems to lie on a GPU; accelerate moves them."""
    asked, assistant = [], SamAssistant()

    def plainly(model, model_kwargs, rows, demand):
        asked.append(demand)
        return Service(Tier.PLAIN, "it is asked what it would verify")

    monkeypatch.setattr(transformers_private, "input_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr(call, "choose_service", plainly)
    agreeing(build(), INPUTS, "plain", make=lambda plain: assistant, max_new_tokens=4)
    assert asked == [ServiceDemand(1 + assistant.policy.planner.max_nodes, True)]
    kind = Call(build(), PROMPT, None, None, GenerationConfig(), {}).kind
    assert kind.device == "cuda"


def letters():
    """One token per letter, and the words that "th" may have been cut from."""
    tokens = ["<pad>", "<s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz ", "th", "the", "thi", "tha"]
    merges = [("t", "h"), ("th", "e"), ("th", "i"), ("th", "a")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    rust = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    rust.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", pad_token="<pad>", unk_token="<unk>"
    )


def test_token_healing(llama):
    words = letters()
    inputs = {"input_ids": words("one th", return_tensors="pt").input_ids}
    healed = llama.heal_tokens(inputs["input_ids"].clone(), words)
    assert healed[0, -1] != inputs["input_ids"][0, -1]
    options = {"token_healing": True, "tokenizer": words}
    plain, _, _ = equal(llama, inputs, **options)
    assert torch.equal(plain[:, : healed.shape[1]], healed)


class TakingPlaceholders(nn.Embedding):
    """Ids that the vocabulary lacks stand for something else, as LLaVA's -200 for an image."""

    def forward(self, ids):
        return super().forward(ids.clamp(0, self.num_embeddings - 1))


@pytest.mark.parametrize("placeholder", cases([-200, 2**40, -1, 67, 2**31 - 1, 2**31 + 5], 2))
def test_placeholders_among_the_ids(placeholder):
    model = build()
    model.get_input_embeddings().__class__ = TakingPlaceholders
    ids = torch.tensor([[5, 9, placeholder, placeholder, 7, 44, 5, 9, placeholder]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    equal(model, inputs)
    drafts = DraftModelDrafter(build())
    for other in (SamAssistant(budget=8), Assistant([drafts], budget=8)):
        equal(model, inputs, tier="", make=lambda plain, other=other: other)


def test_quantised_cache_of_the_caller_is_refused(llama):
    # Made without its quantisation library, which the refusal comes before.
    cache = transformers.QuantizedCache.__new__(transformers.QuantizedCache)
    with pytest.raises(ValueError, match=rf"{CACHE}.*QuantizedCache"):
        llama.generate(
            **INPUTS, max_new_tokens=4, **{CACHE: cache}, assistant=oracle_assistant(PROMPT)
        )


# Full attention, windows, no trees, and convolutions.
TIERS = {
    "LlamaForCausalLM": "tree",
    "Gemma3ForCausalLM": "tree",
    "BartForCausalLM": "chain",
    "Lfm2ForCausalLM": "chain",
}


of_tiers = pytest.mark.parametrize(
    "model_class", cases(TIERS, ["Gemma3ForCausalLM", "BartForCausalLM"])
)


@of_tiers
def test_several_sequences_per_prompt(model_class):
    inputs = padded(2)
    mask = inputs["attention_mask"].repeat_interleave(3, dim=0)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 9}
    make = functools.partial(oracle_assistant, attention_mask=mask)
    tier = TIERS[model_class]
    _, _, assistant = agreeing(build(model_class), inputs, tier=tier, make=make, **options)
    assert assistant.stats.last.keeps_seed


class StopsRowWise(transformers.StoppingCriteria):
    """Meets a row once a token of a residue class has come; knows of no end-of-sequence id."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, 18:] % 5 == 3).any(dim=1)


@of_tiers
def test_rows_go_on_where_no_end_of_sequence_token_pads_them(model_class, monkeypatch):
    # It is taken for one of transformers' own, which follows no row into the next call.
    monkeypatch.setattr(StopsRowWise, "__call__", a_librarys(StopsRowWise.__call__))
    monkeypatch.setattr(selection, "ROWWISE", selection.ROWWISE | {StopsRowWise})
    options = {"do_sample": False, "max_new_tokens": 40, "return_dict_in_generate": True}
    options["stopping_criteria"] = [StopsRowWise()]
    tier = TIERS[model_class]
    plain, assisted, assistant = agreeing(build(model_class), padded(4), tier=tier, **options)
    new = plain.sequences[:, 18:]
    lengths = (new % 5 == 3).int().argmax(dim=1) + 1
    assert len(set(lengths.tolist())) > 1
    assert assistant.stats.last.tokens == new.numel()
    pairs = zip(plain[CACHE].layers, assisted[CACHE].layers, strict=True)
    states = [pair for pair in pairs if isinstance(pair[0], LinearAttentionLayer)]
    assert bool(states) == (model_class == "Lfm2ForCausalLM")
    for expected, actual in states:
        assert not actual.record_past
        bound = within(expected.conv_states, OF_MODEL)
        torch.testing.assert_close(actual.conv_states, expected.conv_states, **bound)


@of_tiers
def test_guidance_follows_the_batch(model_class):
    negative = torch.tensor([[4, 9], [7, 7], [5, 3]])
    options = {"guidance_scale": 1.7, "negative_prompt_ids": negative, "max_new_tokens": 16}
    # Rows that something follows together are decoded plainly.
    agreeing(build(model_class), padded(3), tier="plain", do_sample=False, **options)
