"""Every kind of file that is read, damaged at random: refused by one clear error, or harmless."""

import json
import random

import numpy as np
import pytest

from hf_retrieval_assist import EagleHead, OutputMemory
from hf_retrieval_assist.corpus.readers import read_texts
from tests.support.memories import check_memory
from tests.support.quick import cases

from .support.damage import damaged
from .support.eagle_fixtures import load_case, outputs

pytestmark = pytest.mark.filterwarnings("ignore")

COUNTS = cases([100, 10_000])
VOCAB = 300
VALUES = [
    *(None, True, 0, -1, 1, 1.5, 2**31, 2**70, 1e400, -1e400, float("nan"), "", "x", "../x"),
    *([], [0], {}, {"a": 1}, [[1, 2]], ["x"] * 3),
]


def altered(value, rng):
    """A value of a JSON text changed, left out or given another name."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        changed, key = dict(value), rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice(["x", "", key.upper()])] = changed.pop(key)
            case _:
                changed[key] = altered(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        changed = list(value)
        place = rng.randrange(len(value))
        changed[place] = altered(value[place], rng)
        return changed
    return rng.choice(VALUES)


def damaged_json(data, rng):
    if rng.random() < 0.5:
        return damaged(data, rng)
    return json.dumps(altered(json.loads(data), rng)).encode()


def damage(path, count, damage_of=damaged):
    """Put `count` damaged contents into a file, one after the other."""
    good, rng = path.read_bytes(), random.Random(0)
    for _ in range(count):
        path.write_bytes(damage_of(good, rng))
        yield
    path.write_bytes(good)


def refused_or(use):
    """What `use` returns; None where it raises a ValueError."""
    try:
        return use()
    except ValueError:
        return None


@pytest.mark.parametrize("count", COUNTS)
def test_logs_of_outputs(tmp_path, count):
    path, rng = tmp_path / "log", np.random.default_rng(0)
    written = [rng.integers(0, VOCAB, n).tolist() for n in (1, 5, 30, 70, 2)]
    memory = OutputMemory(path=path, max_depth=8)
    for output in written:
        memory.add(output, "model")
    opened = 0
    for _ in damage(path, count):
        memory = refused_or(lambda: OutputMemory(path=path, max_depth=8))
        if memory is not None:
            opened += 1
            check_memory(memory)
            memory.add([1, 2, 3], "model")
            check_memory(memory)
    assert 0 < opened < count


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 8}
HEADER = 2_000  # where names and shapes stand; numbers behind them are any numbers


def damaged_header(data, rng):
    whole = rng.random() < 0.3
    return damaged(data, rng) if whole else damaged(data[:HEADER], rng) + data[HEADER:]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("eagle1_fcbias", "settings"),
        ("eagle3_d2t", "settings"),
        ("eagle3_d2t", "safetensors"),
    ],
)
def test_heads(tmp_path, name, kind, count):
    case, damage_of = load_case(name), damaged_header
    case.save(tmp_path)
    path = tmp_path / "model.safetensors"
    if kind == "settings":
        path, damage_of = tmp_path / "config.json", damaged_json
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "rope_scaling": YARN}))
    target, loaded = case.target(), 0
    for _ in damage(path, count, damage_of):
        head = refused_or(lambda: EagleHead.from_pretrained(tmp_path, target))
        if head is not None:
            loaded += 1
            assert outputs(head).isfinite().all()
    assert 0 < loaded < count


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_corpora(tmp_path, kind, count):
    path, rows = tmp_path / f"rows.{kind}", ["one", "zwei", "trois \u2028", "vier"]
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.table({"text": rows}), path)
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    else:
        path.write_text("\n".join(rows), encoding="utf-8")
    for _ in damage(path, count):
        texts = refused_or(lambda: list(read_texts([str(path)]))) or []
        assert all(text.encode().decode() == text for _, text in texts)
