"""Recorded outputs of forwards made by hand."""

from types import SimpleNamespace

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from hf_retrieval_assist.decoding.recorder import OutputRecorder
from hf_retrieval_assist.row_text import RowText
from hf_retrieval_assist.verification.slot_layers import RowSlots, SlotLayer
from hf_retrieval_assist.verification.verified import Verified


def row_of(index):
    return RowText(index, torch.tensor([1]), 4)


def recorder(rows=1, **wanted):
    return OutputRecorder(GenerationConfig(return_dict_in_generate=True, **wanted), rows)


def test_scores_by_step_with_zeros_behind_a_finished_row():
    outputs = recorder(2, output_scores=True)
    rows = [row_of(0), row_of(1)]
    for values in ([1.0, 4.0], [2.0], [3.0]):
        scores = torch.tensor(values)[:, None].expand(-1, 3)
        outputs.tokens(rows[: len(values)], scores, torch.zeros_like(scores))
    result = outputs.result(torch.zeros(2, 4), None, None, 3)
    assert [entry[:, 0].tolist() for entry in result.scores] == [[1.0, 4.0], [2.0, 0.0], [3.0, 0.0]]
    assert result.logits is None


def test_nothing_is_recorded_that_nobody_wants():
    outputs = OutputRecorder(GenerationConfig(output_scores=True), 1)
    assert not outputs.wants_tokens
    sequences = torch.zeros(1, 4)
    assert outputs.result(sequences, None, None, 3) is sequences


def forward(width, kept):
    """States that name their token: hidden state k of token k, attention 100 * query + key."""
    hidden = torch.arange(width, dtype=torch.float32)[None, :, None]
    keys = torch.arange(kept + width)
    attention = (100 * torch.arange(width)[:, None] + keys)[None, None].float()
    return ModelOutput(
        logits=torch.zeros(1, width, 2), hidden_states=(hidden,), attentions=(attention,)
    )


def test_states_of_accepted_tokens():
    outputs = recorder(output_hidden_states=True, output_attentions=True)
    cache = SimpleNamespace(layers=[SlotLayer(RowSlots([3]))])
    # A pending token, the root, and nodes of which the second and the fourth are accepted.
    shown = forward(width=6, kept=3)
    outputs.step(Verified(shown.logits, [1], shown), [0, 2, 4], cache)
    result = outputs.result(torch.zeros(1, 9), None, None, 3)
    assert [float(layers[0]) for layers in result.hidden_states] == [1.0, 3.0, 5.0]
    attentions = [layers[0].flatten().tolist() for layers in result.attentions]
    assert attentions[0] == [100.0 + key for key in (0, 1, 2, 3, 4)]
    assert attentions[1] == [300.0 + key for key in (0, 1, 2, 3, 4, 6)]
    assert attentions[2] == [500.0 + key for key in (0, 1, 2, 3, 4, 6, 8)]


def test_attentions_of_a_window():
    outputs = recorder(output_attentions=True)
    cache = SimpleNamespace(layers=[SlotLayer(RowSlots([3]), window=2)])
    shown = forward(width=2, kept=3)
    outputs.step(Verified(shown.logits, [0], shown), [0, 1], cache)
    result = outputs.result(torch.zeros(1, 9), None, None, 2)
    assert [layers[0].flatten().tolist() for layers in result.attentions] == [
        [2.0, 3.0],
        [103.0, 104.0],
    ]


def test_attentions_of_a_prompt_that_goes_on_from_a_cache():
    outputs = recorder(output_attentions=True)
    cache = SimpleNamespace(layers=[SlotLayer(RowSlots([5]), window=3), SlotLayer(RowSlots([5]))])
    shown = forward(width=2, kept=5)
    shown["attentions"] = shown.attentions * 2
    outputs.prefill(shown, cache)
    sliding, whole = outputs.result(torch.zeros(1, 9), None, None, 1).attentions[0]
    # Two tokens before the prompt are in the window of its first token.
    assert sliding[0, 0].tolist() == [[3.0, 4.0, 5.0, 6.0], [103.0, 104.0, 105.0, 106.0]]
    assert whole.shape[-1] == 7


def test_hidden_states_of_parallel_streams():
    outputs = recorder(output_hidden_states=True)
    shown = forward(width=3, kept=3)
    shown["hidden_states"] = (shown.hidden_states[0].repeat(4, 1, 1, 1),)
    cache = SimpleNamespace(layers=[])
    outputs.step(Verified(shown.logits, [0], shown), [0, 2], cache)
    states = outputs.result(torch.zeros(1, 9), None, None, 2).hidden_states
    assert [layers[0].flatten().tolist() for layers in states] == [[0.0] * 4, [2.0] * 4]


def test_more_was_recorded_than_the_text_keeps():
    outputs = recorder(output_hidden_states=True)
    shown = forward(width=4, kept=3)
    cache = SimpleNamespace(layers=[])
    outputs.prefill(shown, cache)
    outputs.step(Verified(shown.logits, [0], shown), [0, 1, 2], cache)
    assert len(outputs.result(torch.zeros(1, 4), None, None, 2).hidden_states) == 2
