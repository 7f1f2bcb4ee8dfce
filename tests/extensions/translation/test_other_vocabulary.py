"""Draft models of another tokenizer: the texts stay equal, and so does the output."""

import json

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.draft_models.draft_model import DraftModelDrafter
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.extensions.translation.translation import (
    DraftTranslation,
    Tokenizer,
    TranslatedText,
)
from hf_retrieval_assist.types.token_tree import TokenTree
from tests.support.lossless import build, same
from tests.support.one_text import OneText
from tests.support.quick import cases, crossed

TEXT = (
    "the walk is plain decoding and the tree only makes logits available early. Thé wälk: 'tis "
    "plain!\n\nEvery drafted node carries a probability, and the walk walks on - 12 + 30 = 42.\n"
)


def sentence_pieces(byte_fallback):
    """Spaces as a sign of their own, one put in front of every text."""
    tokenizer = FastTokenizer(models.BPE(byte_fallback=byte_fallback, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    if byte_fallback:
        steps.insert(1, decoders.ByteFallback())
    tokenizer.decoder = decoders.Sequence(steps)
    letters = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    special = ["<unk>", "<s>", *letters]
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 120, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    saved = json.loads(tokenizer.to_str())
    # The bytes are ordinary tokens.
    saved["added_tokens"] = saved["added_tokens"][:2]
    tokenizer = FastTokenizer.from_str(json.dumps(saved))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


@pytest.fixture(scope="module")
def byte_tokens():
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def pieces():
    return sentence_pieces(byte_fallback=False)


@pytest.fixture(scope="module")
def pieces_and_bytes():
    return sentence_pieces(byte_fallback=True)


@pytest.fixture(scope="module")
def target(byte_tokens):
    return build(transformers.LlamaForCausalLM, vocab_size=len(byte_tokens))


@pytest.fixture(scope="module")
def draft_model(pieces):
    return build(transformers.LlamaForCausalLM, vocab_size=len(pieces))


@pytest.fixture(scope="module")
def drafter(draft_model, byte_tokens, pieces):
    return DraftModelDrafter(
        draft_model, assistant_tokenizer=pieces, target_tokenizer=byte_tokens, max_nodes=15
    )


def prompt(tokenizer, text=TEXT[:30]):
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])


@pytest.mark.parametrize("swap", [False, True])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_texts_stay_equal(byte_tokens, pieces_and_bytes, swap, data):
    """However the text grows, and across characters of several tokens."""
    source, goal = (pieces_and_bytes, byte_tokens) if swap else (byte_tokens, pieces_and_bytes)
    text = data.draw(st.text("the walk\n.é€ä12'", min_size=1, max_size=120)).strip() + "x"
    ids = source(text, add_special_tokens=False)["input_ids"]
    first = data.draw(st.integers(1, len(ids)))
    grown = TranslatedText(DraftTranslation(Tokenizer(goal), Tokenizer(source), 0), ids[:first])
    while first < len(ids):
        count = data.draw(st.integers(1, 9))
        grown.append(ids[first : first + count])
        first += count
    assert Tokenizer(goal).decode(grown.ids) == Tokenizer(source).decode(ids)


def test_only_the_end_is_encoded_again(byte_tokens, pieces, pieces_and_bytes):
    """And a text is not cut before what gets a space of its own."""
    ids = byte_tokens(TEXT * 4)["input_ids"]
    grown = TranslatedText(DraftTranslation(Tokenizer(pieces), Tokenizer(byte_tokens), 0), ids[:5])
    for token in ids[5:]:
        grown.append([token])
        assert len(grown._tail) <= 40
    assert Tokenizer(pieces).decode(grown.ids) == TEXT * 4
    text, goal = "1" * 17 + "\n11äääää€x", Tokenizer(pieces_and_bytes)
    ids = byte_tokens(text, add_special_tokens=False)["input_ids"]
    grown = TranslatedText(DraftTranslation(goal, Tokenizer(byte_tokens), 0), ids[:6])
    for first in range(6, len(ids), 9):
        grown.append(ids[first : first + 9])
    assert goal.decode(grown.ids) == text


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("cut", [3, 10, 31, 60, 77])
def test_a_draft_has_the_same_text(byte_tokens, pieces, cut, swap):
    source, goal = (pieces, byte_tokens) if swap else (byte_tokens, pieces)
    context, ids = (t(TEXT[:cut], add_special_tokens=False)["input_ids"] for t in (goal, source))
    everything = source(TEXT, add_special_tokens=False)["input_ids"]
    if source.decode(everything[: len(ids)]) != TEXT[:cut]:
        pytest.skip("the draft's tokenizer has no boundary here")
    more = everything[len(ids) : len(ids) + 12]
    probs = np.linspace(0.9, 0.1, len(more))
    draft = TokenTree.chain(more, probs, np.arange(len(more)))
    translation = DraftTranslation(Tokenizer(source), Tokenizer(goal), len(goal))
    tree = translation.tree(draft, ids, context)
    assert tree.fault(1 << 30, 1 << 30) is None
    found = Tokenizer(goal).decode([*context, *tree.token_ids.tolist()])
    assert TEXT.startswith(found)
    assert len(found) >= cut + len(source.decode(more)) - 3
    # Every token stands for the node at which its text is whole.
    for node in range(len(tree)):
        text = Tokenizer(goal).decode([*context, *tree.token_ids[: node + 1].tolist()])
        if "�" not in text:
            behind = Tokenizer(source).decode([*ids, *more[: tree.classes[node] + 1]])
            assert behind.startswith(text)


def test_shared_tokens_are_drafted_as_they_are(byte_tokens, pieces):
    """Also where the text would be cut otherwise."""
    letters = [byte_tokens.get_vocab()[letter] for letter in "the"]
    assert byte_tokens("the", add_special_tokens=False)["input_ids"] != letters
    draft = TokenTree.chain([pieces.get_vocab()[letter] for letter in "the"], [0.9, 0.8, 0.7])
    translation = DraftTranslation(Tokenizer(pieces), Tokenizer(byte_tokens), len(byte_tokens))
    assert translation.tree(draft, [], []).token_ids.tolist() == letters
    space = translation._known[pieces.get_vocab()["▁the"]]
    assert byte_tokens.convert_ids_to_tokens(space) == "Ġthe"


@pytest.mark.slow
def test_drafts_what_the_draft_model_writes(draft_model, byte_tokens, pieces, target):
    """The chain's text is the draft model's own greedy text after the same text."""
    drafter = DraftModelDrafter(
        draft_model, assistant_tokenizer=pieces, target_tokenizer=byte_tokens, width=1, max_levels=6
    )
    ids = prompt(byte_tokens, TEXT)[0].tolist()
    session = OneText(drafter, ids[:20], Target(len(byte_tokens), model=target))
    drafted = 0
    for known in range(21, len(ids)):
        session.commit(ids[known - 1 : known], None)
        tree = session.propose(6)
        text = byte_tokens.decode(ids[:known])
        own = prompt(pieces, text)
        with torch.no_grad():
            written = draft_model.generate(own, max_new_tokens=8, do_sample=False)[0]
        longer = byte_tokens.decode([*ids[:known], *tree.token_ids.tolist()])
        if "�" not in longer + pieces.decode(written):
            assert pieces.decode(written, skip_special_tokens=True).startswith(longer)
            drafted += len(tree)
    assert drafted > len(ids)


@pytest.mark.parametrize(("rows", "sample"), cases(crossed([3, 1], [True, False])))
def test_output_is_plain(target, drafter, byte_tokens, rows, sample):
    ids = prompt(byte_tokens, TEXT)[0, : 12 * rows].view(rows, 12)
    for make in (
        lambda plain: Assistant([drafter], budget=8),
        lambda plain: SamAssistant(plain.tolist(), fallback=[drafter, "logit_ngrams"], budget=12),
    ):
        _, _, assistant = same(target, ids, make, do_sample=sample)
        assert assistant.stats.total.drafted > 0


def test_tokenizers_are_found_in_the_folders(target, draft_model, byte_tokens, pieces, tmp_path):
    for name, model, tokenizer in (("t", target, byte_tokens), ("d", draft_model, pieces)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    llama = transformers.LlamaForCausalLM
    loaded, small = (llama.from_pretrained(tmp_path / name).eval() for name in "td")
    assistant = SamAssistant(fallback=small, budget=6)
    same(loaded, prompt(byte_tokens), assistant, max_new_tokens=8)
    assert assistant.stats.last.drafted > 0
    # Drawn children want the target's vocabulary.
    with pytest.raises(ValueError, match="target's vocabulary of"):
        DraftModelDrafter(draft_model, temperature=1.0).start(
            np.array([3], np.int32), Target(target.config.vocab_size, model=target)
        )
