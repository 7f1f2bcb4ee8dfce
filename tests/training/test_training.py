"""Heads trained on tiny targets: they learn, survive interruptions, and are read by loaders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import DynamicCache, PreTrainedTokenizerFast, TrainerCallback, set_seed

from hf_retrieval_assist import Assistant, EagleHead, MtpHead
from hf_retrieval_assist.cli import main
from hf_retrieval_assist.cli.values import read_records
from hf_retrieval_assist.draft_models.eagle import EagleDrafter
from hf_retrieval_assist.draft_models.mtp import MtpDrafter
from hf_retrieval_assist.drafters.base import Drafter, Target
from hf_retrieval_assist.training import trainer
from hf_retrieval_assist.training.data import (
    Example,
    ExampleDataset,
    Supervisor,
    choose_draft_ids,
    collate,
    examples_of_prompts,
    examples_of_texts,
    open_feature_cache,
)
from hf_retrieval_assist.training.evaluation import mean_accepted_tokens
from hf_retrieval_assist.training.trainer import KINDS, HeadTraining, UnrolledHead, train_head
from tests.support.eagle_fixtures import tiny_target
from tests.support.feature_following import features_of, seen

VOCAB = 64
SHORT = {"use_cpu": True, "disable_tqdm": True, "logging_steps": 1000}


@pytest.fixture(scope="module")
def target() -> torch.nn.Module:
    """A target with habits: what follows a token hangs mostly, not only, on that token."""
    model = tiny_target(32, num_layers=4, vocab_size=VOCAB)
    successor = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))
    embeddings = torch.nn.functional.normalize(torch.randn(VOCAB, 32), dim=-1)
    model.model.embed_tokens.weight.copy_(3 * embeddings)
    model.lm_head.weight[successor] = embeddings
    return model


@pytest.fixture(scope="module")
def texts(target: torch.nn.Module) -> list[list[int]]:
    prompts = torch.randint(VOCAB, (72, 4), generator=torch.Generator().manual_seed(6))
    torch.manual_seed(7)
    sampling = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    return target.generate(prompts, max_new_tokens=36, **sampling).tolist()


def plan(steps: int = 3, kind: str = "eagle3", **arguments: Any) -> HeadTraining:
    arguments = {**SHORT, "max_steps": steps, **arguments}
    return HeadTraining(kind, steps=3, arguments=arguments)


def drafter_of(head: Any) -> Drafter:
    sizes: dict[str, Any] = {"top_k": 4, "depth": 3, "total": 12, "min_prob": 0.0}
    if isinstance(head, MtpHead):
        return MtpDrafter(head=head, **sizes)
    return EagleDrafter(head, **sizes)


def requests(texts: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], Sequence[int]]]:
    return [(text[:8], text[8:]) for text in texts]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def returned(
    kind: str,
    target: torch.nn.Module,
    texts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Any, Path]:
    """A trained head, and the folder where it was saved."""
    folder = tmp_path_factory.mktemp("trained")
    arguments = {"learning_rate": 3e-3, "save_strategy": "no"}
    return train_head(target, texts[:64], folder, plan(120, kind, **arguments)), folder


@pytest.fixture(scope="module")
def trained(kind: str, returned: tuple[Any, Path], target: torch.nn.Module) -> Any:
    """The head, loaded again."""
    return KINDS[kind].from_pretrained(returned[1], target)


def test_a_trained_head_accepts_clearly_more(
    kind: str, trained: Any, target: torch.nn.Module, texts: list[list[int]]
) -> None:
    fresh = KINDS[kind].for_target(target)
    before = mean_accepted_tokens(drafter_of(fresh), target, requests(texts[64:]))
    after = mean_accepted_tokens(drafter_of(trained), target, requests(texts[64:]))
    print(f"mean accepted tokens: {before:.2f} untrained, {after:.2f} trained")
    assert after > before + 0.5


def test_a_saved_head_drafts_the_same(
    returned: tuple[Any, Path], trained: Any, target: Any, texts: list[list[int]]
) -> None:
    trees = []
    for head in (returned[0], trained):
        drafter = drafter_of(head)
        features = features_of(target, drafter.needs.hidden_layers, texts[70][:19])
        session = drafter.start(np.array(texts[70][:19], np.int32), Target(VOCAB, model=target))
        session.commit(texts[70][19:20], seen(features))
        trees.append(session.propose(11))
    assert len(trees[0]) == 11
    assert trees[0].token_ids.tolist() == trees[1].token_ids.tolist()
    np.testing.assert_allclose(trees[0].probs, trees[1].probs, rtol=1e-5)


def test_the_target_learns_nothing(kind: str, texts: list[list[int]], tmp_path: Path) -> None:
    """Not even where its own weights are trainable."""
    model = tiny_target(32, num_layers=3, vocab_size=VOCAB).requires_grad_(True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    head = train_head(model, texts[:4], tmp_path, plan(1, kind))
    assert all(torch.equal(before[name], found) for name, found in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(p.requires_grad for p in head.parameters())


# Rows of a sampled batch reach a random stream in another order than plain decoding does.
@pytest.mark.parametrize(
    ("rows", "arguments"),
    [
        (1, {}),
        (3, {}),
        (1, {"do_sample": True, "top_k": 0}),
        (1, {"repetition_penalty": 1.3}),
        (1, {"prefill_chunk_size": 3}),
        (3, {"prefill_chunk_size": 3}),
    ],
    ids=["greedy", "greedy-batch", "seeded", "processor", "chunks", "chunks-batch"],
)
def test_a_head_that_is_often_right_changes_no_output(
    trained: Any, target: Any, texts: list[list[int]], rows: int, arguments: dict[str, Any]
) -> None:
    assistant = Assistant([drafter_of(trained)], budget=8)
    ids = torch.tensor([text[:9] for text in texts[64 : 64 + rows]])
    options = {"max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None, **arguments}
    set_seed(11)
    expected = target.generate(ids, **options)
    set_seed(11)
    found = target.generate(ids, assistant=assistant, **options)
    assert found.tolist() == expected.tolist()
    assert assistant.stats.total.accepted > 4 * rows


def test_the_unrolled_loss_is_that_of_drafting(
    kind: str, target: torch.nn.Module, texts: list[list[int]]
) -> None:
    """Against a plain loop that runs the head as a drafter does, one position at a time."""
    torch.manual_seed(0)
    ids = torch.arange(0, VOCAB, 2)
    head = KINDS[kind].for_target(target, draft_ids=ids).requires_grad_(False)
    supervisor = Supervisor(target, head.boundaries, ids)
    text = torch.tensor(texts[0][:9])
    item = {"token_ids": text, "learnt": torch.arange(9) >= 3, **supervisor(text)}
    loss = UnrolledHead(head, steps=3, decay=0.5)(**collate([item]))["loss"]
    torch.testing.assert_close(loss, loss_of_drafting(head, item, steps=3, decay=0.5))


def loss_of_drafting(
    head: Any, item: dict[str, torch.Tensor], steps: int, decay: float
) -> torch.Tensor:
    losses: list[list[torch.Tensor]] = [[] for _ in range(steps)]
    text, length = item["token_ids"], len(item["token_ids"])
    for last in range(length - 1):
        cache = DynamicCache()
        mask = torch.ones(last + 1, last + 1, dtype=torch.bool).tril()
        hidden = head.fuse(item["features"][None, : last + 1])
        hidden = head(hidden, text[None, 1 : last + 2], torch.arange(last + 1)[None], mask, cache)
        for step in range(steps):
            position = last + 1 + step  # of the token that the head was fed last
            if position >= length - 1:
                break
            if item["learnt"][position + 1] and item["covered"][position]:
                log_probs = head.logits(hidden[0, -1]).log_softmax(-1)
                shares = item["soft_probs"][position]
                losses[step].append(-(shares * log_probs[item["soft_ids"][position]]).sum())
            everything = torch.ones(1, last + 2 + step, dtype=torch.bool)
            place = torch.tensor([[last + 1 + step]])
            hidden = head(
                hidden[:, -1:], text[None, position + 1 : position + 2], place, everything, cache
            )
    return sum(decay**i * torch.stack(found).mean() for i, found in enumerate(losses) if found)


def test_padding_changes_nothing(
    kind: str, target: torch.nn.Module, texts: list[list[int]]
) -> None:
    head = KINDS[kind].for_target(target).requires_grad_(False)
    supervisor = Supervisor(target, head.boundaries, torch.arange(VOCAB))
    unrolled = UnrolledHead(head, steps=1, decay=1.0)
    items = []
    for length in (12, 20):
        text = torch.tensor(texts[0][:length])
        items.append({"token_ids": text, "learnt": torch.ones(length).bool(), **supervisor(text)})
    short, long = (unrolled(**collate([item]))["loss"] for item in items)
    both = unrolled(**collate(items))["loss"]
    torch.testing.assert_close(both, (10 * short + 18 * long) / 28)


class Interrupted(TrainerCallback):
    """Stops a run as a crash would, after a number of steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.after:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_to_the_same_head(
    kind: str,
    target: torch.nn.Module,
    texts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = plan(6, kind, save_steps=2)
    whole = train_head(target, texts[:16], tmp_path / "whole", training)
    output = tmp_path / "parts"
    with monkeypatch.context() as patch:
        original = trainer.HeadTrainer.train
        patch.setattr(
            trainer.HeadTrainer,
            "train",
            lambda self, **kwargs: (self.add_callback(Interrupted(5)), original(self, **kwargs)),
        )
        with pytest.raises(KeyboardInterrupt):
            train_head(target, texts[:16], output, training)
    assert sorted(path.name for path in output.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    (output / f"{trainer.STAGING}left-over").mkdir()
    resumed = train_head(target, texts[:16], output, training)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], tensor, msg=name)
    assert sorted(path.name for path in output.iterdir()) == [
        "checkpoint-4",
        "checkpoint-6",
        "config.json",
        "model.safetensors",
    ]
    assert KINDS[kind].from_pretrained(output / "checkpoint-4", target)


def test_a_checkpoint_that_could_not_be_finished_does_not_appear(
    target: torch.nn.Module, texts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(trainer.HeadTrainer, "_save_rng_state", full_disk)
    with pytest.raises(OSError, match="No space left"):
        train_head(target, texts[:8], tmp_path, plan(2, save_steps=1))
    assert list(tmp_path.iterdir()) == []


def test_features_are_kept_on_disk(
    target: torch.nn.Module, texts: list[list[int]], tmp_path: Path
) -> None:
    folder = tmp_path / "features"
    train_head(target, texts[:8], tmp_path / "head", plan(), feature_dir=folder)
    assert len(list(folder.glob("*.safetensors"))) == 8
    examples = [Example(torch.tensor(text)) for text in texts[:8]]
    draft_ids = choose_draft_ids(examples, VOCAB, VOCAB)
    boundaries = EagleHead.for_target(target, draft_ids=draft_ids).boundaries
    fresh = Supervisor(target, boundaries, draft_ids)
    kept = ExampleDataset(examples, fresh, folder)
    for index, example in enumerate(examples):
        item = kept[index]
        for name, tensor in fresh(example.token_ids).items():
            torch.testing.assert_close(item[name].to(tensor.dtype), tensor, atol=1e-3, rtol=0.01)


def test_a_folder_of_other_features_is_refused(
    target: torch.nn.Module, texts: list[list[int]], tmp_path: Path
) -> None:
    folder = tmp_path / "features"
    train_head(target, texts[:4], tmp_path / "head", plan(1), feature_dir=folder)
    with pytest.raises(ValueError, match=r"expected features of the same .*texts"):
        train_head(target, texts[1:5], tmp_path / "head", plan(1), feature_dir=folder)
    with torch.no_grad():
        target.lm_head.weight.add_(0.01)
    try:
        with pytest.raises(ValueError, match="expected features of the same target"):
            train_head(target, texts[:4], tmp_path / "head", plan(1), feature_dir=folder)
    finally:
        with torch.no_grad():
            target.lm_head.weight.sub_(0.01)
    with pytest.raises(ValueError, match="expected an empty folder"):
        open_feature_cache(tmp_path / "head", anything=1)


def test_kept_features_are_not_computed_again(
    target: torch.nn.Module, texts: list[list[int]], tmp_path: Path
) -> None:
    calls = []

    def supervisor(token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        calls.append(token_ids)
        return {"features": torch.zeros(len(token_ids), 3)}

    examples = [Example(torch.tensor(text)) for text in texts[:4]]
    for _ in range(2):
        ExampleDataset(examples, supervisor, tmp_path).fill()  # type: ignore[arg-type]
    assert len(calls) == 4


def test_the_layout_is_that_of_speculators(
    target: torch.nn.Module, texts: list[list[int]], tmp_path: Path
) -> None:
    train_head(target, texts[:4], tmp_path, plan(1))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert config["speculators_config"]["algorithm"] == "eagle3"
    assert config["transformer_layer_config"]["vocab_size"] == VOCAB
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors["d2t"]) == config["draft_vocab_size"] == int(tensors["t2d"].sum())
    assert tensors["layers.0.self_attn.q_proj.weight"].shape[1] == 64
    assert tensors["input_norm.weight"].shape == (64,)
    assert not any(name.startswith(("embed_tokens", "borrowed")) for name in tensors)


def test_the_draft_vocabulary_holds_the_frequent_learnt_tokens() -> None:
    examples = [
        Example(torch.tensor([9, 9, 9, 5, 3]), learn_from=3),
        Example(torch.tensor([3, 5, 3, 7])),
    ]
    assert choose_draft_ids(examples, 2, 12).tolist() == [3, 5]
    assert choose_draft_ids(examples, 12, 12).tolist() == [3, 5, 7]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_prompts_are_continued_by_the_target(target: Any, batch_size: int) -> None:
    prompts = [[5, 6, 7, 9], [3, 4], [5, 6, 7]]
    alone = [
        target.generate(torch.tensor([p]), max_new_tokens=9, eos_token_id=None) for p in prompts
    ]
    stop = alone[1][0, 5].item()
    examples = examples_of_prompts(
        prompts, target, None, 9, batch_size=batch_size, do_sample=False, eos_token_id=stop
    )
    for prompt, example, whole in zip(prompts, examples, alone, strict=True):
        answer = whole[0, len(prompt) :].tolist()
        end = answer.index(stop) + 1 if stop in answer else len(answer)
        assert example.learn_from == len(prompt)
        assert example.token_ids.tolist() == prompt + answer[:end]


def test_long_texts_are_cut() -> None:
    pieces = examples_of_texts([list(range(11)), [1, 2]], None, 4)
    assert [len(piece.token_ids) for piece in pieces] == [4, 4, 3]


@pytest.mark.parametrize(
    ("texts", "message"), [([], "found none"), ([[1, 2]], "found none"), (["a"], "tokenizer")]
)
def test_unusable_texts(
    target: torch.nn.Module, texts: list[Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train_head(target, texts, tmp_path)


@pytest.mark.parametrize(
    "setting",
    [
        {"kind": "eagle1"},
        {"draft_vocab_size": 0},
        {"steps": 0},
        {"max_length": 2},
        {"step_decay": 0.0},
    ],
)
def test_settings_out_of_range(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(setting))}: expected"):
        HeadTraining(**setting)


def save_with_tokenizer(target: Any, folder: Path) -> None:
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    target.save_pretrained(folder)


@pytest.mark.parametrize("data_kind", ["text", "prompt"])
def test_the_command(
    kind: str,
    data_kind: str,
    target: torch.nn.Module,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_with_tokenizer(target, tmp_path / "model")
    texts = [" ".join(f"w{(7 * i + j) % VOCAB}" for j in range(12)) for i in range(6)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({data_kind: text}) for text in texts))
    options = ["--response-length", "6", "--held-out", "2", "--epochs", "1"]
    paths = [str(tmp_path / "model"), str(data), str(tmp_path / "head")]
    assert main(["train-head", "--kind", kind, *paths, *options]) == 0
    assert "Mean accepted tokens on held-out texts: 1." in capsys.readouterr().out
    assert isinstance(KINDS[kind].from_pretrained(tmp_path / "head", target), KINDS[kind])


def test_records_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("one\ntext\n\n\nanother\n")
    assert [record["text"] for record in read_records(path, "text")] == [
        "one\ntext",
        "another",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "found none"), ("{", "jsonl:1: expected JSON"), ("\n[1]", "jsonl:2: expected an")],
)
def test_a_damaged_record_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_records(path, "text", "prompt")


def test_replay_counts_steps(target: torch.nn.Module, texts: list[list[int]]) -> None:
    """With a drafter that knows the text a step brings the whole draft and one token."""
    from tests.support.eagle_fixtures import KnownText

    drafter = KnownText(texts[0], nodes=3)
    assert mean_accepted_tokens(drafter, target, [(texts[0][:8], texts[0][8:])]) == (32 - 1) / 8
    np.testing.assert_allclose(
        mean_accepted_tokens(KnownText(texts[1], 0), target, [(texts[1][:8], texts[1][8:])]), 1.0
    )


def test_another_run_s_checkpoint_is_refused(
    target: torch.nn.Module, texts: list[list[int]], tmp_path: Path
) -> None:
    train_head(target, texts[:4], tmp_path, plan(1, save_steps=1))
    with pytest.raises(ValueError, match=r"expected a checkpoint .* of the same .*texts"):
        train_head(target, texts[1:5], tmp_path, plan(2, save_steps=1))
    with pytest.raises(ValueError, match=r"of the same kind"):
        train_head(target, texts[:4], tmp_path, plan(2, "mtp", save_steps=1))
    for checkpoint in tmp_path.glob("checkpoint-*"):
        (checkpoint / "made_from.json").unlink()
    with pytest.raises(ValueError, match=r"expected a checkpoint .* of the same .*target"):
        train_head(target, texts[:4], tmp_path, plan(2, save_steps=1))
    train_head(target, texts[1:5], tmp_path, plan(2, save_steps=1), resume=False)
