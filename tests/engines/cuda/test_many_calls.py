"""What many calls record, launch, copy and hold, where a recorder stands for CUDA graphs."""

import gc

import pytest
import torch
from transformers import Gemma3ForCausalLM, LlamaForCausalLM, MixtralForCausalLM

from hf_retrieval_assist import release_memory
from hf_retrieval_assist.cache.blocks import Block, OwnTensors
from hf_retrieval_assist.decoding.loop import Generation
from hf_retrieval_assist.engines.cuda.arena import Arena, capacity_bucket
from hf_retrieval_assist.engines.cuda.fixed_verifier import WIDTHS
from hf_retrieval_assist.engines.cuda.packed_buffer import PackedBuffer
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES
from hf_retrieval_assist.host import transformers_private as private
from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.lossless import build, run
from tests.support.memories import remembering
from tests.support.op_recorder import few_tokens, serve_in_place
from tests.support.tiny_models import VOCAB
from tests.support.watching import calls_of, results_of

pytestmark = pytest.mark.slow


@pytest.fixture
def assistant(monkeypatch):
    serve_in_place(monkeypatch)
    return remembering(budget=15, reroute=False)


@pytest.mark.parametrize("model_class", [LlamaForCausalLM, MixtralForCausalLM])
def test_chats_record_each_width_once_and_launch_once_a_step(model_class, assistant, monkeypatch):
    """200 calls, of 14 turns a chat, whose texts grow; a step is one copy each way."""
    monkeypatch.setattr(MixtralForCausalLM, "_optimize_model_for_decode", few_tokens)
    copies = [calls_of(monkeypatch, PackedBuffer, name) for name in ("send", "fetch")]
    model, calls, taken = build(model_class, max_position_embeddings=1024), [], set()
    step, words, text = Generation.step, torch.Generator().manual_seed(0), None

    def watched(generation):
        before = [*map(len, copies)]
        step(generation)
        taken.add(tuple(len(made) - count for made, count in zip(copies, before, strict=True)))

    monkeypatch.setattr(Generation, "step", watched)
    for turn in range(200):
        said = torch.randint(2, VOCAB, (1, 12), generator=words)
        text = torch.cat([text, said], 1) if turn % 14 else said
        text = run(model, text, max_new_tokens=12, assistant=assistant)
        calls.append(assistant.stats.last)
    assert taken == {(1, 1)}
    (_,), made, _, faults = WORKSPACES.report(model)
    assert not faults
    assert 2 <= made == sum(call.recordings for call in calls) <= 5
    # A width is computed when it is recorded, and again when it is compared.
    assert sum(call.forwards - call.repeated for call in calls) <= 2 * made
    assert sum(call.repeated for call in calls) > 1000


def alive():
    """Bytes of the keys and values of all calls, wherever they are."""
    found = [one for one in gc.get_objects() if type(one) in (Arena, Block, OwnTensors)]
    tensors = [x for one in found if type(one) is Arena for x in one._groups]
    tensors += [one.states for one in found if type(one) is Block]
    own = [one for one in found if type(one) is OwnTensors and not one.is_empty]
    tensors += [states for one in own for states in (one.keys, one.values)]
    storages = [x.untyped_storage() for x in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def test_static_buffers_and_recordings_are_given_back(assistant):
    gc.collect()
    others = alive()
    model = build()
    plain = run(model, max_new_tokens=40)
    for _ in range(3):
        assert torch.equal(run(model, max_new_tokens=40, assistant=assistant), plain)
    assert assistant.stats.last.repeated > 0
    assert alive() > others
    release_memory(model)
    gc.collect()
    assert alive() == others
    assert not WORKSPACES.report(model).idle
    assert torch.equal(run(model, max_new_tokens=40, assistant=assistant), plain)
    assert assistant.stats.last.recordings > 0


@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Gemma3ForCausalLM])
def test_calls_of_growing_length_hold_what_one_of_them_needs(model_class, assistant, monkeypatch):
    """While they run and after: plain decoding's slots, 256 more and an eighth, and 512 behind a
    window."""
    # Long texts and large models are like this.
    for name in (
        "arena._MOST_ROOMY",
        "workspace._MOST_IDLE_BYTES",
        "workspace.WORKSPACES.most_bytes",
    ):
        monkeypatch.setattr(f"hf_retrieval_assist.engines.cuda.{name}", 0)
    gc.collect()
    model, others = build(model_class, max_position_embeddings=8192), alive()

    def measured(*_):
        return alive() - others

    first = results_of(monkeypatch, private, "prefill", measured)
    seen = results_of(monkeypatch, Generation, "step", measured)
    for length in range(1000, 2000, 100):
        text, options = torch.randint(2, VOCAB, (1, length)), {"max_new_tokens": 4}
        layers = run(model, text, return_dict_in_generate=True, **options)[CACHE].layers
        plain = [layer.keys.nbytes + layer.values.nbytes for layer in layers]
        capacity, held, near = capacity_bucket(length + 4 + WIDTHS[-1]), 0, 0
        for layer, nbytes in zip(layers, plain, strict=True):
            slots = layer.keys.shape[2]
            room = capacity_bucket(slots + 1 + 512) if layer.is_sliding else capacity
            held += nbytes // slots * room
            near += nbytes * layer.is_sliding
        first.clear()
        seen.clear()
        run(model, text, assistant=assistant, **options)
        assert alive() - others == held
        # Layers with a window begin in memory of their own.
        assert max(first + seen) <= held + near
        if not near:
            assert held < 1.45 * sum(plain)
