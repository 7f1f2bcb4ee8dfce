"""What an assistant did in some calls, and how to look at it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ...drafters.base import Drafter
from ...policy.stats import CallStats
from ...types.token_tree import Int32Array, NamedIds
from . import html
from .passages import Passage, Texts
from .pieces import text_pieces
from .steps import MODEL, CallRecord, Step


class Record:
    """What happened in the calls made inside `with assistant.record() as record`.

    Shown as text by `print`, with the coloured text and the trees of every step in a notebook.
    Recording keeps every proposal: some kilobytes a step.

    Args:
        tokenizer: to show tokens as text; without one they are shown as ids. May be set later.
        on_step: called with every :class:`Step` as it is finished, the prefill included, from the
            thread that generates.

    Attributes:
        calls: in the order in which they started.
    """

    def __init__(self, tokenizer: Any = None, on_step: Callable[[Step], None] | None = None):
        self.tokenizer = tokenizer
        self.on_step = on_step
        self.calls: list[CallRecord] = []

    def observe(
        self,
        prompts: Sequence[Int32Array],
        call: CallStats,
        drafters: tuple[Drafter, ...],
        others: Sequence[Record] = (),
    ) -> CallRecord:
        """What a call that starts now is to tell its steps to, for this record and others."""
        records = self, *others
        listeners = [record.on_step for record in records if record.on_step is not None]
        observed = CallRecord(prompts, call, drafters, listeners)
        for record in records:
            record.calls.append(observed)
        return observed

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def steps(self) -> Iterator[Step]:
        """The steps of all calls."""
        return (step for call in self.calls for step in call.steps)

    @property
    def stats(self) -> CallStats:
        """The figures of all calls together."""
        total = CallStats()
        for call in self.calls:
            total.add(call.stats)
        return total

    @property
    def origins(self) -> list[str]:
        """The sources that proposed anything, in the order of their drafters; the model last."""
        names = dict.fromkeys(
            name for step in self.steps for drafter in step.drafters for name in drafter.origins
        )
        return [*names, MODEL]

    def by_origin(self) -> dict[str, tuple[int, int, int]]:
        """Source -> (nodes it proposed, those of them verified, generated tokens credited to it).

        Proposed nodes count for every source that names them, in each step anew; verified nodes and
        tokens for the one that they are credited to.
        """
        proposed: Counter[str] = Counter()
        verified: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for step in self.steps:
            proposed += step.proposed
            verified.update(map(step.credit, range(len(step.tree))))
        for call in self.calls:
            tokens += call.tokens_by_origin()
        return {name: (proposed[name], verified[name], tokens[name]) for name in self.origins}

    def passages(self, documents: Iterable[NamedIds] = ()) -> list[Passage]:
        """Where drafted tokens stand word for word: in the prompt, in the answer itself, or in
        documents.

        Each token is looked up by the longest passage round it, of two tokens at least and 129 at
        most. Tokens in a row with the same place are one passage.

        Args:
            documents: other texts, such as those of a :class:`~...corpus.datastore.Datastore`.
        """
        found, documents = [], [*documents]
        for number, call in enumerate(self.calls):
            for row, prompt in enumerate(call.prompts):
                generated = call.generated(row)
                pieces = self.pieces(generated, prompt)
                drafted = [i for i, name in enumerate(call.credits(row)) if name != MODEL]
                places = Texts(prompt, generated, documents).places(drafted)
                for start, stop, name, place in places:
                    text = "".join(pieces[start:stop])
                    found.append(Passage(number, row, start, stop, name, place, text))
        return found

    def shown_origins(self) -> list[tuple[str, ...]]:
        """Names and figures of the sources of verified nodes, and of the model."""
        *found, (_, (_, _, chosen)) = self.by_origin().items()
        drafted = [(name, *map("{:,}".format, counts)) for name, counts in found if any(counts[1:])]
        return [*drafted, (MODEL, "", "", f"{chosen:,}")]

    def pieces(
        self, token_ids: Sequence[int] | Int32Array, context: Sequence[int] | Int32Array = ()
    ) -> list[str]:
        """The text that each token adds behind a context, ids where there is no tokenizer."""
        return text_pieces(self.tokenizer, token_ids, context)

    def __repr__(self) -> str:
        rows = [("source", "proposed", "verified", "tokens"), *self.shown_origins()]
        return "\n".join([str(self.stats), *("{:<18}{:>10}{:>10}{:>10}".format(*r) for r in rows)])

    def to_json(self) -> str:
        """Everything, as a JSON object; texts are added where there is a tokenizer."""
        calls = []
        for call in self.calls:
            entry = call.to_dict()
            if self.tokenizer is not None:
                entry["texts"] = [
                    "".join(self.pieces(call.generated(row), prompt))
                    for row, prompt in enumerate(call.prompts)
                ]
            calls.append(entry)
        return json.dumps({"version": 1, "calls": calls})

    def to_html(self) -> str:
        """A page of its own, without scripts and without anything from the network."""
        return html.page(self._repr_html_())

    def _repr_html_(self) -> str:
        return html.fragment(self)
