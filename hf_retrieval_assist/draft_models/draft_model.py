"""Drafts of a smaller model, as trees of Sequoia's shapes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafters.base import Curve, Drafter, Feedbacks, Target, Tokens
from ..drafters.call_view import Preview
from ..host.positions import position_limit
from ..host.ranks import require_whole
from ..host.transformers_private import with_cache
from ..system.arguments import require_at_least
from ..system.locks import Lock
from ..types.token_tree import Forest, TokenTree
from ..verification.engine import engine_of
from ..verification.options import ServiceDemand
from ..verification.service import choose_service
from ..verification.tiers import Service, Tier
from ..verification.tree_attention import TreeLayout
from .growth import Choice, Level
from .residual import ChildDraw
from .rows import DraftCache, Group, RowSession, fed_texts, fills_of, groups, parts, proposed
from .sequoia import EVIDENCE, Draws, ShapeChooser, TreeShape, drawn, foreseen, grow

# A pass over more new text than this says little of what a level costs.
_LEVEL_LIKE = 16
# Ids by which the tables of one tokenizer's models differ, since rows fill them up.
_PADDING = 1024
# Most new tokens of a text that are fed at once, which bounds their masks.
_CHUNK = 512


class DraftModelDrafter(Drafter):
    """Drafts with a small transformers model.

    The tree's shape is solved for the measured acceptance by rank, the model's own time and the
    target's t(n). Every level takes one forward of the draft model for all texts of a batch. Where
    the model has a table of positions, it drafts for texts that end within the table.

    Args:
        model: shared by all sessions.
        max_nodes: nodes of a draft at most.
        max_levels: levels of a draft at most, which are forwards of the draft model.
        width: children of a node at most.
        temperature: None drafts the most probable tokens, which suits the plain walk under any
            sampling. A number draws them without replacement from the model's distribution at that
            temperature, and records what residual verification needs.

    Raises:
        ValueError: an argument is out of range, or the model cannot be fed token trees; from
            `start`, its vocabulary is not the target's.
    """

    name = "draft model"
    costly = True
    evidence = EVIDENCE

    def __init__(
        self,
        model: Any,
        *,
        max_nodes: int = 63,
        max_levels: int = 8,
        width: int = 8,
        temperature: float | None = None,
    ):
        require_at_least(1, max_nodes=max_nodes, max_levels=max_levels, width=width)
        if temperature is not None and not temperature > 0:
            raise ValueError(f"temperature: expected None or a number > 0, got {temperature}")
        tree_service(model, "draft_model")
        self.model = model
        self.max_nodes, self.max_levels, self.width = max_nodes, max_levels, width
        self.temperature = temperature
        self.positions = position_limit(model)
        self._choosers: dict[str, ShapeChooser] = {}
        self._lock = Lock()
        parameters = inspect.signature(model.forward).parameters
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> DraftModelSession:
        require_whole(self.model, "draft model")
        padding = 0 if self.temperature is not None else _PADDING  # all of the drawn children count
        if abs(self.vocab_size - target.vocab_size) > padding:
            raise ValueError(
                f"draft_model: expected the target's vocabulary of {target.vocab_size} ids, got "
                f"{type(self.model).__name__} with {self.vocab_size}; transformers takes draft "
                "models of another tokenizer: generate(assistant_model=..., tokenizer=..., "
                "assistant_tokenizer=...)"
            )
        return DraftModelSession(self, prompt_ids, target)

    def prepare(self, sessions: Sequence[DraftModelSession], curve: Curve | None) -> None:
        """Size trees by what the target's steps take."""
        if curve is not None:
            chooser = sessions[0].chooser  # all texts of a step have one target
            chooser.set_seconds(curve(chooser.max_nodes))

    def propose(self, sessions: Sequence[DraftModelSession], budgets: Sequence[int]) -> Forest:
        for session in sessions:
            session.clear_draft()
        shape = sessions[0].chooser.shape(max(budgets))
        asked = [
            row
            for row, budget in zip(sessions, budgets, strict=True)
            if row.has_room(shape.levels) and budget > 0
        ]
        if len(shape):
            for group, rows in groups(asked):
                self._draft(group, rows, shape)
        return proposed([row.proposal() for row in sessions], budgets)

    @torch.no_grad()
    def _draft(self, group: Group, asked: Sequence[DraftModelSession], shape: TreeShape) -> None:
        new = max(len(row.text) - group.caches[0].slots.lengths[row.index] for row in asked)
        started = time.perf_counter()
        # The draws of texts that have ended may no longer be known.
        previews = [row.preview if row in asked else None for row in group.rows]
        draws: Draws = []
        choose: Choice = partial(foreseen, previews)
        if self.temperature is not None:
            choose = partial(drawn, self.temperature, draws)
        nodes = _Nodes(self, group, asked[0])
        trees = grow(shape, choose, nodes.run, previews)
        if new <= _LEVEL_LIKE:
            seconds = (time.perf_counter() - started) / (shape.levels - 1)
            asked[0].chooser.observe_pass(seconds)
        for row in asked:
            own = [zip(laws[row.index], found[row.index], strict=True) for laws, found in draws]
            row.shape, row.tree, row.draws = shape, trees[row.index], [*chain(*own)]

    def commit(
        self, sessions: Sequence[DraftModelSession], tokens: Tokens, feedbacks: Feedbacks
    ) -> None:
        for session, token_ids in zip(sessions, tokens, strict=True):
            session.append(token_ids)

    def chooser(self, fingerprint: str, model: Any = None) -> ShapeChooser:
        """What is measured of this draft model against one target; `model` is that, if known."""
        with self._lock:
            if fingerprint not in self._choosers:
                width = min(self.width, self.vocab_size)
                share = 0.0
                if model is not None and model.device == self.model.device:
                    # Both read all of their weights for every token.
                    share = _weight_bytes(self.model) / _weight_bytes(model)
                chooser = ShapeChooser(width, self.max_nodes + 1, self.max_levels + 1, share)
                self._choosers[fingerprint] = chooser
            return self._choosers[fingerprint]


def _weight_bytes(model: Any) -> int:
    return sum(weight.nbytes for weight in model.parameters())


class _Nodes:
    """A draft model behind the texts of a group, and on the nodes of a level."""

    def __init__(self, drafter: DraftModelDrafter, group: Group, text: DraftModelSession) -> None:
        self._drafter, self._model, self._group = drafter, drafter.model, group
        self._vocab_size = text.vocab_size  # all texts of a step have one target
        (self._cache,) = group.caches
        engine = engine_of(self._model.device)
        if group.static_drafts is None and engine.widens:
            service, most = tree_service(self._model, "draft_model"), drafter.max_nodes + 1
            group.static_drafts = engine.drafts(
                self._model, self._cache, service, most, text.graphs
            )
        self._recorded: Any = group.static_drafts

    def run(self, level: Level | None) -> Tensor:
        """A `Run`."""
        return self._read() if level is None else self._feed(level.token_ids, level.fed(), {})

    def _read(self) -> Tensor:
        """Feed what is new in the texts; when all is cached, the last token again."""
        cache, rows = self._cache, self._group.rows
        texts = [[0] if row is None else row.text for row in rows]
        # The last token is fed again, for its logits.
        cache.shorten([0 if row is None else len(row.text) - 1 for row in rows])
        news = [text[have:] for text, have in zip(texts, cache.slots.lengths, strict=True)]
        logits = torch.empty(0)
        longest = self._recorded.most if self._recorded else _CHUNK
        for spans in parts([len(new) for new in news], longest):
            width = max(map(len, spans))
            ids = torch.zeros((len(rows), width), dtype=torch.int64)
            for line, new, span in zip(ids, news, spans, strict=True):
                line[width - len(span) :] = torch.tensor(new[span.start : span.stop])
            fills = fills_of([width - len(span) for span in spans])
            fed = fed_texts(fills, width)
            # What fills a line up stands in no position that the text has not.
            depths = fed.depths.minimum((width - 1 - fills).clamp(min=0))
            logits = self._feed(ids, fed._replace(depths=depths), self._drafter.last_only)[:, -1:]
            self._group.keep([range(len(span)) for span in spans])
        return logits

    def _feed(self, token_ids: Tensor, fed: TreeLayout, options: dict[str, int]) -> Tensor:
        """[rows, w or 1, vocab_size], of the ids that the target has too."""
        if self._recorded:
            logits: Tensor = self._recorded.feed(token_ids, fed)
            return logits[..., : self._vocab_size]
        device, lengths = self._model.device, torch.tensor(self._cache.slots.lengths)[:, None]
        with self._cache.feeding(fed.to(device)) as mask:
            logits = self._model(
                input_ids=token_ids.to(device),
                attention_mask=mask,
                position_ids=(lengths + fed.depths).to(device),
                **with_cache(self._model, self._cache),
                use_cache=True,
                return_dict=True,
                **options,
            ).logits
            return logits[..., : self._vocab_size]


class DraftModelSession(RowSession):
    """One text and the draft model's cache over it.

    Args:
        drafter: whose model drafts.
        prompt_ids: int32 [length], the target's.
        target: the text's.

    Attributes:
        drafter: whose model drafts.
        text: ids of the whole text, as the draft model is fed them.
        vocab_size: ids that both models have.
        chooser: what is measured.
        graphs: whether forwards may be recorded where they stay in place.
        preview: what tells how the target will draw the text's tokens; None: nothing does.
        shape, tree: of the draft in the cache behind the text.
        draws: of the text, then of each node that was fed: the law of its children, and what was
            drawn.
    """

    def __init__(
        self,
        drafter: DraftModelDrafter,
        prompt_ids: NDArray[np.int32],
        target: Target,
    ):
        model = drafter.model
        config = model.config.get_text_config(decoder=True)
        rules = tree_service(model, "draft_model").rules
        super().__init__([DraftCache(config, rules, model.dtype)])
        self.drafter, self.graphs = drafter, target.call.graphs
        self.vocab_size = min(drafter.vocab_size, target.vocab_size)
        self.chooser = drafter.chooser(target.fingerprint, target.model)
        self.text: list[int] = np.minimum(prompt_ids, drafter.vocab_size - 1).tolist()
        alike = drafter.vocab_size == target.vocab_size
        self.preview = _preview(target, drafter.temperature) if alike else None
        self.shape = self.chooser.shape()
        self.clear_draft()

    def has_room(self, levels: int) -> bool:
        """Whether the draft model has positions for a tree of so many levels; a text that gets
        beyond them leaves its group for good."""
        # The leaves are not fed.
        if len(self.text) + levels - 2 > self.drafter.positions:
            self.close()
        return self.group is not None

    def clear_draft(self) -> None:
        self.tree = TokenTree.empty()
        self.draws: Draws = []

    def proposal(self) -> TokenTree:
        return self.tree.without_nan()

    def draw_at(self, path: Sequence[int]) -> ChildDraw | None:
        nodes = [-1, *self.tree.follow(np.array(path, np.int32)).tolist()]
        count = int(self.shape.child_counts[nodes[-1] + 1])
        if not self.draws or len(nodes) <= len(path) or not count:
            return None
        fed = 0 if nodes[-1] < 0 else 1 + int(self.shape.fed_number[nodes[-1]])
        law, children = self.draws[fed]
        return ChildDraw(law, children[:count])

    def append(self, token_ids: Sequence[int]) -> None:
        """The text went on with these tokens."""
        tokens = np.minimum(np.asarray(token_ids), self.drafter.vocab_size - 1).tolist()
        if len(self.tree) and tokens:
            path = self.tree.follow(np.array(tokens, np.int32))
            self._measure(path.tolist(), len(tokens))
            fed = self.shape.fed_number[path]
            self.accepted = fed[fed >= 0].tolist()
            self.clear_draft()
        self.text += tokens

    def _measure(self, path: list[int], length: int) -> None:
        """Count by rank what the text accepted, at every node that it reached."""
        reached = [-1, *path][:length]
        ranks = self.shape.ranks[path].tolist()
        for node, rank in zip(reached, [*ranks, -1], strict=False):
            if children := int(self.shape.child_counts[node + 1]):
                self.chooser.observe(children, rank)


def _preview(target: Target, temperature: float | None) -> Preview | None:
    """What tells how the target will draw; None where it does not, or nobody knows.

    An accelerator would wait for the host at every level.
    """
    preview = target.call.preview
    if preview is None or temperature is not None or target.device.type != "cpu":
        return None
    return preview if preview.draws and preview.knows(target.vocab_size) else None


@torch.no_grad()
def tree_service(model: Any, drafter: str) -> Service:
    """How a model is fed token trees; ValueError where it can only be fed chains."""
    if model.config.is_encoder_decoder:
        service = Service(Tier.PLAIN, "it is an encoder-decoder")
    else:
        # Wrong drafts cost time and no token, whoever wrote the code.
        service = choose_service(model, {}, demand=ServiceDemand(trusts=True))
    if service.tier is not Tier.TREE:
        raise ValueError(
            f"{drafter}: expected a model that can be fed token trees, got "
            f"{type(model).__name__}: {service.reason}"
        )
    return service
