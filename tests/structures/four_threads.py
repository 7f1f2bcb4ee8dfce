"""Four threads draft and learn by shared assistants, for ThreadSanitizer: `make test-threads`.

A suffix tree that threads extend without a lock has to be found first.
"""

import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.drafters.feedback import RowFeedback
from hf_retrieval_assist.papers import Rest, SamDecoding
from hf_retrieval_assist.policy.policy import Ask, Outcome
from hf_retrieval_assist.structures.suffix_tree import SuffixTree
from hf_retrieval_assist.verification.verified import TopLogits
from tests.support.memories import remembering

THREADS, VOCABULARY, STEPS = 4, 50, 12


def text(length, seed):
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


def write_without_a_lock():
    """What is found, if anything is."""
    tree = SuffixTree(16)
    sequences = [tree.add_sequence() for _ in range(THREADS)]

    def write(seed):
        for turn in range(300):
            tree.extend(sequences[seed], text(320, seed + turn))

    together(write)


def together(work):
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))


def call(policy, dice):
    """One text's life: what a call of `generate` asks of an assistant's policy."""
    prompt = text(60, dice.randrange(8))
    session = policy.start(prompt, Target(vocab_size=VOCABULARY, fingerprint="model"))
    last = prompt[-1:]
    for _ in range(STEPS):
        step = policy.draft(Ask([session], budget=16))
        (tree,) = step.trees
        tokens = text(2, dice.randrange(20))
        if len(tree) and dice.random() < 0.7:
            tokens = tree.token_ids[:1]
        fed = np.concatenate([last, tree.token_ids])
        generator = torch.Generator().manual_seed(dice.randrange(99))
        logits = torch.randn(len(fed), VOCABULARY, generator=generator)
        parents = np.array([-1, *(1 + tree.parents)], np.int32)
        shown = RowFeedback(fed, np.zeros(1, np.int32), parents, top=TopLogits(logits))
        policy.learn(step, [Outcome(session, tokens.tolist(), tree, shown)])
        last = tokens[-1:]
    session.close()


def main(turns):
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    corpus = [text(400, seed).tolist() for seed in range(6)]
    memory = OutputMemory(max_bytes=1 << 20)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/store"
        store = Datastore.build(corpus, path, vocab_size=VOCABULARY, progress=False)
        assistants = [
            SamAssistant(corpus, memory=memory),
            SamDecoding(corpus),
            remembering(memory=memory),
            Rest(store),
        ]

        def work(seed):
            dice = random.Random(seed)
            for turn in range(turns):
                call(assistants[(turn + seed) % len(assistants)].policy, dice)
                if dice.random() < 0.2:
                    memory.add(text(80, dice.randrange(30)), "model")
                if dice.random() < 0.02:
                    memory.forget()

        together(work)
    print(THREADS * turns, "texts in", THREADS, "threads")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(int(sys.argv[1]))
    else:
        write_without_a_lock()
