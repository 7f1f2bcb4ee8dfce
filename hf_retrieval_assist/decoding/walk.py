"""The walk: plain decoding along token trees whose logits are already there.

Every token is chosen exactly as transformers' own sampling loop chooses it: the logits processors
see the true prefix and its logits, then argmax or one draw of `torch.multinomial` decides.
The tree only saves forwards: when the chosen token is a child of the current node, its logits are
at hand and the walk goes on.

Rows of a batch walk on their own, or in step: then all accept as many tokens as the one that
accepts fewest, rows that have ended are given padding, and every processor, criterion and random
draw sees the batch that plain decoding shows it, whatever it keeps from one call to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..drafters.base import ChildDraw
from ..engines.cpu.screen import Screened
from ..engines.cuda.node_choices import NodeChoices
from ..host.model_watch import ModelWatch
from ..host.plain_step import STREAMS_FIRST
from ..types.row_text import Path, RowText
from ..types.token_tree import TokenTree
from ..verification.verified import Verified
from .call import Call
from .dice import Dice, quotient_tokens
from .recorder import OutputRecorder
from .selection import TokenSelector

Drawn = Callable[[Sequence[int]], ChildDraw | None]
"""What was drawn below the node that a path of tokens from the root leads to, if anything was."""


class Walk:
    """Generates tokens of rows along verified trees until there are no logits for the next ones.

    All rows that still walk choose their next tokens together, which costs about what one of them
    costs. A streamer receives one token after the other, or in step one of every row at once.

    Args:
        call: whose tokens.
        rows: of the call.
        in_step: whether all rows choose in one step.
        residual: whether drafts that were drawn may be verified by residual sampling.

    Attributes:
        select: chooses the tokens.
        stopping: says after each token which rows are finished.
        recorder: is told of each token's scores and logits where the call wants them.
        dice: the call's random draws.
        watch: tells whether code of the caller's has changed the model since the last forward; None
            where none of it runs.
    """

    def __init__(self, call: Call, rows: Sequence[RowText], in_step: bool, residual: bool):
        self.rows, self.in_step = rows, in_step
        self.select = TokenSelector(call.processors, call.config.do_sample, call.batch_size)
        self.stopping = call.stopping
        self.recorder = OutputRecorder(call.config, call.batch_size)
        self.dice = Dice(rows)
        self.residual = residual and self.select.do_sample
        self.watch: ModelWatch | None = None
        self._streamer = call.streamer
        self._ahead: NodeChoices | None = None

    @property
    def _needs_logits(self) -> bool:
        """Whether it does more with logits than choosing tokens row by row."""
        return self.recorder.wants_tokens or self.residual or self.in_step

    @property
    def screens(self) -> bool:
        """Whether it needs no more of most logits than that they are too small to matter."""
        known = self.select.shortlist > 0 or self.select.sampling is not None
        return known and not self._needs_logits

    def node_choices(self, width: int | None) -> NodeChoices | None:
        """What chooses behind all nodes at once; None where tokens need no more than logits, or
        the text besides.

        Args:
            width: see :class:`~..engines.cuda.node_choices.NodeChoices`.
        """
        if not (self.select.greedy or not self.select.blind or self._needs_logits):
            self._ahead = NodeChoices(self.rows, self.select, self.dice, width)
        return self._ahead

    def end(self, tokens: int) -> bool:
        """End the streamer's text and leave the generator as plain decoding does after so many
        tokens of every row. Returns whether all were drawn as plain decoding draws them."""
        self.dice.end(tokens)
        if self._streamer is not None:
            self._streamer.end()
        return self.dice.plain and not self.residual

    def __call__(
        self,
        trees: Sequence[TokenTree],
        verified: Verified,
        drawn: Sequence[Drawn] | None = None,
    ) -> list[Path]:
        """Walk all rows that have not ended; they grow by the generated tokens.

        Args:
            trees: the nodes that were verified, one tree per row of the batch.
            verified: the forward that fed each row's last token, the root, and its nodes.
            drawn: per row, tells what is to be verified by residual sampling; None: nothing is.

        Returns:
            One path per row of the batch.
        """
        paths = [Path(len(row.generated)) for row in self.rows]
        walking = [row for row in self.rows if not row.finished]
        for row in walking:
            paths[row.index].accepted.append(0)
        while walking:
            chosen = self._choose(walking, paths, verified, drawn)
            for row, token in zip(walking, chosen, strict=True):
                padding = row.padding if self.in_step else None
                row.generated.append(token if padding is None else padding)
                if padding is None:
                    paths[row.index].tokens.append(token)
            if STREAMS_FIRST:
                self._stream(walking)
            self.stopping.finish(walking, self.rows, self.recorder.shown, self.in_step)
            if not STREAMS_FIRST:
                self._stream(walking)
            if self.watch is not None and self.watch.changed:
                break  # the logits at hand are those of another model
            walking = self._following(walking, trees, paths)
        return paths

    def _stream(self, walking: Sequence[RowText]) -> None:
        """Give the streamer the newest tokens, of one row or of rows in step."""
        if self._streamer is not None:
            self._streamer.put(torch.tensor([row.last for row in walking], device="cpu"))

    def _following(
        self, walking: Sequence[RowText], trees: Sequence[TokenTree], paths: Sequence[Path]
    ) -> list[RowText]:
        """The rows whose trees have the chosen token below the path's end, and so logits for the
        next one; in step all or none."""
        children = [
            -1
            if row.finished or not len(trees[row.index])
            else trees[row.index].child(paths[row.index].accepted[-1] - 1, row.generated[-1])
            for row in walking
        ]
        if self.in_step and min(children) < 0:
            return []
        going_on = []
        for row, child in zip(walking, children, strict=True):
            if child >= 0:
                paths[row.index].accepted.append(child + 1)
                going_on.append(row)
        return going_on

    def _choose(
        self,
        walking: Sequence[RowText],
        paths: Sequence[Path],
        verified: Verified,
        drawn: Sequence[Drawn] | None,
    ) -> list[int]:
        """The next tokens of rows that have come to the ends of their paths."""
        rows = [row.index for row in walking]
        nodes = [paths[i].accepted[-1] for i in rows]
        if self.select.greedy and not self.recorder.wants_tokens:
            return verified.best(rows, nodes)
        known = self._ahead is not None and self._ahead.holds
        ahead = verified.chosen(rows, nodes) if known else None
        if ahead is not None and (not self.select.do_sample or self.dice.follow(walking, ahead)):
            return ahead
        if verified.screened is None:
            # A copy in float32 on the prompt's device, as plain decoding makes one.
            device = walking[0].device
            raw = verified.logits(rows, nodes).to(copy=True, dtype=torch.float32, device=device)
        else:
            places = verified.places(rows, nodes)
            found = self._drawn_from(verified.screened, walking, places)
            if found is not None:
                return found
            raw = self._decisive(verified.screened, walking, places)
        scores = self.select.process(walking, raw)
        self.recorder.tokens(walking, scores, raw)
        if drawn is None:
            return self.select.choose(scores, lambda probs: self.dice.draw(probs, walking))
        proposals = [drawn[row.index](paths[row.index].tokens) for row in walking]
        return [
            self.select.choose(one, self.dice.draw_alone)[0]
            if found is None
            else self.select.verify(one[0], found)
            for one, found in zip(scores.split(1), proposals, strict=True)
        ]

    def _drawn_from(
        self, screened: Screened, walking: Sequence[RowText], places: Sequence[int]
    ) -> list[int] | None:
        """The tokens, where they are drawn from all and the draws are known beforehand."""
        sampling = self.select.sampling
        if sampling is None:
            return None

        def choose(i: int, noise: torch.Tensor) -> int:
            token = screened.draw(places[i], noise, sampling)
            if token is None:
                logits = screened.whole(places[i])[None].float()
                scores = self.select.process([walking[i]], logits)
                token = quotient_tokens(scores.softmax(dim=-1), noise[None])[0]
            return token

        return self.dice.draw_by(walking, screened.near.shape[1], choose)

    def _decisive(
        self, screened: Screened, walking: Sequence[RowText], places: Sequence[int]
    ) -> torch.Tensor:
        """float32 [rows, vocab_size]: the logits that their tokens are chosen from, others −inf;
        all of them where that is not known."""
        count, vocab_size = self.select.shortlist, screened.near.shape[1]
        if not count:
            return torch.stack([screened.whole(place).float() for place in places])
        raw = screened.near.new_full((len(places), vocab_size), -torch.inf)
        for line, row, place in zip(raw, walking, places, strict=True):
            ids, logits = screened.logits(place, self.select.touched(row, vocab_size), count)
            line[ids] = logits.float()
        return raw
