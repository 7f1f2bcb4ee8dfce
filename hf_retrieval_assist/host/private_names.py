"""Every name of transformers that the core counts on and transformers does not promise.

A release is judged by looking for these names, and not by its number: :func:`why_plain` says what a
release lacks of those without which nothing can be assisted, :func:`absent` what it lacks of any
group. `python -m hf_retrieval_assist.host.private_names` prints the list.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import CodeType
from typing import Any, NamedTuple

from packaging.version import Version
from transformers import GenerationMixin, __version__

from ..system import versions
from ..system.log import get_logger

logger = get_logger(__name__)

# The releases under which the tests have run.
OLDEST, NEWEST = versions.OLDEST["transformers"], "5.24"


class PrivateName(NamedTuple):
    """A name of a release.

    Attributes:
        owner: "module:Class"; "module" of what the module itself defines.
        text: "attribute", or "method(parameter, ...)" with those that the package passes or that
            its override has.
        use: what the package does with it.
    """

    owner: str
    text: str
    use: str

    def __str__(self) -> str:
        return f"{self.owner.rpartition(':')[2]}.{self.text}"

    def lacking(self) -> str | None:
        """What this release lacks of it, in a line; None: nothing."""
        module, _, kind = self.owner.partition(":")
        name, method, parameters = self.text.partition("(")
        try:
            owner: Any = import_module(module)
            owner = getattr(owner, kind) if kind else owner
        except (ImportError, AttributeError) as error:
            return f"{self} is gone ({error}); used for {self.use}"
        if not hasattr(owner, name) and (method or name not in _mentioned(owner)):
            return f"{self} is gone; used for {self.use}"
        if not method:
            return None
        known = inspect.signature(getattr(owner, name)).parameters
        wanted = filter(None, parameters.rstrip(")").split(", "))
        missing = [parameter for parameter in wanted if parameter not in known]
        return f"{self} takes no {', '.join(missing)}; used for {self.use}" if missing else None


def _mentioned(owner: Any) -> set[str]:
    """Names of attributes that a class annotates, or that its methods read or set."""
    found: set[str] = set()
    for kind in getattr(owner, "__mro__", ()):
        found |= vars(kind).get("__annotations__", {}).keys()
        for member in vars(kind).values():
            function = inspect.unwrap(getattr(member, "fget", None) or member)
            for code in _codes(getattr(function, "__code__", None)):
                # Strings too, for what is read by `getattr` with its name.
                found.update(code.co_names, (c for c in code.co_consts if isinstance(c, str)))
    return found


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _codes(constant)


# Each group's owners, and what is used of each: names, and behind a bar their use. Without the
# first group nothing is assisted.
_NAMES = """
# Needed by every assisted call
transformers:GenerationMixin
  generate(custom_generate) | the loop in transformers' place
  _prefill(input_ids, generation_config, model_kwargs) | the prompt's forward
  _sample(input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus,
    streamer) | plain decoding of calls without drafts
  prepare_inputs_for_generation(input_ids, next_sequence_length, is_first_iteration);
    _update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder) | the inputs of
    forwards behind the prompt
  _has_unfinished_sequences(this_peer_finished, synced_gpus, device) | other processes
  _supports_default_dynamic_cache(); _is_user_defined | the call's cache
  _valid_auto_compile_criteria(model_kwargs, generation_config) | plain steps
  _optimize_model_for_decode() | the experts of mixtures
  _pad_token_tensor | rows that have ended
transformers:PreTrainedModel
  _is_stateful | states that cannot be cropped
transformers:PreTrainedConfig
  _attn_implementation | the attention that runs
# Needed by some models
transformers:PreTrainedModel
  enable_input_require_grads() | hooks of trainers that change nothing
  _device_mesh | tensor and pipeline parallelism
  _keys_to_ignore_on_load_unexpected | MTP layers in a checkpoint
transformers.modeling_layers:MtpModel
  _project_to_logits() | MTP layers
"""


def groups(text: str) -> dict[str, list[PrivateName]]:
    """The names by the titles of their groups; lines that go on are indented further."""
    groups: dict[str, list[PrivateName]] = {}
    title = owner = ""
    for line in text.strip().replace("\n    ", " ").split("\n"):
        if line.startswith("# "):
            title = line[2:]
            groups[title] = []
        elif line.startswith("  "):
            names, _, use = line.strip().partition(" | ")
            groups[title] += [PrivateName(owner, name, use) for name in names.split("; ")]
        else:
            owner = line
    return groups


GROUPS = groups(_NAMES)
GENERATE = GROUPS["Needed by every assisted call"]


def absent(names: Sequence[PrivateName]) -> list[str]:
    """What this release of transformers lacks of some names, a line each."""
    return [line for line in (name.lacking() for name in names) if line is not None]


def cache_parameter() -> str | None:
    """What `generate` calls the cache in a forward's keyword arguments; None: it is not found."""
    prepare: Any = GenerationMixin.prepare_inputs_for_generation
    parameters = inspect.signature(prepare).parameters.values()
    return next((p.name for p in parameters if "Cache" in str(p.annotation)), None)


@functools.cache
def why_plain() -> str | None:
    """Why no model can be assisted under this release of transformers; None: models can be.

    A release that nobody has tried is served, and said so once.
    """
    lacking = absent(GENERATE)
    if not lacking and cache_parameter() is None:
        lacking = ["prepare_inputs_for_generation takes no Cache"]
    if lacking:
        return (
            f"every call of every model is decoded plainly under transformers {__version__} "
            f"(tested: {OLDEST} to {NEWEST}), which lacks what an assistant works with: "
            f"{'; '.join(lacking)}"
        )
    if Version(__version__).release[:2] > Version(NEWEST).release:
        logger.warning(
            "transformers %s is newer than the releases that the assistant was tested with (%s to "
            "%s); each model still passes a test of its own before it is assisted",
            *(__version__, OLDEST, NEWEST),
        )
    return None


def table(groups: dict[str, list[PrivateName]]) -> str:
    """A list in Markdown, a row for each owner, without parameters."""
    lines = ["| names | used for |", "|---|---|"]
    for title, names in groups.items():
        lines.append(f"| **{title}** | |")
        for owner, same in itertools.groupby(names, lambda name: name.owner):
            own = [*same]
            texts = ", ".join(f"`{name.text.partition('(')[0]}`" for name in own)
            uses = "; ".join(dict.fromkeys(name.use for name in own))
            lines.append(f"| `{owner.rpartition(':')[2]}`: {texts} | {uses} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(GROUPS))
