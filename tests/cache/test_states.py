"""States beside slots go back to what plain decoding would have."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers.cache_utils import LinearAttentionLayer

from hf_retrieval_assist.cache.states import SavedStates, States

KERNEL = 3


def convolution(tokens=6):
    """A cache whose one layer convolves, behind a prompt of tokens 0, 1, …"""
    layer = LinearAttentionLayer()
    layer.update_conv_state(states(0, tokens), conv_kernel_size=KERNEL)
    layer.conv_states[0] = layer.conv_states[0][..., -KERNEL:].clone()
    return SimpleNamespace(layers=[layer], state_layers=[layer]), layer


def states(start, stop):
    return torch.arange(float(start), float(stop))[None, None]


def feed(layer, start, stop):
    layer.update_conv_state(states(start, stop), conv_kernel_size=KERNEL)


def held(layer):
    return layer.conv_states[0].flatten().tolist()


@pytest.mark.parametrize("kept", [0, 1, 4])
@pytest.mark.parametrize("dropped", [0, 1])
def test_convolutions_are_cropped(kept, dropped):
    cache, layer = convolution()
    cropped = States(cache)
    cropped.begin(undo=True)
    feed(layer, 6, 10)
    assert cropped.keep(kept, 4) == kept
    # Before the next forward.
    cropped.begin(undo=False)
    last = 6 + kept
    feed(layer, last, last + 2)
    assert cropped.keep(2, 2) == 2
    cropped.finish(dropped)
    stop = last + 2 - dropped
    assert held(layer) == [stop - 3.0, stop - 2.0, stop - 1.0]
    assert not layer.record_past


@pytest.mark.parametrize("reached", [False, True])
def test_an_interrupted_convolution_goes_back(reached):
    cache, layer = convolution()
    cropped = States(cache)
    cropped.begin(undo=True)
    if reached:
        feed(layer, 6, 9)
    cropped.undo(feeding=True)
    cropped.finish(0)
    assert held(layer) == [3.0, 4.0, 5.0]
    assert not layer.record_past


def test_what_cannot_be_cropped_is_refused():
    layer = SimpleNamespace(is_croppable=False)
    with pytest.raises(ValueError, match="cannot be cropped"):
        States(SimpleNamespace(layers=[layer], state_layers=[layer]))


@pytest.fixture
def recurrent():
    """A cache of one layer with a recurrent state, which adds up what it is fed."""
    return Mock(layers=[SimpleNamespace(total=torch.tensor(10.0))])


def test_recurrences_go_back_as_a_whole(recurrent):
    layer = recurrent.layers[0]
    saved = SavedStates(recurrent)
    saved.begin(undo=True)
    layer.total += 5
    assert saved.keep(3, 5) == 0
    assert layer.total == 10
    saved.begin(undo=True)
    layer.total += 7
    assert saved.keep(4, 4) == 4
    assert layer.total == 17
    # A forward without drafts is kept, and nothing is copied for it.
    saved.begin(undo=False)
    layer.total += 1
    assert saved.keep(1, 1) == 1
    assert layer.total == 18


def test_a_long_backlog_is_fed_without_drafts(recurrent):
    saved = SavedStates(recurrent)
    for tokens, full in ((15, False), (16, True), (20, True)):
        saved.begin(undo=True)
        saved.keep(tokens, tokens + 1)
        assert saved.full == full
    saved.begin(undo=False)
    saved.keep(20, 20)
    assert not saved.full


@pytest.mark.parametrize("undo", [True, False])
@pytest.mark.parametrize("feeding", [True, False])
def test_an_interrupted_recurrence_goes_back_or_is_forgotten(recurrent, feeding, undo):
    layer = recurrent.layers[0]
    saved = SavedStates(recurrent)
    saved.begin(undo)
    layer.total += 5
    if not feeding:
        saved.keep(1, 1)
    saved.undo(feeding)
    assert recurrent.forget.called == (feeding and not undo)
    if undo:
        assert layer.total == (10 if feeding else 15)
