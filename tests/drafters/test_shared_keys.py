"""Drafts from the target's own keys and values: transformers' candidates, and trees of the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.generation.candidate_generator import (
    SinglePositionMultiTokenCandidateGenerator,
)

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.drafters.shared_keys import SharedKeysDrafter
from hf_retrieval_assist.target import host
from tests.feature_following import TEXT, features_of, seen, session_of
from tests.lossless import build, run
from tests.shared_key_models import FAMILIES, key_reader, layers_that_all_reuse, sharing_target
from tests.tiny_models import VOCAB, WINDOW

STEPS = 4


@pytest.fixture(autouse=True)
def _layers_that_all_reuse() -> Iterator[None]:
    with layers_that_all_reuse():
        yield


@pytest.fixture(scope="module")
def gemma() -> Any:
    return sharing_target()


@pytest.fixture(scope="module")
def reader() -> Any:
    with layers_that_all_reuse():
        return key_reader()


def candidates(target: Any, reader: Any, length: int) -> list[int]:
    """What transformers' generator drafts behind a text of which all but the last was processed."""
    generator = SinglePositionMultiTokenCandidateGenerator(
        reader,
        target.get_input_embeddings(),
        transformers.GenerationConfig(max_length=len(TEXT) + 2 * STEPS),
    )
    with torch.no_grad():
        outputs = target(
            torch.tensor([TEXT[: length - 1]]),
            output_hidden_states=True,
            return_shared_kv_states=True,
        )
        ids, _ = generator.get_candidates(
            torch.tensor([TEXT[:length]]),
            {"attention_mask": torch.ones(1, length, dtype=torch.long)},
            outputs,
            is_first_iteration=False,
            n_last_matches=0,
        )
    return ids[0, length:].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("target_changes", "reader_changes"),
    [
        ({}, {}),
        ({}, {"ordered": True}),
        ({"global_head_dim": 16}, {"global_head_dim": 16}),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 1},) * 2,
        ({"shared": 3}, {}),
    ],
    ids=["plain", "ordered", "wide", "values are keys", "three share"],
)
def test_the_chain_is_transformers_own(
    family: str, target_changes: dict[str, Any], reader_changes: dict[str, Any]
) -> None:
    target = sharing_target(family, **target_changes)
    reader = key_reader(family, **reader_changes)
    drafter = SharedKeysDrafter(reader, top_k=1, depth=STEPS - 1, min_prob=0.0)
    features = features_of(target, drafter.needs.hidden_layers)
    session, known = session_of(drafter, target, TEXT[:3]), 3
    session.commit(TEXT[3:4], seen(features[:3]))
    for length in range(4, len(TEXT)):
        assert session.propose(STEPS).token_ids.tolist() == candidates(target, reader, length)
        session.commit(TEXT[length : length + 1], seen(features[known : known + 1]))
        known += 1
    assert known > 3 * WINDOW


def test_every_node_of_a_tree_continues_its_path(gemma: Any, reader: Any) -> None:
    """Against the model run along each path alone."""
    drafter = SharedKeysDrafter(reader, top_k=3, depth=2, min_prob=0.0)
    features = features_of(gemma, drafter.needs.hidden_layers)
    session = session_of(drafter, gemma, TEXT[:20])
    session.commit(TEXT[20:21], seen(features[:20]))
    tree = session.propose(24)
    tree.check_invariants()
    assert not tree.is_chain
    with torch.no_grad():
        outputs = gemma(torch.tensor([TEXT[:20]]), return_shared_kv_states=True)
    for node in range(len(tree)):
        hidden, prob, token = features[None, 19:20, -32:], 1.0, TEXT[20]
        for above in tree.path(node):
            embedded = gemma.get_input_embeddings()(torch.tensor([[token]]))
            with torch.no_grad():
                output = reader(
                    inputs_embeds=torch.cat([embedded, hidden], dim=-1),
                    position_ids=torch.tensor([[20]]),
                    shared_kv_states=outputs.shared_kv_states,
                )
            token, hidden = int(tree.token_ids[above]), output.last_hidden_state
            prob *= float(output.logits[0, 0].softmax(-1)[token])
        assert tree.probs[node] == pytest.approx(prob, rel=1e-3)


def test_padded_rows(gemma: Any, reader: Any) -> None:
    ids = torch.tensor([[0, 0, 0, 5, 9, 33, 21], [60, 7, 44, 5, 9, 33, 21]])
    mask = (ids > 0).long()
    options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    expected = gemma.generate(ids, **options)
    assistant = Assistant([SharedKeysDrafter(reader)], budget=8)
    assert gemma.generate(ids, assistant=assistant, **options).tolist() == expected.tolist()
    assert assistant.stats.total.drafted > 0


def test_several_turns(gemma: Any, reader: Any) -> None:
    """The cache of one turn is the next one's, whose prefill shows the new tokens only."""
    assistant = Assistant([SharedKeysDrafter(reader)], budget=8)
    results = []
    for helper in ({}, {"assistant": assistant}):
        cache = transformers.DynamicCache(config=gemma.config)
        ids = torch.tensor([TEXT[:9]])
        for turn in range(3):
            ids = run(gemma, ids, past_key_values=cache, max_new_tokens=8, **helper)
            ids = torch.cat([ids, torch.tensor([TEXT[9 + turn :][:3]])], dim=1)
        results.append(ids.tolist())
    assert results[0] == results[1]
    assert assistant.stats.total.drafted > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": 64}, "target's hidden size of 32, got one for 64"),
        ({"global_head_dim": 16}, "full_attention keys of 2 heads of 8, got one for 2 heads of 16"),
        (
            {"num_key_value_heads": 4},
            "sliding_attention keys of 2 heads of 8, got one for 4 heads of 8",
        ),
    ],
)
def test_one_for_another_target_is_refused(
    gemma: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(gemma, assistant=SamAssistant(fallback=key_reader(**changes)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LlamaForCausalLM", "whose layers share keys and values .* got LlamaForCausalLM"),
        ("Gemma3nForCausalLM", "one residual stream .* got Gemma3nForCausalLM"),
    ],
)
def test_a_target_without_such_keys_is_refused_before_it_runs(
    reader: Any, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build(getattr(transformers, name))
    monkeypatch.setattr(host, "prefill", lambda *_, **__: pytest.fail("generation began"))
    with pytest.raises(ValueError, match=message):
        run(target, assistant=SamAssistant(fallback=reader))


def test_other_models_are_refused(gemma: Any, reader: Any) -> None:
    with pytest.raises(ValueError, match="names backbone_hidden_size, got Gemma4ForCausalLM"):
        SharedKeysDrafter(gemma)
    with pytest.raises(ValueError, match="top_k: expected at least 1, got 0"):
        SharedKeysDrafter(reader, top_k=0)
    with pytest.raises(ValueError, match="expected the target model, got none"):
        SharedKeysDrafter(reader).start(np.array([3], np.int32), Target(VOCAB))
