"""The random numbers that tokens are drawn with, by row and position, before they are drawn.

`torch.multinomial` of one draw divides the probabilities by as many exponentially distributed
numbers and takes the largest quotient. So these numbers belong to a position of a text, whatever is
drawn there, and a copy of the generator gives those of positions to come. A drafter that divides
its own probabilities by them names the target's token almost as often as greedily (coupling by
common noise: Daliri et al. 2024, arXiv 2408.07978). Rows of a batch that get on unequally are given
the numbers that plain decoding would have given them. On an accelerator what every node of a tree
would draw is found before anybody walks (`foresee`). Same seed, same tokens, same state of the
generator after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ..drafters.base import Foresight
from ..kernels.screen import largest
from ..row_text import RowText
from .selection import TokenSelector

# Of noise that is kept; what is beyond is drawn again from the generator's state, of 5 KB.
_MOST_BYTES = 64 << 20

_TRIALS = 3


class Dice:
    """The draws of one call.

    Args:
        rows: of the call.

    Attributes:
        plain: whether every draw so far was one that plain decoding makes.
    """

    def __init__(self, rows: Sequence[RowText]):
        self.plain = True
        self._rows = rows
        self._device = rows[0].device
        self._generator = _generator_of(self._device)
        # Gives the numbers of positions to come; no use where nobody knows the generator.
        self._twin = torch.Generator("cpu" if self._generator is None else self._generator.device)
        # The position whose numbers the generator gives next.
        self._at = max(len(row.generated) for row in rows)
        # By position, the states before each draw of numbers and behind the last one; of the newest
        # position the first one only.
        self._states: dict[int, list[torch.Tensor]] = {}
        self._noise: dict[tuple[int, int], torch.Tensor] = {}
        self._vocab_size = 0
        # Rows whose numbers are drawn together.
        self._together = 1
        # Whether what `foresee` said still holds.
        self._foreseen = False

    def works(self, vocab_size: int) -> bool:
        """Whether draws from so many probabilities are known beforehand on this device."""
        return self._generator is not None and self._rows_at_once(vocab_size) > 0

    def _rows_at_once(self, vocab_size: int) -> int:
        """Of how many rows numbers are drawn together; 0 where nobody knows how.

        Other devices than CPUs give a number by its place in what is drawn, and each draw is a
        kernel; on a CPU those of one row can be drawn again alone.
        """
        rows = len(self._rows)
        counts = {1, rows} if self._device.type == "cpu" else {rows}
        tried = (n for n in sorted(counts) if draws_by_quotients(self._device, rows, vocab_size, n))
        return next(tried, 0)

    def noise(self, row: int, position: int, vocab_size: int) -> torch.Tensor:
        """float32 [vocab_size]: what the probabilities of a row's next token will be divided by,
        once the row has generated `position` tokens; not for positions that all rows have passed.
        """
        self._anchor(vocab_size)
        if (position, row) not in self._noise:
            states = self._rolled(position)
            if (position, row) not in self._noise:
                draw = row // self._together
                self._keep(position, draw * self._together, self._draw(states[draw]))
        return self._noise[position, row]

    def draw(self, probs: torch.Tensor, rows: Sequence[RowText]) -> list[int]:
        """The next tokens of rows, as plain decoding draws them.

        Args:
            probs: float32 [rows, vocab_size].
            rows: some of the call's, or all of them.
        """
        vocab_size = probs.shape[1]
        places = [len(row.generated) for row in rows]
        even = self._is_even(rows)
        if not self.works(vocab_size):
            self.plain = self.plain and even
            return self._all(probs, rows) if self.plain else _drawn(probs)
        self._anchor(vocab_size)
        if even and places[0] == self._at and len(self._states[self._at]) == 1:
            self._at += 1
            self._forget(self._at)
            return self._all(probs, rows)
        tokens = self._each(rows, vocab_size, lambda i, noise: _token(probs[i], noise))
        if tokens is None:
            self.plain = False
            return _drawn(probs)
        return tokens

    def draw_by(
        self, rows: Sequence[RowText], vocab_size: int, choose: Callable[[int, torch.Tensor], int]
    ) -> list[int] | None:
        """The next tokens of rows, chosen by whoever knows which one has the greatest quotient.

        Args:
            choose: is given the number of a row among `rows`, and its noise.

        Returns:
            None where the noise is not known.
        """
        if not self.works(vocab_size):
            return None
        self._anchor(vocab_size)
        return self._each(rows, vocab_size, choose)

    def _each(
        self, rows: Sequence[RowText], vocab_size: int, choose: Callable[[int, torch.Tensor], int]
    ) -> list[int] | None:
        if min(len(row.generated) for row in rows) < min(self._states):
            # Somebody else has used the generator, and rows that are behind lost their place.
            return None
        tokens = [
            choose(i, self.noise(row.index, len(row.generated), vocab_size))
            for i, row in enumerate(rows)
        ]
        self._pass(rows)
        return tokens

    def foresee(self, probs: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        """int64 [n]: the tokens that will be drawn at places, found without a wait; −1 where
        probabilities are no distribution.

        Args:
            probs: float32 [n, vocab_size]; overwritten.
            places: for each of them, how many tokens its row will have generated, and the row.
        """
        # Position by position, since one draw may give the numbers of all rows.
        noise = {
            place: self.noise(place[1], place[0], probs.shape[1]) for place in sorted({*places})
        }
        quotients = probs.div_(torch.stack([noise[place] for place in places]))
        tokens = quotients.argmax(dim=-1, keepdim=True)
        largest_quotients = quotients.gather(-1, tokens)
        self._foreseen = True
        return torch.where(largest_quotients > 0, tokens, -1)[:, 0]

    def follow(self, rows: Sequence[RowText], tokens: Sequence[int]) -> bool:
        """Draw the next tokens of rows as they were foreseen; False where they have to be drawn
        otherwise, because somebody else has used the generator or there was no distribution."""
        self._anchor(self._vocab_size)
        if not self._foreseen or min(tokens) < 0:
            return False
        self._pass(rows)
        return True

    def _pass(self, rows: Sequence[RowText]) -> None:
        """Go on behind the numbers of the next tokens of rows."""
        self._go_to(max(self._at, 1 + max(len(row.generated) for row in rows)))
        self._forget(min(len(row.generated) for row in self._rows if not row.finished))

    def draw_alone(self, probs: torch.Tensor) -> list[int]:
        """Tokens of float32 [rows, vocab_size] by draws that plain decoding does not make."""
        self.plain = False
        return _drawn(probs)

    def settle(self, tokens: int) -> None:
        """Leave the generator as plain decoding does after so many tokens of every row."""
        if self.plain and tokens in self._states:
            self._go_to(tokens)

    def _is_even(self, rows: Sequence[RowText]) -> bool:
        """Whether these are all rows that have not ended, and they have got equally far."""
        growing = sum(not row.finished for row in self._rows)
        return len(rows) >= growing and len({len(row.generated) for row in rows}) == 1

    def _all(self, probs: torch.Tensor, rows: Sequence[RowText]) -> list[int]:
        """By one draw for all rows of the call, finished ones too, as plain decoding makes it."""
        if len(rows) == len(self._rows):
            return _drawn(probs)
        places = [row.index for row in rows]
        everywhere = probs.new_ones((len(self._rows), probs.shape[1]))
        everywhere[places] = probs
        return torch.multinomial(everywhere, num_samples=1)[places, 0].tolist()

    def _anchor(self, vocab_size: int) -> None:
        """Start anew where somebody else has used the generator since."""
        assert self._generator is not None
        state = self._generator.get_state()
        known = self._states.get(self._at)
        if known is None or vocab_size != self._vocab_size or not torch.equal(known[0], state):
            self._vocab_size = vocab_size
            self._states = {self._at: [state]}
            self._noise.clear()
            self._together = self._rows_at_once(vocab_size)
            self._foreseen = False

    def _rolled(self, position: int) -> list[torch.Tensor]:
        """The states before each draw of numbers of a position, and behind the last one."""
        for place in range(max(self._states), position + 1):
            states = self._states[place]
            for first in range(0, len(self._rows), self._together):
                self._keep(place, first, self._draw(states[-1]))
                states.append(self._twin.get_state())
            self._states[place + 1] = [states[-1]]
        return self._states[position]

    def _draw(self, state: torch.Tensor) -> torch.Tensor:
        self._twin.set_state(state)
        shape = self._together, self._vocab_size
        noise = torch.empty(shape, dtype=torch.float32, device=self._device)
        return noise.exponential_(generator=self._twin)

    def _keep(self, position: int, first: int, noise: torch.Tensor) -> None:
        """Keep the numbers of some rows, float32 [rows, vocab_size], from the first one on."""
        nbytes = noise[0].nbytes
        while self._noise and (len(self._noise) + len(noise)) * nbytes > _MOST_BYTES:
            del self._noise[next(iter(self._noise))]
        self._noise |= {(position, first + i): line for i, line in enumerate(noise)}

    def _go_to(self, position: int) -> None:
        """Let the generator stand before the numbers of a position."""
        assert self._generator is not None
        if position != self._at:
            self._generator.set_state(self._states[position][0])
            self._at = position

    def _forget(self, position: int) -> None:
        """What was known of positions that all rows have passed."""
        self._states = {place: known for place, known in self._states.items() if place >= position}
        for key in [key for key in self._noise if key[0] < position]:
            del self._noise[key]


@dataclass(eq=False)
class RowForesight(Foresight):
    """What one row of a call would choose.

    Attributes:
        select: how the call chooses.
        dice: the call's.
        row: the text.
    """

    select: TokenSelector
    dice: Dice
    row: RowText

    @property
    def draws(self) -> bool:
        return self.select.do_sample

    def knows(self, vocab_size: int) -> bool:
        return not self.select.do_sample or self.dice.works(vocab_size)

    def best(
        self, logits: torch.Tensor, paths: Sequence[Sequence[int]], count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.select.foresee(self.row, logits, paths)
        if not self.select.do_sample:
            return largest(scores, count)
        probs = scores.softmax(dim=-1)
        if self.dice.works(probs.shape[1]):
            known = len(self.row.generated)
            for law, path in zip(probs, paths, strict=True):
                law /= self.dice.noise(self.row.index, known + len(path), len(law))
        best, ids = largest(probs, count)
        return best.log(), ids


def _token(law: torch.Tensor, noise: torch.Tensor) -> int:
    token = int((law / noise).argmax())
    if not law[token] > 0:
        # No distribution: as plain decoding, which raises.
        return _drawn(law[None])[0]
    return token


def _drawn(probs: torch.Tensor) -> list[int]:
    return torch.multinomial(probs, num_samples=1)[:, 0].tolist()


def _generator_of(device: torch.device) -> torch.Generator | None:
    """What `torch.multinomial` draws from on a device; None where it is not known."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return None


@cache
def draws_by_quotients(device: torch.device, rows: int, vocab_size: int, at_once: int) -> bool:
    """Whether a draw of `torch.multinomial` is what this module says, on a device.

    The largest quotients of probabilities and exponential noise, drawn for so many rows at once,
    must be its tokens and leave the generator where it does. Tried once per process, on generators
    of its own.
    """
    generator = _generator_of(device)
    assert generator is not None
    own, twin = torch.Generator(generator.device), torch.Generator(generator.device)
    for trial in range(_TRIALS):
        twin.manual_seed(trial)
        logits = torch.randn((rows, vocab_size), generator=twin, device=device)
        probs = (4.0 * logits).softmax(dim=-1)
        probs[:, trial % vocab_size] = 0.0
        own.manual_seed(trial)
        drawn = torch.multinomial(probs, num_samples=1, generator=own)
        twin.manual_seed(trial)
        noise = torch.empty_like(probs)
        for part in noise.split(at_once):
            part.exponential_(generator=twin)
        alike = torch.equal(drawn[:, 0], (probs / noise).argmax(dim=-1))
        if not alike or not torch.equal(own.get_state(), twin.get_state()):
            return False
    return True
