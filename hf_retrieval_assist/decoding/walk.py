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
from dataclasses import dataclass, field
from typing import Any

import torch

from ..drafters.base import ChildDraw
from ..kernels.screen import Screened
from ..row_text import Path, RowText
from ..token_tree import TokenTree
from ..verification.verified import Verified
from .call import Call
from .dice import Dice, quotient_token
from .node_choices import NodeChoices
from .recorder import OutputRecorder
from .selection import TokenSelector
from .stopping import Stopping

Drawn = Callable[[Sequence[int]], ChildDraw | None]
"""What was drawn below the node that a path of tokens from the root leads to, if anything was."""


@dataclass(eq=False)
class Walk:
    """Generates tokens of rows along verified trees until there are no logits for the next ones.

    All rows that still walk choose their next tokens together, which costs about what one of them
    costs. A streamer receives one token after the other, or in step one of every row at once.

    Attributes:
        rows: of the call.
        select: chooses the tokens.
        stopping: says after each token which rows are finished.
        recorder: is told of each token's scores and logits where the call wants them.
        dice: the call's random draws.
        streamer: receives the new tokens; None: nobody does.
        in_step: whether all rows choose in one step.
        residual: whether drafts that were drawn may be verified by residual sampling.
    """

    rows: Sequence[RowText]
    select: TokenSelector
    stopping: Stopping
    recorder: OutputRecorder
    dice: Dice
    streamer: Any = None
    in_step: bool = False
    residual: bool = False
    _scores: list[torch.Tensor] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, call: Call, rows: Sequence[RowText], in_step: bool, residual: bool) -> Walk:
        """That of a call; arguments as for the class."""
        select = TokenSelector(call.processors, call.config.do_sample, call.batch_size)
        recorder = OutputRecorder(call.config, call.batch_size)
        return cls(
            *(rows, select, call.stopping, recorder, Dice(rows), call.streamer),
            in_step=in_step,
            residual=residual and select.do_sample,
        )

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
            width: see :class:`~.node_choices.NodeChoices`.
        """
        if self.select.greedy or not self.select.blind or self._needs_logits:
            return None
        return NodeChoices(self.rows, self.select, self.dice, width)

    def end(self, tokens: int) -> bool:
        """End the streamer's text and leave the generator as plain decoding does after so many
        tokens of every row. Returns whether all were drawn as plain decoding draws them."""
        self.dice.end(tokens)
        if self.streamer is not None:
            self.streamer.end()
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
        walking = self.rows if self.in_step else [row for row in self.rows if not row.finished]
        for row in walking:
            paths[row.index].accepted.append(0)
        while walking:
            padding = [row.padding if self.in_step else None for row in walking]
            chosen = self._choose(walking, paths, verified, drawn)
            tokens = [
                token if pad is None else pad for token, pad in zip(chosen, padding, strict=True)
            ]
            for row, token, pad in zip(walking, tokens, padding, strict=True):
                row.generated.append(token)
                if pad is None:
                    paths[row.index].tokens.append(token)
                if not self.in_step:
                    scores = self.recorder.scores(row) if self.recorder.wants_scores else None
                    self.stopping.finish(row, self.rows, scores)
                    if self.streamer is not None:
                        self._stream([token])
            if self.in_step:
                shown = tuple(self._scores) if self.recorder.wants_scores else None
                self.stopping.finish_all(self.rows, self._ids(), shown)
                if self.streamer is not None:
                    self._stream(tokens)
            walking = self._following(walking, tokens, trees, paths)
        return paths

    def _stream(self, tokens: list[int]) -> None:
        self.streamer.put(torch.tensor(tokens, device="cpu"))

    def _following(
        self,
        walking: Sequence[RowText],
        tokens: Sequence[int],
        trees: Sequence[TokenTree],
        paths: Sequence[Path],
    ) -> Sequence[RowText]:
        """The rows whose trees have the chosen token below the path's end, and so logits for the
        next one; in step all or none."""
        children = [
            -1
            if row.finished or not len(trees[row.index])
            else trees[row.index].child(paths[row.index].accepted[-1] - 1, token)
            for row, token in zip(walking, tokens, strict=True)
        ]
        if self.in_step and min(children) < 0:
            return []
        going_on = [row for row, child in zip(walking, children, strict=True) if child >= 0]
        for row, child in zip(walking, children, strict=True):
            if child >= 0:
                paths[row.index].accepted.append(child + 1)
        return going_on

    def _choose(
        self,
        walking: Sequence[RowText],
        paths: Sequence[Path],
        verified: Verified,
        drawn: Sequence[Drawn] | None,
    ) -> list[int]:
        """The next tokens of rows that have come to the ends of their paths."""
        places = [row.index for row in walking]
        nodes = [paths[i].accepted[-1] for i in places]
        if not self.in_step:
            if self.select.greedy and not self.recorder.wants_tokens:
                return verified.best(places, nodes)
            ahead = verified.chosen(places, nodes)
            sampled = self.select.do_sample
            if ahead is not None and (not sampled or self.dice.follow(walking, ahead)):
                return ahead
        if verified.screened is None:
            # A copy in float32 on the prompt's device, as plain decoding makes one.
            device = walking[0].device
            raw = verified.logits(places, nodes).to(copy=True, dtype=torch.float32, device=device)
        else:
            found = self._drawn_from(verified.screened, walking, verified.places(places, nodes))
            if found is not None:
                return found
            raw = self._decisive(verified.screened, walking, verified.places(places, nodes))
        if self.in_step:
            scores = self.select.processors(self._ids(), raw)
            self._scores += [scores] if self.recorder.wants_scores else []
        else:
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

    def _ids(self) -> torch.Tensor:
        """int64 [batch, length] of rows in step."""
        return torch.cat([row.ids for row in self.rows])

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
                token = quotient_token(scores[0].softmax(dim=-1), noise)
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
