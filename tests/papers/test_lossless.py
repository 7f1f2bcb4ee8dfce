"""Every paper inside `generate`: lossless, and drafting what it knows."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hf_retrieval_assist import Datastore
from hf_retrieval_assist.papers import Rest, SamDecoding, Sequoia, SuffixDecoding, TokenRecycling
from tests.support.lossless import NEW_TOKENS, PROMPT, SAMPLING, build, disturbed, run, same
from tests.support.memories import check_memory
from tests.support.tiny_models import VOCAB

# Texts as short as these are matched by less than the papers ask for.
Sam = partial(SamDecoding, min_match=3, corpus_bias=0)
PAPERS = {
    "sam": lambda made: SamDecoding(),
    "sam alone": lambda made: Sam(fallback=None),
    "sam with a corpus": lambda made: Sam(made.texts),
    "sam, draft model": lambda made: SamDecoding(fallback=made.draft),
    "sam, drafters": lambda made: SamDecoding(fallback=["token_recycling", TokenRecycling()]),
    "suffix": lambda made: SuffixDecoding(),
    "suffix, table": lambda made: SuffixDecoding(fallback="token_recycling"),
    "suffix, draft model": lambda made: SuffixDecoding(threshold=2.0, fallback=made.draft),
    "rest": lambda made: Rest(made.store),
    "sequoia": lambda made: Sequoia(made.draft, nodes=8, levels=3, width=3),
}
# Whose corpora hold the texts.
KNOWING = ("sam with a corpus", "rest")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    model = build()
    texts = [run(model)[0].tolist(), run(model, PROMPT.flip(1))[0].tolist()]
    path = tmp_path_factory.mktemp("corpus") / "store"
    store = Datastore.build(texts, path, vocab_size=VOCAB, progress=False)
    return SimpleNamespace(model=model, texts=texts, store=store, draft=disturbed(model))


@pytest.mark.parametrize("name", PAPERS)
def test_every_paper_is_lossless(made, name):
    assistant = PAPERS[name](made)
    same(made.model, PROMPT, assistant)
    accepted = assistant.stats.last.accepted
    same(made.model, PROMPT, assistant, **SAMPLING)
    same(made.model, torch.cat([PROMPT, PROMPT.flip(1)]), assistant)
    assert name not in KNOWING or accepted > NEW_TOKENS // 2
    assert name != "sequoia" or accepted > 0
    if (memory := getattr(assistant, "memory", None)) is not None:
        assert len(memory) == 4
        check_memory(memory)


def test_a_vocabulary_smaller_than_the_table_has_columns():
    same(build(vocab_size=5), PROMPT % 5, SamDecoding())
