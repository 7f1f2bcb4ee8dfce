"""What plain `generate` looks up in a step, and how the package watches each of these things.

transformers' loop trusts nothing: in every step it asks methods of the model, processors, criteria
and functions of PyTorch by their names, reads their settings, and runs the model's forward, which
asks hundreds of names more. Whatever is asked there is asked by an assisted call too, at the same
places of the text, or compared with what was asked before; where neither can be, the call is
decoded plainly. :data:`TABLE` has a row for each thing; `docs/watched.md` shows it, which this
module prints when it is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Set
from functools import cache
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList, cache_utils

from ..structures.lookups import Lookups
from .hook_state import LIBRARIES, PACKAGE, written_in
from .lookups import lookups_in, names_in
from .transformers_private import loop, loop_of


class Looked(NamedTuple):
    """Something that plain decoding looks up.

    Attributes:
        what: in Markdown.
        watched: how an assisted call watches it.
        otherwise: what follows once a caller has exchanged or moved it.
    """

    what: str
    watched: str
    otherwise: str


TABLE = (
    Looked(
        "`_sample` of the model's class, and the names in its code",
        "compared when a call begins",
        "plain: that loop decodes",
    ),
    Looked(
        "`_prefill`, `prepare_inputs_for_generation`, `_update_model_kwargs_for_generation`, "
        "`_has_unfinished_sequences`, `_optimize_model_for_decode` of the model",
        "compared when a call begins: who wrote them; behind each token where code of the "
        "caller's runs",
        "plain; within a call, no drafts from there on, and the methods are asked in every step",
    ),
    Looked(
        "`torch.argmax`, `torch.nn.functional.softmax`, `torch.multinomial`",
        "compared at each token",
        "asked at each token for all rows at once, as plain decoding asks them",
    ),
    Looked(
        "`LogitsProcessorList`, and the class of each processor",
        "asked at each token; transformers' own classes, whose results can be foreseen, are known "
        "as long as they are called as transformers wrote it",
        "asked at each token of the true text, all rows at once",
    ),
    Looked(
        "temperature, top-k, top-p, min-p and other settings of processors",
        "read at each token",
        "the next token is chosen by the new ones",
    ),
    Looked(
        "`StoppingCriteriaList`, and the class of each criterion",
        "asked at each token; the limit and the end tokens of transformers' own are read at each "
        "token",
        "as plain: the text ends where the criteria say so then",
    ),
    Looked("the streamer", "given each token", "as plain"),
    Looked(
        "methods of transformers' cache classes",
        "compared when a call begins",
        "plain",
    ),
    Looked(
        "the cache that the caller gave",
        "nothing: drafts would show in it",
        "plain, where code or hooks of the caller's run",
    ),
    Looked(
        "modules and their classes, parameters, buffers, hooks, attributes and the configuration "
        "of the model; autocast and other modes of PyTorch",
        "read by every forward; repeated forwards compare them when a call begins; all calls "
        "behind each token where code of the caller's runs (memory by its address, writes as "
        "PyTorch counts them)",
        "within a call no drafts from there on; between calls tested and recorded anew",
    ),
    Looked(
        "functions that the forward names: globals of modeling modules, `torch.nn.functional`, "
        "methods of classes, attention and masks in transformers' registries",
        "compared when a call begins, and before each repeated forward",
        "tested and recorded anew",
    ),
    Looked(
        "`Module.__call__` of PyTorch, hooks of all modules",
        "compared when a call begins",
        "part of the model: tested with it, not repeated",
    ),
    Looked(
        "`generation_config`",
        "read once, as plain decoding does when `_sample` begins",
        "as plain",
    ),
)

LOOP_METHODS = (
    *("_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"),
    *("_has_unfinished_sequences", "_optimize_model_for_decode"),
)
"""What the loop asks of a model besides its forward."""

# Where the loop finds the functions that choose a token.
_CHOOSERS = (
    *((vars(torch), "argmax"), (vars(torch), "multinomial")),
    (vars(nn.functional), "softmax"),
)

STREAMS_FIRST = "put" in {*names_in(loop().__code__)}
"""Whether streamers get a token before the criteria are asked; since 5.24 behind them."""


def is_own(function: Any, name: str) -> bool:
    """Whether PyTorch, transformers or a library round them wrote what stands under a name."""
    if isinstance(function, BuiltinFunctionType):
        return function.__name__ == name
    if isinstance(function, type):
        return function.__module__.partition(".")[0] in LIBRARIES
    if written_in(function) == "contextlib":
        return is_own(function.__wrapped__, name)
    return written_in(function) in LIBRARIES


class Rules:
    """What is known of how a call's tokens are chosen, or its criteria asked.

    That is: PyTorch's functions and the lists of transformers that do so, and which of the members
    of a list say of a row what its own text and scores say.

    Args:
        members: processors, or criteria.
        kinds: classes of transformers of which that is known.

    Attributes:
        kinds: those of them that the members are of, as transformers wrote them.
    """

    def __init__(self, members: Iterable[Any], kinds: Set[type]) -> None:
        self._names = Lookups()
        self._known = True
        for space, name in (*_CHOOSERS, *_LISTS):
            self._known &= is_own(self._names.add(space, name), name)
        self.kinds = {
            kind
            for kind in {type(member): None for member in members}
            if kind in kinds and is_own(self._names.add(kind, "__call__"), "__call__")
        }

    @property
    def hold(self) -> bool:
        """Whether everything is called as it was when the call began, and as it was written."""
        return self._known and self._names.changed() is None

    def kind(self, member: Any) -> type | None:
        """The class of a member of which all is known, as long as the rules hold."""
        return type(member) if type(member) in self.kinds else None


_LISTS = ((LogitsProcessorList, "__call__"), (StoppingCriteriaList, "__call__"))
CHOOSERS = Rules((), frozenset())
"""Hold while the functions that choose tokens are PyTorch's own."""


def is_known_streamer(streamer: Any) -> bool:
    """Whether a streamer is one of transformers' or of this package, as either wrote it."""
    methods = (getattr(streamer, name, None) for name in ("put", "end", "on_finalized_text"))
    known = ("transformers", PACKAGE)
    return all(written_in(method) in known for method in methods if method is not None)


def has_own_loop(model: Any) -> bool:
    """Whether a model decodes by another loop than transformers' own."""
    return loop_of(model) is not loop_of(GenerationMixin) or not is_own(loop_of(model), "loop")


def why_exchanged(model: Any) -> str | None:
    """What plain decoding of a model would ask in a step that nobody knows; None: all is known."""
    for name in LOOP_METHODS:
        if not is_own(getattr(model, name), name):
            return f"nobody knows what its {name} does in later steps"
    for owner, lookups in (("loop", _of_loop()), ("caches", _of_caches())):
        if (exchanged := _exchanged(lookups)) is not None:
            return f"{exchanged} of transformers' {owner} is another one than transformers wrote"
    return None


def _exchanged(lookups: Lookups | str) -> str | None:
    return lookups if isinstance(lookups, str) else lookups.changed()


@cache
def _of_loop() -> Lookups | str:
    """The names in the loop but those that choose; one that was exchanged before."""
    names = {name for _, name in _CHOOSERS}
    return _known(lookups_in(loop(), but=names))


@cache
def _of_caches() -> Lookups | str:
    """The methods of caches and their layers; the name of one that was exchanged before."""
    found, own = Lookups(), cache_utils.__name__
    for kind in vars(cache_utils).values():
        if isinstance(kind, type) and kind.__module__ == own:
            written = (vars(base) for base in kind.__mro__ if base.__module__ == own)
            for name in {name for names in written for name in names}:
                if inspect.isfunction(getattr(kind, name)):
                    found.add(kind, name)
    return _known(found)


def _known(lookups: Lookups) -> Lookups | str:
    for name, value in lookups.items():
        if callable(value) and not is_own(value, name):
            return name
    return lookups


def table() -> str:
    """The table in Markdown."""
    head = ["| plain decoding looks up | watched | once it is another |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in TABLE)])


if __name__ == "__main__":
    print(table())
