"""`generate(assistant=...)` returns what plain `generate` returns, whatever is asked of it."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    Gemma3ForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from hf_retrieval_assist import SamAssistant
from tests.support.lossless import NEW_TOKENS, PHRASE, PROMPT, build, equal, knowing, run
from tests.support.threads import in_threads
from tests.support.tiny_models import VOCAB, WINDOW


@pytest.fixture(scope="module", params=[LlamaForCausalLM, Gemma3ForCausalLM])
def model(request):
    return build(request.param)


def test_windows_are_shorter_than_the_prompt(model):
    assert getattr(model.config, "sliding_window", None) in (None, WINDOW)
    assert PROMPT.shape[1] > WINDOW


# It compiles a kernel for every length.
FLEX = pytest.param("flex_attention", marks=pytest.mark.slow)


@pytest.mark.parametrize("attention", ["eager", "sdpa", FLEX])
@pytest.mark.parametrize("do_sample", [False, True])
def test_greedy_and_sampled(model, attention, do_sample):
    model.set_attn_implementation(attention)
    equal(model, seed=3, do_sample=do_sample)
    model.set_attn_implementation("sdpa")


def test_a_repetitive_text_drafts_itself():
    model = build(LlamaForCausalLM)
    forced = {"prefix_allowed_tokens_fn": lambda row, ids: [PHRASE[len(ids) % len(PHRASE)]]}
    plain = run(model, **forced)
    assistant = SamAssistant(budget=8)
    assert torch.equal(plain, run(model, **forced, assistant=assistant))
    assert assistant.stats.last.steps <= 4


def allowed(row, ids):
    return [(int(ids[-1]) * 5 + step) % (VOCAB - 1) + 1 for step in range(20)]


PROCESSING = {
    "temperature": {"temperature": 0.4},
    "high temperature": {"temperature": 1.5},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "repetition penalty": {"repetition_penalty": 1.4},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[7], [9, 33], [21]]},
    "allowed tokens": {"prefix_allowed_tokens_fn": allowed},
    "end-of-sequence ids": {"eos_token_id": [3, 4], "min_new_tokens": 6},
    "sequence bias": {"sequence_bias": [[[11], 4.0], [[5, 9], 6.0]]},
    "all together": {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[7]],
        "prefix_allowed_tokens_fn": allowed,
    },
}
SAMPLERS = ("temperature", "top_k", "top_p", "min_p")


@pytest.mark.parametrize("options", PROCESSING.values(), ids=PROCESSING)
def test_processing(model, options):
    equal(model, seed=5, do_sample=True, **options)
    if not options.keys() & set(SAMPLERS):
        equal(model, **options)


@pytest.mark.parametrize("do_sample", [False, True])
def test_an_end_of_sequence_id_among_several(model, do_sample):
    free = run(model, do_sample=do_sample)[0, PROMPT.shape[1] :].tolist()
    ends = [free[9], free[-1]]
    plain, _ = equal(model, do_sample=do_sample, eos_token_id=ends)
    assert plain[0, -1] in ends


@pytest.mark.parametrize(("seconds", "tokens"), [(0.0, 1), (1e6, NEW_TOKENS)])
def test_max_time(model, seconds, tokens):
    plain = run(model)
    assisted = run(model, max_time=seconds, assistant=knowing(plain))
    assert torch.equal(assisted, plain[:, : PROMPT.shape[1] + tokens])


class Watch:
    """Records the prefixes and scores it is shown."""

    def __init__(self):
        self.seen = []

    def note(self, input_ids, scores):
        self.seen.append((input_ids.clone(), scores))


class WatchingCriterion(Watch, StoppingCriteria):
    """Stops after a token of a residue class, but not at once."""

    def __call__(self, input_ids, scores, **kwargs):
        self.note(input_ids, scores)
        late = input_ids.shape[1] > PROMPT.shape[1] + 9
        return (input_ids[:, -1] % 4 == 1) & late


class WatchingProcessor(Watch, LogitsProcessor):
    """Favours tokens by the prefix's length and last token."""

    def __call__(self, input_ids, scores):
        self.note(input_ids, scores.clone())
        scores = scores.clone()
        scores[:, (int(input_ids[0, -1]) + input_ids.shape[1]) % VOCAB] += 3.0
        return scores


def assert_same_views(plain, assisted):
    assert len(plain.seen) == len(assisted.seen) > 1
    for (ids, scores), (assisted_ids, assisted_scores) in zip(
        plain.seen, assisted.seen, strict=True
    ):
        assert torch.equal(ids, assisted_ids)
        if scores is None:
            assert assisted_scores is None
        else:
            torch.testing.assert_close(assisted_scores, scores, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    ("watch_class", "name"),
    [(WatchingCriterion, "stopping_criteria"), (WatchingProcessor, "logits_processor")],
)
def test_callables_of_the_caller_see_what_they_would_have_seen(model, watch_class, name, do_sample):
    plain_watch, watch = watch_class(), watch_class()
    plain = run(model, do_sample=do_sample, **{name: [plain_watch]})
    assistant = knowing(plain)
    assisted = run(model, do_sample=do_sample, **{name: [watch]}, assistant=assistant)
    assert torch.equal(plain, assisted)
    assert assistant.stats.last.accepted > 0
    assert_same_views(plain_watch, watch)


class WatchingStreamer(BaseStreamer):
    def __init__(self):
        self.values = []

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.values.append("end")


@pytest.mark.parametrize("do_sample", [False, True])
def test_streamers_get_the_prompt_then_every_token_then_the_end(model, do_sample):
    plain, assisted = WatchingStreamer(), WatchingStreamer()
    result = run(model, do_sample=do_sample, streamer=plain)
    run(model, do_sample=do_sample, streamer=assisted, assistant=knowing(result))
    assert assisted.values == plain.values
    assert assisted.values[0] == PROMPT.tolist()
    assert assisted.values[-1] == "end"
    assert len(assisted.values) == NEW_TOKENS + 2


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 8, "temperature": 0.7}])
def test_scores_and_logits(model, options):
    names = ("return_dict_in_generate", "output_scores", "output_logits")
    plain, assisted = equal(model, **options, **dict.fromkeys(names, True))
    assert type(plain) is type(assisted)
    for name in ("scores", "logits"):
        assert len(plain[name]) == len(assisted[name]) == NEW_TOKENS
        for expected, actual in zip(plain[name], assisted[name], strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def tokenizer():
    """One word per id; one of them is the word by which transformers tells how words are joined."""
    vocab = {"<pad>": 0, "<s>": 1, "abcdef": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    words = Tokenizer(WordLevel(vocab, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", unk_token="<pad>"
    )


@pytest.mark.parametrize("do_sample", [False, True])
def test_stop_strings(model, tokenizer, do_sample):
    free = run(model, do_sample=do_sample)[0].tolist()
    options = {"do_sample": do_sample, "tokenizer": tokenizer}
    options["stop_strings"] = [tokenizer.decode(free[-9:-6]), "nowhere"]
    plain, _ = equal(model, **options)
    assert plain.shape[1] < len(free)


def test_stop_strings_of_a_configuration(model, tokenizer):
    free = run(model)[0].tolist()
    config = model.generation_config.to_dict() | {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "stop_strings": tokenizer.decode(free[-9:-6]),
    }
    config = type(model.generation_config)(**config)
    options = {"tokenizer": tokenizer, "generation_config": config}
    plain = model.generate(PROMPT, **options)
    assert torch.equal(plain, model.generate(PROMPT, assistant=knowing(plain), **options))
    assert plain.shape[1] < len(free)
    assert config.stop_strings is not None


def test_pipelines(model, tokenizer):
    text = tokenizer.decode(PROMPT[0])
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer)(text, **options)
    by_call, by_pipeline = knowing(run(model)), knowing(run(model))
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert pipe(text, **options, assistant=by_call) == plain
    assert by_call.stats.last.accepted > 0
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant=by_pipeline)
    assert pipe(text, **options) == plain
    assert by_pipeline.stats.last.accepted > 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_as_custom_generate(model, do_sample):
    plain = run(model, do_sample=do_sample)
    assistant = knowing(plain)
    assert torch.equal(plain, run(model, do_sample=do_sample, custom_generate=assistant))
    assert assistant.stats.last.accepted > 0


def test_threads_share_an_assistant(model):
    prompts = [PROMPT, PROMPT.flip(1), PROMPT[:, 3:], PROMPT + 2]
    plain = [run(model, ids) for ids in prompts]
    assistant = knowing(*plain)
    found = {}

    def work(numbers):
        for i in numbers:
            ids = prompts[i % 4]
            found[i] = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                assistant=assistant,
            )

    in_threads(work, [range(k, 8, 2) for k in range(2)])
    assert sorted(found) == list(range(8))
    for i, result in found.items():
        assert torch.equal(result, plain[i % 4])
    assert assistant.stats.total.calls == 8
    assert assistant.stats.total.accepted > 0


def test_one_assistant_serves_several_models():
    assistant = SamAssistant(budget=8)
    for model_class in (LlamaForCausalLM, GPT2LMHeadModel, LlamaForCausalLM):
        model = build(model_class)
        assert torch.equal(run(model), run(model, assistant=assistant))
    assert assistant.stats.total.calls == 3


@pytest.mark.parametrize(
    "inputs",
    [{}, {"inputs": PROMPT}, {"input_ids": PROMPT[:, :1]}, {"input_ids": PROMPT, "max_length": 20}],
    ids=lambda inputs: "-".join(inputs) or "none",
)
def test_ways_to_give_the_prompt(model, inputs):
    options = {"max_length": 16} | inputs
    plain = model.generate(**options, do_sample=False)
    assistant = knowing(plain)
    assert torch.equal(plain, model.generate(**options, do_sample=False, assistant=assistant))


class BrokenStreamer(BaseStreamer):
    def put(self, value):
        raise OSError("closed")

    def end(self):
        pass


def test_a_failed_call_leaves_the_assistant_usable(model):
    plain = run(model)
    assistant = knowing(plain)
    with pytest.raises(OSError, match="closed"):
        run(model, streamer=BrokenStreamer(), assistant=assistant)
    assert torch.equal(plain, run(model, assistant=assistant))
    assert assistant.stats.total.calls == 1
