"""Exact distributions of sampled texts, and a test of what was drawn against them."""

import numpy as np
import torch


@torch.no_grad()
def exact_law(model, prompt, temperature=1.0, top_p=1.0):
    """float64 [vocab_size] * 3: probability of every continuation by three tokens."""
    size = model.config.vocab_size
    law = torch.ones(1, dtype=torch.float64)
    texts = torch.tensor([prompt])
    for _ in range(3):
        probs = torch.softmax(model(texts).logits[:, -1].double() / temperature, dim=-1)
        best, order = probs.sort(dim=-1, descending=True)
        kept = best.cumsum(-1) - best < top_p
        step = torch.zeros_like(probs).scatter(-1, order, best * kept)
        step /= step.sum(-1, keepdim=True)
        law = (law[:, None] * step).flatten()
        tokens = torch.arange(size).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(size, dim=0), tokens], dim=1)
    return law.reshape(size, size, size).numpy()


def assert_follows(drawn, law):
    """Pearson's test of continuations, int [count, 3], and of each of their tokens."""
    observed = np.zeros_like(law)
    np.add.at(observed, tuple(np.array(drawn).T), 1)
    assert_near(observed, law)
    for axis in range(3):
        assert_near(observed.sum(axis), law.sum(axis))


def assert_near(observed, law):
    """Pearson's test of counts; cells of few expected observations are thrown together."""
    assert observed[law == 0].sum() == 0
    expected = law * observed.sum()
    large = expected >= 5
    counts = np.append(observed[large], observed[~large].sum())
    cells = np.append(expected[large], expected[~large].sum())
    counts, cells = counts[cells > 0], cells[cells > 0]
    statistic = ((counts - cells) ** 2 / cells).sum()
    freedom = len(cells) - 1
    assert freedom >= 5
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)
