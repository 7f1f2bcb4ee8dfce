"""What the folder of a published head holds: one reader in front of the loaders.

Understood: EAGLE-1, -2 and -3 of SafeAILab and of tools that follow them (SpecForge, AngelSlim),
DFlash and DFlash 2 of z-lab, DSpark of DeepSpec, and the format of `speculators`, which nests the
configuration of the layers. Files are untrusted input: every value is checked before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

from ...host.feature_taps import HiddenLayers
from .checkpoints import Tensors, local_folder, read_json, read_tensors

Settings = Mapping[str, Any]

EAGLE, BLOCKS = ("eagle", "eagle3", "peagle"), ("dflash", "dflash2", "dspark")

# Other names of the tensors that `speculators` names as the loaders do.
RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^(midlayer|transformer)\."), "layers.0."),
    (re.compile(r"^(fusion_|encoder\.)fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
    (re.compile(r"^embedding_layernorm\."), "embed_norm."),
    (re.compile(r"^pre_lm_head_layernorm\."), "norm."),
)
# Constants, and copies of the target's layers that were kept for training.
IGNORED = re.compile(r"(rotary_emb\.inv_freq|^verifier_(norm|lm_head)\.weight)$")

# What names the target's hidden states that feed a head, and by how much less than their index.
_LAYER_IDS = (
    ("eagle_aux_hidden_state_layer_ids", 0),
    ("aux_hidden_state_layer_ids", 0),
    ("target_layer_ids", 1),
)
_LARGEST = 1e12
# The kinds of RoPE whose frequencies do not change with the length of the text.
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
# Settings of the layers, as transformers names them.
_COUNTS = ("hidden_size", "intermediate_size", "num_attention_heads")


@dataclass(frozen=True)
class PublishedHead:
    """A head as its folder has it, not yet fitted to a target.

    Attributes:
        kind: as `speculators` names it, one of `EAGLE` or `BLOCKS`.
        is_speculators: whether `speculators` wrote it, whose embeddings have no factor.
        settings: of the head and of its layers, in one.
        layers: indices of the target's `hidden_states` that feed it; None: it names none.
        tensors: by the names of `speculators`.
    """

    kind: str
    is_speculators: bool
    settings: Settings
    layers: tuple[int, ...] | None
    tensors: Tensors

    @property
    def generation(self) -> int:
        """1 for EAGLE-1 and EAGLE-2, which have the same weights; 3 for EAGLE-3, whose first block
        norms hidden states apart, and attends from twice their width."""
        queries = self.tensors.get("layers.0.self_attn.q_proj.weight")
        twice = (2 * self.settings.get("hidden_size", 0),)
        doubled = queries is not None and queries.shape[-1:] == twice
        return 3 if doubled or "layers.0.hidden_norm.weight" in self.tensors else 1

    @property
    def hidden_layers(self) -> HiddenLayers:
        """What of a target feeds it. EAGLE-1 is fed what the target's output layer is fed."""
        if self.kind == "eagle" and self.generation == 1:
            return (-1,)
        return self.layers or default_boundaries

    def drafted_ids(self, vocab_size: int) -> int:
        """How many ids of the target's it may draft."""
        known = len(self.tensors.get("d2t", range(vocab_size)))
        return count(self.settings, "draft_vocab_size", known)

    @property
    def num_layers(self) -> int:
        """How many layers it has tensors of."""
        numbers = {name.split(".")[1] for name in self.tensors if name.startswith("layers.")}
        if numbers != set(map(str, range(len(numbers)))):
            raise ValueError(f"layers: expected them numbered from 0 on, found {sorted(numbers)}")
        return len(numbers)

    @property
    def drafts(self) -> int | None:
        """How many tokens its writer drafted with it; None: that is not said."""
        try:
            methods = self.settings["speculators_config"]["proposal_methods"]
            return count(methods[0], "speculative_tokens", most=1024)
        except (KeyError, IndexError, TypeError):
            return None


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """The residual stream before blocks 2, n//2 and n−3, in ascending order, as EAGLE-3 has it.

    Targets of fewer than 7 blocks have fewer distinct ones among these (n = 5 has one, n = 6 has
    two); the reference captures each once and in the order of the forward, and so does this.
    """
    wanted = {2, num_layers // 2, num_layers - 3}
    return tuple(sorted(k for k in wanted if 0 <= k < num_layers))


def read_published(path_or_hub_id: str | PathLike[str], **overrides: Any) -> PublishedHead:
    """The head in a folder, or in a repository of the hub.

    Args:
        path_or_hub_id: folder with `config.json` and the weights, or a hub repository id.
        overrides: settings that the folder is wrong or silent about.

    Raises:
        ValueError: the files are damaged, or are of a head that no loader knows; names it.
    """
    folder = local_folder(path_or_hub_id)
    raw = read_json(folder / "config.json")
    settings = dict(raw)
    # The layers' own settings, and what some publishers keep apart.
    for part in ("transformer_layer_config", "eagle_config", "dflash_config"):
        nested = raw.get(part) or {}
        if not isinstance(nested, Mapping):
            raise ValueError(f"{folder}: {part}: expected an object, got {nested!r}")
        settings |= nested
    settings |= overrides
    tensors = {}
    for name, tensor in read_tensors(folder).items():
        for pattern, replacement in RENAMED:
            name = pattern.sub(replacement, name)
        if not IGNORED.search(name):
            tensors[name] = tensor
    if "fc.weight" not in tensors:
        raise ValueError(
            f"{folder}: expected the tensors of a head, found no fc.weight (a whole model is given "
            "as the model, not as its folder)"
        )
    named = raw.get("speculators_model_type")
    kind = _kind_of(settings, tensors) if named is None else named
    # A block's layers with another output, of which only its name tells.
    projector = settings.get("projector_type", "dflash")
    kind = kind if projector == "dflash" else projector
    if kind not in (*EAGLE, *BLOCKS):
        raise ValueError(f"{folder}: expected a head of {(*EAGLE, *BLOCKS)}, got {kind!r}")
    return PublishedHead(kind, named is not None, settings, _layers(settings), tensors)


def _kind_of(settings: Settings, tensors: Tensors) -> str:
    """What a head is whose writer does not say it."""
    if "selector_rank" in settings:
        return "dflash2"
    if "mask_hidden" in tensors or settings.get("parallel_drafting"):
        return "peagle"
    if "block_size" not in settings:
        return "eagle"
    return "dspark" if "markov_rank" in settings else "dflash"


def _layers(settings: Settings) -> tuple[int, ...] | None:
    for name, less in _LAYER_IDS:
        if ids := settings.get(name):
            if not isinstance(ids, list) or not all(type(k) is int and k >= -1 for k in ids):
                raise ValueError(f"{name}: expected a list of numbers from -1 on, got {ids!r}")
            return tuple(k + less for k in ids)
    return None


def number(
    settings: Settings, name: str, least: float, most: float = _LARGEST, default: Any = None
) -> Any:
    """A number, where it is stated; ValueError if it is none, out of range, or neither stated nor
    known by default."""
    value = settings.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name}: expected a number from {least:g} to {most:g}, got {value!r}")
    return value


def count(
    settings: Settings,
    name: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: float = _LARGEST,
) -> int:
    """A whole number; otherwise as `number`."""
    value = number(settings, name, least, most, default)
    if not isinstance(value, int):
        raise ValueError(f"{name}: expected a whole number, got {value!r}")
    return value


@contextmanager
def reading(layers: str) -> Iterator[None]:
    """A scope in which settings make layers: whatever values of another kind make of it is a
    ValueError."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"config.json: expected settings of {layers} ({error})") from error


def layer_settings(settings: Settings) -> dict[str, Any]:
    """What layers of all kinds are configured by, in the fields of transformers 5."""
    sizes = {name: count(settings, name) for name in _COUNTS}
    heads = sizes["num_attention_heads"]
    return {
        **sizes,
        "num_key_value_heads": count(settings, "num_key_value_heads", heads),
        "head_dim": count(settings, "head_dim", max(1, sizes["hidden_size"] // heads)),
        "rms_norm_eps": float(number(settings, "rms_norm_eps", 0, 1, default=1e-6)),
        "rope_parameters": rope_parameters(settings),
        "max_position_embeddings": count(settings, "max_position_embeddings", 32768),
        "hidden_act": settings.get("hidden_act", "silu"),
    }


def rope_parameters(layer: Settings) -> dict[str, Any]:
    """RoPE as the config of a head's layer states it, in the fields of transformers 5."""
    given = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise ValueError(f"rope_parameters: expected one set for all layers, got {given!r}")
    theta = given.get("rope_theta") or layer.get("rope_theta") or 10000.0
    # A base of 1 turns no position at all.
    number({"rope_theta": theta}, "rope_theta", 1 + 1e-6)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"rope_parameters: expected rope_type to be one of {ROPE_KINDS}, got {given}"
        )
    named = {name: value for name, value in given.items() if name != "type"}
    return {**named, "rope_theta": theta, "rope_type": kind}
