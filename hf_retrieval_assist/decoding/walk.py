"""The walk: plain decoding along a token tree whose logits are already there.

Every token is chosen exactly as transformers' own sampling loop chooses it: the logits processors
see the true prefix and its logits, then argmax or one draw of `torch.multinomial` decides.
The tree only saves forwards: when the chosen token is a child of the current node, its logits are
at hand and the walk goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..drafters.base import ChildDraw
from ..kernels.screen import Screened
from ..row_text import Path, RowText
from ..token_tree import TokenTree
from ..verification.verified import Verified
from .dice import Dice, quotient_token
from .recorder import OutputRecorder
from .selection import TokenSelector
from .stopping import Stopping

# What was drawn below the node that a path of tokens from the root leads to, if anything was.
Drawn = Callable[[Sequence[int]], ChildDraw | None]


@dataclass(eq=False)
class Walker:
    """What goes along verified trees.

    Attributes:
        rows: of the call.
        select: chooses the tokens.
        stopping: says after each token which rows are finished.
        recorder: is told of each token's scores and logits where the call wants them.
        dice: the call's random draws.
        streamer: receives the new tokens; None: nobody does.
    """

    rows: Sequence[RowText]
    select: TokenSelector
    stopping: Stopping
    recorder: OutputRecorder
    dice: Dice
    streamer: Any = None


class Walk(Walker):
    """Generates tokens of rows along verified trees until they have no logits for their next ones.

    All rows that still walk choose their next tokens together, which costs about what one of them
    costs, and where they have got equally far is what plain decoding does. A streamer receives one
    token after the other.
    """

    def __call__(
        self,
        running: Sequence[RowText],
        trees: Sequence[TokenTree],
        verified: Verified,
        drawn: Sequence[Drawn] | None = None,
    ) -> list[Path]:
        """Walk rows.

        Args:
            running: the rows to walk; they grow by the generated tokens.
            trees: the nodes that were verified, one tree per row of the batch.
            verified: the forward that fed each row's last token, the root, and its nodes.
            drawn: per row, tells what is to be verified by residual sampling; None: nothing is.

        Returns:
            One path per row of the batch.
        """
        paths = [Path(len(row.generated)) for row in self.rows]
        for row in running:
            paths[row.index].accepted.append(0)
        while running:
            tokens = self._choose(running, paths, verified, drawn)
            for row, token in zip(running, tokens, strict=True):
                row.generated.append(token)
                paths[row.index].tokens.append(token)
                self.stopping.finish(row, self.rows, self.recorder.scores(row))
                if self.streamer is not None:
                    self.streamer.put(torch.tensor([token], device="cpu"))
            running = [
                row
                for row, token in zip(running, tokens, strict=True)
                if not row.finished and _follow(trees[row.index], paths[row.index], token)
            ]
        return paths

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
        if self.select.greedy and not self.recorder.wants_tokens:
            return verified.best(places, nodes)
        ahead = verified.chosen(places, nodes)
        if ahead is not None and (not self.select.do_sample or self.dice.follow(walking, ahead)):
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


def _follow(tree: TokenTree, path: Path, token: int) -> bool:
    """Whether the tree has the token below the path's end, and so logits for the next one."""
    child = tree.child(path.accepted[-1] - 1, token) if len(tree) else -1
    if child >= 0:
        path.accepted.append(child + 1)
    return child >= 0
