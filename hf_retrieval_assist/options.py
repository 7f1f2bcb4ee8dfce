"""What users tell the presets, as data: shown, compared, kept as JSON and read again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from transformers import PreTrainedModel

from .draft_models.eagle_head import EagleHead
from .drafters.base import Drafter
from .planning.planner import Budget

Source: TypeAlias = Literal["token_recycling", "mtp"] | Drafter | EagleHead | PreTrainedModel
Fallback: TypeAlias = Source | Sequence[Source] | None

Given = TypeVar("Given", bound="Options")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of every preset; see :class:`~hf_retrieval_assist.Assistant`."""

    budget: Budget = "auto"
    reroute: bool = True
    graphs: bool = True
    fixed_width: int | None = None
    extra_memory: int | None = None

    @classmethod
    def among(cls: type[Given], arguments: Mapping[str, Any]) -> Given:
        """The options of this kind among arguments, or other options, by name."""
        return cls(**{field.name: arguments[field.name] for field in dataclasses.fields(cls)})

    def to_json(self) -> str:
        """A JSON object with a member for each option.

        Raises:
            ValueError: an option is an object, such as a model, that JSON cannot hold.
        """
        return json.dumps(dataclasses.asdict(self, dict_factory=_plain), indent=2)

    @classmethod
    def from_json(cls: type[Given], text: str) -> Given:
        """What `to_json` wrote; options that are not there have their defaults.

        Raises:
            ValueError: no JSON object, or an unknown option.
        """
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"options: expected JSON, got {text!r}") from error
        if not isinstance(given, dict):
            raise ValueError(f"options: expected a JSON object, got {given!r}")
        names = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise ValueError(f"options: expected some of {names}, got {name!r}")
        return cls(**given)

    def __str__(self) -> str:
        """What differs from the defaults, as in a call."""
        return ", ".join(
            f"{field.name}={_shown(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )


@dataclass(frozen=True, kw_only=True)
class SamOptions(Options):
    """Of :class:`~hf_retrieval_assist.SamAssistant`."""

    fallback: Fallback = "token_recycling"
    min_match: int | None = None
    corpus_bias: int | None = None
    max_draft: int | None = None
    max_nodes: int = 256


@dataclass(frozen=True, kw_only=True)
class SuffixOptions(Options):
    """Of :class:`~hf_retrieval_assist.SuffixAssistant`."""

    max_depth: int = 64
    alpha: float | None = None
    min_prob: float | None = None
    tree: bool = True
    fallback: Fallback = "token_recycling"
    threshold: float | None = None
    max_nodes: int = 256


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(Options):
    """Of :class:`~hf_retrieval_assist.RolloutAssistant`."""

    half_life: float | None = None
    max_bytes: int | str | None = None
    max_depth: int = 64
    min_prob: float = 0.02
    fallback: Fallback = None
    max_nodes: int = 256


@dataclass(frozen=True, kw_only=True)
class RestOptions(Options):
    """Of :class:`~hf_retrieval_assist.RestAssistant`."""

    max_match: int = 16
    max_nodes: int = 64
    continuation: int = 10


@dataclass(frozen=True, kw_only=True)
class SequoiaOptions(Options):
    """Of :class:`~hf_retrieval_assist.SequoiaAssistant`."""

    temperature: float | None = None
    max_nodes: int = 63
    max_levels: int = 8
    width: int = 8


def require_paper(options: Options, *names: str) -> None:
    """ValueError for options that only a paper's rule knows where another one was asked for."""
    for name in names:
        if options.budget != "paper" and getattr(options, name) is not None:
            raise ValueError(
                f'{name}: expected None without budget="paper", whose rule it belongs to, got '
                f"{getattr(options, name)!r}"
            )


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, value in items:
        several = value if isinstance(value, (list, tuple)) else [value]
        if not all(one is None or isinstance(one, (str, bool, int, float)) for one in several):
            raise ValueError(f"{name}: expected what JSON can hold, got {_shown(value)}")
    return dict(items)


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    plain = value is None or isinstance(value, (str, bool, int, float))
    return repr(value) if plain else f"<{type(value).__name__}>"
