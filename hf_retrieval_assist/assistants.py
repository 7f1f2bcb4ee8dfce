"""Assistants: what users pass to `generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
from inspect import signature
from typing import TYPE_CHECKING, Any, Never

import numpy as np
from numpy.typing import NDArray

from .attachment import attached
from .cache.prefixes import Prefixes
from .decoding.decode import decode
from .drafters.base import Drafter
from .drafters.expected import Expected, Text
from .plugins import every, load
from .policy.cost_store import CostModels
from .policy.planner import Budget
from .policy.policy import DraftingPolicy, Graphs
from .policy.stats import CallStats
from .system import changes
from .system.arguments import kind_of, require_several
from .system.locks import Lock

if TYPE_CHECKING:
    from .extensions.record import Record, Step


class Assistant:
    """Drafts for `model.generate(..., assistant=...)`; reusable over calls, models and threads.

    Args:
        drafters: where drafts come from.
        budget: how many nodes a step verifies. "auto": as many as pay for themselves at the
            measured cost of this model on this machine, maybe none. A number: that many.
        max_nodes: the most nodes that a drafter may propose under "auto".
        reroute: on a CPU, compute linear layers and attention of verification forwards by the
            fastest method for few rows; see
            :class:`~hf_retrieval_assist.engines.cpu.reroute.reroute`.
        graphs: repeat verification forwards from recordings: on a CUDA device as a graph, see
            :mod:`~hf_retrieval_assist.engines.cuda.fixed_verifier`; on a CPU without the model's
            Python, see :mod:`~hf_retrieval_assist.engines.cpu.repeated_forward`. "fused": graphs
            with compiled norms and rotary embeddings. False: no recordings, no copies of weights.
        fixed_width: on an accelerator, tokens per row that every forward behind the prompt's feeds:
            1, 2, 4, 8, 16, 32, 64, 96, 128, 192 or 256. Drafts are chains of fewer. No kernel sees
            by its shape how much was drafted, so texts in half precision do not depend on it. For
            tests, since it costs time. None: as many as pay. A call that is drafted for in no
            static buffers, as all are on a CPU, raises `ValueError`.
        extra_memory: bytes that smaller copies of a model's weights may take, which its repeated
            forwards on a CPU read; None: an eighth of the memory that is free; 0: there are none.
            Copies are shared by all assistants and go with the model.
        trust_forward: draft for models in whose forward code of yours runs (checkpoints' own code,
            classes, hooks and exchanged functions), on your word that it computes each token from
            the tokens before it, whatever the length and the number fed. Otherwise they are
            decoded plainly.
        prefixes: keeps keys and values of calls' texts, so that a call of one text whose prompt
            begins with a kept one, as a chat's next turn does, does not read that again; None:
            nothing is kept. Private calls keep none and take none.
        residual: verify sampled drafts by residual sampling; for drafters that record what they
            drew from.
        costs: what forwards cost, to share between assistants; None: what all assistants of the
            process have measured.

    Attributes:
        policy: what the loop asks.
        drafters, costs: as above, of the policy.
        stats: figures of the last call and of all; see
            :class:`~hf_retrieval_assist.policy.stats.Stats`.
        records: of calls that go on being recorded; see `record`.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        budget: Budget = "auto",
        max_nodes: int = 255,
        reroute: bool = True,
        graphs: Graphs = True,
        fixed_width: int | None = None,
        extra_memory: int | None = None,
        residual: bool = False,
        trust_forward: bool = False,
        prefixes: Prefixes | None = None,
        costs: CostModels | None = None,
        **unknown: Never,
    ):
        self._refuse(*unknown)
        require_several("drafters", drafters, "a list of drafters")
        if prefixes is not None and not isinstance(prefixes, Prefixes):
            raise TypeError(f"prefixes: expected Prefixes, got {kind_of(prefixes)}")
        self.policy = policy = self._policy(
            drafters,
            budget=budget,
            max_nodes=max_nodes,
            reroute=reroute,
            graphs=graphs,
            fixed_width=fixed_width,
            extra_memory=extra_memory,
            residual=residual,
            trust_forward=trust_forward,
            prefixes=prefixes,
            costs=costs,
        )
        self.drafters, self.stats, self.costs = policy.drafters, policy.stats, policy.costs
        self.records: list[Any] = []
        self._lock = Lock()

    def _refuse(self, *unknown: str) -> None:
        """TypeError for arguments of these names, which a subclass has handed on."""
        for name in unknown:
            known = {*signature(type(self)).parameters, *signature(Assistant).parameters}
            near = [f"; did you mean {one!r}?" for one in get_close_matches(name, known, 1)]
            kind = type(self).__name__
            raise TypeError(f"{kind}: got an unexpected keyword argument {name!r}{''.join(near)}")

    def _policy(self, drafters: Sequence[Drafter], **options: Any) -> DraftingPolicy:
        return DraftingPolicy([*drafters, *[make() for make in every("drafters")]], **options)

    @property
    def learn(self) -> bool:
        """Whether texts teach later ones; see `private`."""
        return self.policy.teaches

    @property
    def expected(self) -> Expected:
        """Texts that outputs are expected to resemble; see `expecting`."""
        return self.policy.expected

    def private(self) -> Assistant:
        """This assistant for texts that must leave no trace in what later texts are drafted from.

        It drafts from all that was learnt so far. Statistics and measured costs, which hold no
        text, stay common to both. Its calls are recorded by its own `record` alone.
        """
        assistant = copy.copy(self)
        assistant.policy = self.policy.twin(teaches=False)
        assistant.records = []
        return assistant

    def expecting(
        self,
        *texts: Text,
        rows: Sequence[Sequence[Text]] = (),
        schema: Any = None,
        tools: Sequence[Any] = (),
        tokenizer: Any = None,
    ) -> Assistant:
        """This assistant for outputs that are expected to resemble `texts`.

        Such as the file that is to be edited, a template, or last week's report, none of which
        has to be in the prompt. Retrieval drafts from them as from the prompt and joins them
        again after each change. `stats` tells how many of their tokens came out.

        Where a model is asked for JSON, or may call tools, the brackets, keys and names that it
        will write are known: `schema` and `tools` draft them. Nothing is constrained.

        Args:
            texts: strings or token ids, for every row of a batch.
            rows: the texts of each row of a batch alone. Where `generate` returns several
                sequences of each prompt, one entry a prompt.
            schema: of the JSON that is expected: a JSON schema, or a pydantic model class.
            tools: that may be called, as `apply_chat_template` takes them; their calls are
                rendered by the tokenizer's chat template.
            tokenizer: of the model; for strings, `schema` and `tools`.

        Raises:
            TypeError: a string, `schema` or `tools` without a tokenizer, ids that are no integers,
                or a schema or tool of another kind.
            ValueError: an id that no vocabulary has; a tool without a name; a chat template that
                writes no tool calls; `schema` or `tools` where a paper's rule drafts. `generate`
                raises it for a batch whose size is no multiple of `rows`.
        """
        assistant = copy.copy(self)
        expected = Expected.of(texts, rows, tokenizer, schema, tools)
        if expected.forms and not self.policy.joins:
            raise ValueError(f"expecting: {self!r} drafts from no schema or tools")
        assistant.policy = self.policy.twin(expected=expected)
        return assistant

    @staticmethod
    def model_changed() -> None:
        """Say that a model was changed in a way that PyTorch does not count.

        Writes through `.data`, through NumPy or into tensors made in inference mode are such, and
        attributes of objects that a module holds. Everything that was found out, recorded or copied
        of models before is found out anew, also within a call that goes on: its next token comes
        from the model as it is now. Other changes are noticed without it.
        """
        changes.say()

    def attached(self, model: Any) -> AbstractContextManager[Assistant]:
        """A scope in which calls of `model.generate` by others are assisted; see `attach`."""
        return attached(model, self)

    def __repr__(self) -> str:
        expected = len(self.expected.texts) + sum(map(len, self.expected.rows))
        twin = "" if self.learn else ".private()"
        twin += f".expecting(<{expected} texts>)" if expected else ""
        return f"{type(self).__name__}({self._arguments()}){twin}"

    def _arguments(self) -> str:
        return f"[{', '.join(self.stats.sources)}], budget={self.policy.planner.budget!r}"

    def __copy__(self) -> Assistant:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Assistant:
        """Itself: callers copy the arguments of `generate`, and what was learnt is not copied."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__}: an assistant's native structures, locks and what it learnt "
            "cannot be pickled; make one in every process, over one OutputMemory(path=...) where "
            "processes are to share what they learn"
        )

    def __call__(self, model: Any, *inputs: Any, **settings: Any) -> Any:
        """Decode; what `generate(custom_generate=assistant)` calls."""
        return decode(model, self.policy, *inputs, observe=self._observe, **settings)

    @contextmanager
    def record(
        self, tokenizer: Any = None, on_step: Callable[[Step], None] | None = None
    ) -> Iterator[Record]:
        """Record every call that starts inside the block, in whatever thread.

        Args:
            tokenizer: to show tokens as text.
            on_step: called with every finished step, while the call goes on.
        """
        record: Record = load("parts", "record")(tokenizer, on_step)
        with self._lock:
            self.records.append(record)
        try:
            yield record
        finally:
            with self._lock:
                self.records.remove(record)

    def _observe(self, prompts: Sequence[NDArray[np.int32]], call: CallStats) -> Any:
        """What a call that starts now has to tell its steps to; None where nobody records."""
        with self._lock:
            records = list(self.records)
        if not records:
            return None
        first, *others = records
        return first.observe(prompts, call, self.drafters, others)
