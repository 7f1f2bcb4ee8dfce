"""Hooks of the model's caller: those that only look, and those that are part of the model."""

import itertools
from functools import partial

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.generation.streamers import BaseStreamer
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host import callers_hooks
from hf_retrieval_assist.host.callers_hooks import HookWatch
from tests.support.lossless import PROMPT, build, equal, knowing, run, same
from tests.support.quick import cases, crossed

TENTH = PROMPT.shape[1] + 10


class Noted:
    """What a hook of the caller's keeps of forwards."""

    def __init__(self, model):
        self.shapes, self.last = [], None
        self.handle = model.model.norm.register_forward_hook(self.note)

    def note(self, module, args, out):
        self.shapes.append(out.shape[1])
        self.last = out[:, -1]


class Streamed(BaseStreamer):
    def __init__(self, noted):
        self.noted, self.sums = noted, []

    def put(self, value):
        if self.noted.last is not None:
            self.sums.append(float(self.noted.last.sum()))

    def end(self):
        pass


def test_processors_criteria_and_streamers_that_read_what_hooks_note():
    model = build()
    noted, head = Noted(model), model.lm_head.weight.roll(1, 0).T

    def stops(ids, scores, **kwargs):
        return torch.full((len(ids),), bool(noted.last.sum() > 9))

    for options in (
        {"logits_processor": [lambda ids, scores: scores + 0.3 * (noted.last @ head)]},
        {"stopping_criteria": [stops]},
        {"prefix_allowed_tokens_fn": lambda row, ids: [int(noted.last.argmax()) + 3, 5, 7]},
    ):
        same(model, tier="plain", **options)
    streams = [Streamed(noted), Streamed(noted)]
    noted.last = None
    plain = run(model, streamer=streams[0])
    noted.last = None
    run(model, streamer=streams[1], assistant=knowing(plain))
    assert streams[0].sums == streams[1].sums
    noted.handle.remove()
    equal(model, logits_processor=[lambda ids, scores: scores])


def test_hooks_that_only_look_do_not_see_the_models_test():
    model = build()
    plain = run(model)
    noted = Noted(model)
    assistant = knowing(plain)
    assert run(model, assistant=assistant).tolist() == plain.tolist()
    assert assistant.stats.last.accepted > 0
    # The prompt, a step without a draft that shows what the hook does, and the call's own forwards.
    assert noted.shapes[:2] == [PROMPT.shape[1], 1]
    assert len(noted.shapes) == 1 + assistant.stats.last.forwards


def steer_all(module, args, out):
    return out + torch.linspace(-0.5, 0.5, out.shape[-1])


def steer_single(module, args, out):
    """Activation steering that leaves the prompt alone does so."""
    return out + torch.linspace(-3, 3, out.shape[-1]) if out.shape[1] == 1 else None


def steer_in_place(module, args, out):
    out[:, -1] += torch.linspace(-2, 2, out.shape[-1])


def steer_input(module, args):
    return (args[0] * torch.linspace(0.5, 1.5, args[0].shape[-1]),)


# The tiers: tree, chain, convolutions, replay.
RAISING = ["LlamaForCausalLM", "BartForCausalLM", "Lfm2ForCausalLM", "Qwen3NextForCausalLM"]


@pytest.mark.parametrize(("name", "rows"), cases(crossed(RAISING, [3, 1]), 1))
def test_a_forward_that_raises_over_a_draft_is_repeated_without(name, rows, told):
    model = build(name)
    ids = torch.cat([PROMPT, PROMPT.flip(1), PROMPT.roll(3, 1)])[:rows]
    plain = run(model, ids)
    run(model, ids, assistant=knowing(plain))
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))

    def expect_one(module, args):
        if args[0].shape[-2] not in (1, ids.shape[1]):
            raise ValueError("expected one token")

    blocks[1].register_forward_pre_hook(expect_one)
    assistant = SamAssistant(plain.tolist(), budget=4)
    assert run(model, ids, assistant=assistant).tolist() == plain.tolist()
    assert assistant.stats.last.accepted == 0
    assert "expected one token" in told.text
    # Rows that are left when others have ended are not fed behind one another either.
    late = plain[0, -3].item()
    options = {"eos_token_id": late, "return_dict_in_generate": True}
    shorter = run(model, ids, **options).sequences
    for helper in (assistant, SamAssistant()):
        found = run(model, ids, **options, assistant=helper).sequences
        assert found.tolist() == shorter.tolist()


def test_hooks_stand_as_they_stood_after_a_watch():
    model = build()
    hooks = [lambda *_: None, lambda *_: None]
    layer = model.model.layers[0]
    handles = [layer.register_forward_hook(hook) for hook in hooks]
    with HookWatch(model), HookWatch(model, muted=True):
        handles[0].remove()
        late = layer.register_forward_hook(hooks[0])
    assert [*layer._forward_hooks.values()] == [hooks[1], hooks[0]]
    late.remove()
    assert [*layer._forward_hooks.values()] == [hooks[1]]


def test_what_is_known_of_hooks_is_bounded(monkeypatch):
    monkeypatch.setattr(callers_hooks, "_MOST_KNOWN", 4)
    model = build()
    for _ in range(9):
        handle = model.register_forward_hook(lambda *_: None)
        with HookWatch(model) as watch:
            watch.learn()
        handle.remove()
    assert len(callers_hooks._kinds) <= 4


class Looking:
    """What only looks, in the ways in which that is written."""

    def __init__(self):
        self.noted, self.by_name, self.calls, self.last = [], {}, 0, None

    def note(self, module, args, output):
        self.calls += 1
        if isinstance(output, tuple):
            output = output[0]
        self.last, self.by_name["layer"] = output, output.detach()

    @torch.no_grad()
    def decorated(self, module, args, output):
        self.noted.append(output.norm())

    def counted(self, *_):
        self.calls += 1

    def handed_on(self, module, args, output):
        self.noted.append(output)
        return output


LOOKING = {
    "a lambda": lambda m, x: m.model.layers[1].register_forward_hook(
        lambda _, args, out: x.noted.append(out)
    ),
    "a method": lambda m, x: m.model.layers[1].register_forward_hook(x.note),
    "a decorated method": lambda m, x: m.model.layers[1].mlp.register_forward_hook(x.decorated),
    "returns what it is shown": lambda m, x: m.model.norm.register_forward_hook(x.handed_on),
    "counts forwards": lambda m, x: m.register_forward_hook(x.counted),
    "counts forwards, keywords": lambda m, x: m.register_forward_hook(x.counted, with_kwargs=True),
    "all modules, before": lambda m, x: register_module_forward_pre_hook(
        lambda _, args: x.noted.append(args)
    ),
    "all modules": lambda m, x: register_module_forward_hook(lambda *_: None),
}


STEERING = {
    "steers": lambda m, _: m.model.layers[2].input_layernorm.register_forward_hook(steer_all),
    "steers inputs": lambda m, _: m.model.layers[2].mlp.register_forward_pre_hook(steer_input),
}
STEERING_AT_TIMES = {
    "steers single": lambda m, _: m.model.norm.register_forward_hook(steer_single),
    "steers in place": lambda m, _: m.model.norm.register_forward_hook(steer_in_place),
    "steers all modules of a kind": lambda m, _: register_module_forward_pre_hook(
        lambda module, args: (args[0].flip(-1),) if type(module) is LlamaMLP else None
    ),
}
HOOKS = LOOKING | STEERING | STEERING_AT_TIMES


QUICK = [("a method", True), ("steers", False)]


@pytest.mark.parametrize(("name", "inference"), cases(crossed(HOOKS, [False, True]), QUICK))
def test_hooks_that_look_leave_calls_assisted_and_hooks_that_steer_belong_to_the_model(
    name, inference
):
    model = build()
    unhooked, handle = run(model), HOOKS[name](model, Looking())
    try:
        with torch.inference_mode(inference):
            for number in range(3):
                plain, _, assistant = same(model)
                # The first call finds out that a hook steers.
                drafts = name in LOOKING or (name in STEERING and number > 0)
                assert (assistant.stats.last.accepted > 0) == drafts
    finally:
        handle.remove()
    assert torch.equal(plain, unhooked) == (name in LOOKING)
    equal(model)


PUSH = torch.linspace(-3, 3, 32)


class Late:
    """Begins to steer late, or steers by what it keeps, in the ways in which that is written."""

    def __init__(self):
        self.calls, self.noted, self.count = 0, [], itertools.count()
        self.mean, self.tensor = torch.zeros(32), torch.zeros(())

    def counts(self, module, args, out):
        self.calls += 1
        return out + PUSH if self.calls > 5 else None

    def notes(self, module, args, out):
        self.noted.append(out)
        return out + PUSH if len(self.noted) > 5 else None

    def hands_on(self, module, args, out):
        self.tensor += 1
        if self.tensor > 5:
            out = out + PUSH
        return out

    def delegates(self, module, args, out):
        return self.counts(module, args, out)

    def iterates(self, module, args, out):
        return out + PUSH * (next(self.count) > 5)

    def follows(self, module, args, out):
        self.mean = 0.7 * self.mean + 0.3 * out[0, -1]
        return out + 3 * self.mean

    def in_place(self, module, args, out):
        self.calls += 1
        if self.calls > 5:
            out += PUSH

    def in_data(self, module, args, out):
        self.noted.append(1)
        if len(self.noted) > 5:
            out.data[:] = out + PUSH

    def in_columns(self, module, args, out):
        self.noted.append(1)
        if len(self.noted) > 5:
            out.data[:, :] = out + PUSH

    def by_content(self, module, args, out):
        return out + PUSH if out.shape[1] == 1 and out[0, 0, 0] > 0 else None

    def draws(self, module, args, out):
        return out + torch.randn_like(out)

    @torch.no_grad()
    def decorated(self, module, args, out):
        return self.counts(module, args, out)


LATE = [name for name in vars(Late) if name[0] != "_"]


@pytest.mark.parametrize(("name", "sampled"), cases(crossed(LATE, [True, False]), 2))
def test_hooks_that_steer_late_or_by_what_they_keep(name, sampled):
    model, late = build(), Late()
    options = {"do_sample": sampled}
    unhooked = run(model, **options)
    layer = model.model.layers[1].mlp
    layer.register_forward_hook(getattr(late, name))
    for _ in range(3):
        texts = []
        for assistant in ({}, {"assistant": knowing(unhooked)}):
            late.__init__()
            texts.append(run(model, **options, **assistant))
        assert torch.equal(*texts)
        assert not torch.equal(texts[0], unhooked)


def test_a_hook_that_begins_to_write_is_noticed_in_a_drafted_forward():
    """Not foreseen from its code, which another function's is."""
    model, lengths = build(), []

    def write(out):
        if lengths[-1] >= TENTH:
            out.data.mul_(-1)

    rotary, mlp = model.model.rotary_emb, model.model.layers[1].mlp
    rotary.register_forward_pre_hook(
        lambda _, args, given: lengths.append(int(given["position_ids"].max())), with_kwargs=True
    )
    unhooked = run(model)
    mlp.register_forward_hook(lambda module, args, out: write(out))
    for number in range(2):
        plain, _, assistant = same(model, assistant=partial(knowing, budget=3))
        assert (assistant.stats.last.accepted > 0) == (number == 0)
    assert not torch.equal(plain, unhooked)


def half(model, name, part):
    """A model in bfloat16 but for one part."""
    model.bfloat16()
    setattr(model.model if hasattr(model.model, name) else model, name, part.float())


def cast_inputs_and_keywords(model):
    half(model, "lm_head", model.lm_head)

    def cast(module, args, kwargs):
        if args:
            return (args[0].float(), *args[1:]), kwargs
        return args, {name: value.float() for name, value in kwargs.items()}

    model.lm_head.register_forward_pre_hook(cast, with_kwargs=True)


def cast_there_and_back(model):
    first = model.model.layers[1].mlp
    model.bfloat16()
    first.float()
    first.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    first.register_forward_hook(lambda module, args, out: out.bfloat16())


def cast_embeddings(model):
    half(model, "embed_tokens", model.model.embed_tokens)
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out.bfloat16())


def repair(model):
    model.model.layers[1].mlp.down_proj.weight.data[0] = torch.nan
    model.model.layers[1].mlp.register_forward_hook(lambda _, args, out: out.nan_to_num())


def cast_weights(model):
    """It changes nothing that it is shown, and is needed in every forward."""

    def there(module, args):
        module.to(args[0].dtype)

    def back(module, args, out):
        module.float()

    half(model, "lm_head", model.lm_head)
    model.lm_head.register_forward_pre_hook(there)
    model.lm_head.register_forward_hook(back)


NEEDED = [cast_there_and_back, cast_inputs_and_keywords, cast_embeddings, repair, cast_weights]


@pytest.mark.parametrize("change", cases(NEEDED))
def test_hooks_without_which_a_model_fails_are_part_of_it(change):
    model = build()
    change(model)
    noted = Noted(model)
    for _ in range(4):
        noted.shapes.clear()
        _, _, assistant = same(model, max_new_tokens=8)
        if change is not cast_weights:  # the hook that only looks sees no test
            assert noted.shapes[:8] == [PROMPT.shape[1]] + [1] * 7
    if change is cast_embeddings:  # what float32 is computed from is rounded, which decides tokens
        assert "move in steps" in assistant.stats.last.reason
    elif change is cast_weights:  # what each forward leaves is computed from what the last one left
        assert "writes to its own tensors" in assistant.stats.last.reason
    else:
        assert assistant.stats.last.accepted > 0
