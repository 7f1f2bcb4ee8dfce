"""Hooks of the model's caller: those that only look, and those that are part of the model."""

import pytest
import torch
from transformers import BartForCausalLM, Lfm2ForCausalLM, LlamaForCausalLM, Qwen3NextForCausalLM
from transformers.generation.streamers import BaseStreamer

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host import callers_hooks
from hf_retrieval_assist.host.callers_hooks import HookWatch
from tests.support.lossless import PROMPT, build, equal, knowing, run, same


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
    model = build(LlamaForCausalLM)
    noted, head = Noted(model), model.lm_head.weight.roll(1, 0).T

    def stops(ids, scores, **kwargs):
        return torch.full((len(ids),), bool(noted.last.sum() > 9))

    for options in (
        {"logits_processor": [lambda ids, scores: scores + 0.3 * (noted.last @ head)]},
        {"stopping_criteria": [stops]},
        {"prefix_allowed_tokens_fn": lambda row, ids: [int(noted.last.argmax()) + 3, 5, 7]},
    ):
        _, _, assistant = same(model, **options)
        assert assistant.stats.last.tier == "plain"
    streams = [Streamed(noted), Streamed(noted)]
    noted.last = None
    plain = run(model, streamer=streams[0])
    noted.last = None
    run(model, streamer=streams[1], assistant=knowing(plain))
    assert streams[0].sums == streams[1].sums
    noted.handle.remove()
    equal(model, logits_processor=[lambda ids, scores: scores])


def test_hooks_that_only_look_do_not_see_the_models_test():
    model = build(LlamaForCausalLM)
    plain = run(model)
    noted = Noted(model)
    assistant = knowing(plain)
    assert run(model, assistant=assistant).tolist() == plain.tolist()
    assert assistant.stats.last.accepted > 0
    # The prompt, a step without a draft that shows what the hook does, and the call's own forwards.
    assert noted.shapes[:2] == [PROMPT.shape[1], 1]
    assert len(noted.shapes) == 1 + assistant.stats.last.forwards
    for _ in range(12):  # others in every call are no other model
        noted.handle.remove()
        noted.handle = model.model.norm.register_forward_hook(lambda *_: None)
        equal(model)


def steer_all(module, args, out):
    return out + torch.linspace(-0.5, 0.5, out.shape[-1])


def steer_single(module, args, out):
    """As activation steering does that leaves the prompt alone."""
    return out + torch.linspace(-3, 3, out.shape[-1]) if out.shape[1] == 1 else None


def steer_in_place(module, args, out):
    out[:, -1] += torch.linspace(-2, 2, out.shape[-1])


def steer_input(module, args):
    return (args[0] * torch.linspace(0.5, 1.5, args[0].shape[-1]),)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("hook", "drafts"),
    [(steer_all, True), (steer_single, False), (steer_in_place, False), (steer_input, True)],
)
def test_hooks_that_steer_are_part_of_the_model(hook, drafts, inference):
    model = build(LlamaForCausalLM)
    norm = model.model.layers[2].input_layernorm
    place = norm.register_forward_pre_hook if hook is steer_input else norm.register_forward_hook
    place(hook)
    with torch.inference_mode(inference):
        for number in range(3):
            _, _, assistant = same(model)
            # The first call finds out.
            assert (assistant.stats.last.accepted > 0) == (drafts and number > 0)


@pytest.mark.parametrize(
    "model_class", [LlamaForCausalLM, BartForCausalLM, Lfm2ForCausalLM, Qwen3NextForCausalLM]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_forward_that_raises_over_a_draft_is_repeated_without(model_class, rows, told):
    model = build(model_class)
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
    model = build(LlamaForCausalLM)
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
    model = build(LlamaForCausalLM)
    for _ in range(9):
        handle = model.register_forward_hook(lambda *_: None)
        with HookWatch(model) as watch:
            watch.learn()
        handle.remove()
    assert len(callers_hooks._kinds) <= 4
