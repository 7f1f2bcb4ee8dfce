"""REST (He et al., 2023, https://arxiv.org/abs/2311.08252)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Unpack

from ..assistants import Assistant
from ..corpus.datastore import Datastore
from ..drafters.base import Drafter
from ..drafters.rest import RestDrafter
from ..policy.policy import DraftingPolicy, Options
from ..policy.step import DraftedStep
from ..presets import require
from ..types.token_tree import Forest
from .paper import PaperPolicy


class RestPolicy(PaperPolicy):
    """Retrieve, then draft: the longest end of the text that the datastore holds gives the
    continuations, and those with the most occurrences make the tree, all of which is verified."""

    def propose(self, step: DraftedStep, budget: int) -> Forest:
        return self.ask(0, step, budget)


class Rest(Assistant):
    """Drafts from a corpus on disk, the most frequent continuations first.

    The longest suffix of the text, of at most `max_match` tokens, is looked up (section 3.2). All
    its continuations form a trie, weighted by how often each prefix occurs, of which the heaviest
    nodes are the draft (section 3.3).

    Differences from the released code: weights are counts over all occurrences, where it takes the
    first 5,000 in the order of the index; `nodes` bounds the nodes, where it bounds the sum of
    their depths; matches of one token count; no continuation crosses documents; one token is
    sampled for each node, so that the output keeps its distribution.

    Args:
        datastore: of the model's tokenizer; or its path.
        max_match: the longest context looked up, in tokens.
        continuation: tokens of a draft's longest path.
        nodes: of a draft.

    Raises:
        ValueError: a size below 1.
        TypeError: what is no datastore.
    """

    def __init__(
        self,
        datastore: Datastore | str | os.PathLike[str],
        max_match: int = 16,
        continuation: int = 10,
        nodes: int = 64,
        **options: Unpack[Options],
    ):
        if isinstance(datastore, (str, os.PathLike)):
            datastore = Datastore.open(datastore)
        require(Datastore, datastore=datastore)
        self.datastore = datastore
        drafter = RestDrafter(datastore, max_match, nodes, continuation, sources=1)
        super().__init__([drafter], budget=nodes, **options)

    def _policy(self, drafters: Sequence[Drafter], **options: Any) -> DraftingPolicy:
        return RestPolicy(drafters, **options)
