"""What benchmarks share: turns, tables, progress."""

import pytest
import torch

from benchmarks import (
    tables,
    timing,
)
from benchmarks.__main__ import BENCHMARKS, MINUTES, UNKNOWN_MINUTES, Progress, chosen
from benchmarks.report import Report


def test_alternating_order_and_medians():
    order = []
    calls = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    seconds, results = timing.alternate(calls, 3, lambda text: None)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert results == {"a": 5, "b": 6}
    assert seconds.keys() == {"a", "b"}


def test_tables_refuse_unknown_columns_and_print_dashes():
    report = Report("x", {})
    table = report.table("Title", {"name": "name", "value": "value/s"})
    table.add(name="long name", value=1234.5)
    table.add(name="none")
    with pytest.raises(KeyError, match="colour"):
        table.add(colour="red")
    title, heading, rule, *body = str(table).splitlines()
    assert title == "Title"
    assert len(heading) == len(rule) == len(body[0])
    assert body[0].endswith("1,234") or body[0].endswith("1,235")
    assert body[1].endswith("-")


def test_tables_in_markdown(tmp_path):
    report = Report("sizes", {})
    table = report.table("Sizes of things", {"name": "name", "kind": "kind", "value": "value/s"})
    for name, kind, value in [("a", "x", 1.25), ("b", "x", 2.0), ("a", "y", 3333.4)]:
        table.add(name=name, kind=kind, value=value)
    report.save(tmp_path)

    def block(marker):
        start, end = f"<!-- {marker} -->\n", "\n<!-- end -->"
        rendered = tables.render(f"before\n{start}old{end}\nafter", tmp_path)
        assert rendered.startswith(f"before\n{start}")
        assert rendered.endswith(f"{end}\nafter")
        return rendered.split(start)[1].split(end)[0].splitlines()

    flat = block("table file=sizes title=Sizes columns=name,value where=kind:x")
    assert flat == ["| name | value/s |", "| --- | --: |", "| a | 1.25 |", "| b | 2 |"]
    pivot = block("table file=sizes title='Sizes of' rows=name across=kind value=value")
    assert pivot[2:] == ["| a | 1.25 | 3,333 |", "| b | 2 | - |"]
    assert torch.__version__ in block("machine file=sizes")[0]
    assert block("table file=none title=Sizes") == ["Not measured yet: there is no none.json."]
    with pytest.raises(ValueError, match="None"):
        block("table file=sizes title=None")
    with pytest.raises(ValueError, match="colour"):
        block("table file=sizes title=Sizes columns=colour")


def test_markdown_out_of_step_is_found(tmp_path):
    report = Report("sizes", {})
    report.table("Sizes", {"value": "value"}).add(value=5)
    report.save(tmp_path)
    text = tmp_path / "text.md"
    text.write_text("<!-- table file=sizes title=Sizes -->\n<!-- end -->\n")
    options = [str(text), "--results", str(tmp_path)]
    with pytest.raises(SystemExit, match="out of step"):
        tables.main([*options, "--check"])
    tables.main(options)
    tables.main([*options, "--check"])
    assert "| 5 |" in text.read_text()


def test_committed_tables_show_the_committed_figures():
    tables.main(["--check"])


def test_progress_says_where_a_run_is(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    progress = Progress(["model", "step"])
    assert progress.next() == "model"
    clock[0] = 60.0
    assert progress.minutes_left == MINUTES["model"] + MINUTES["step"] - 1
    progress("plain, 1 of 3")
    left = f"{progress.minutes_left:.0f}"
    line = f"[1 of 2: model, 1.0 min, about {left} to go] plain, 1 of 3\n"
    assert capsys.readouterr().err == line
    clock[0] = 3600.0
    assert progress.minutes_left == MINUTES["step"]
    assert progress.next() == "step"
    assert progress.minutes_left == MINUTES["step"]


def test_all_of_them_take_less_than_an_hour():
    assert MINUTES.keys() <= BENCHMARKS.keys()
    names = chosen([])
    assert ("accelerator" in names) == torch.cuda.is_available()
    assert set(names) | {"accelerator", "structured"} == BENCHMARKS.keys()
    on_cpu = [name for name in BENCHMARKS if name not in ("accelerator", "structured")]
    assert sum(MINUTES.get(name, UNKNOWN_MINUTES) for name in on_cpu) < 60
    assert chosen(["step"]) == ["step"]
