"""What benchmarks share: turns, tables, progress; and figures in Markdown, read from files."""

import re

import pytest

from benchmarks import tables
from benchmarks.report import Report

pytestmark = pytest.mark.slow


def block_of(marker, folder, old="old"):
    """What `marker` brings in front of an end."""
    rendered = tables.render(f"before <!-- {marker} -->{old}<!-- end --> after", folder)
    start, end = f"before <!-- {marker} -->", "<!-- end --> after"
    assert rendered.startswith(start)
    assert rendered.endswith(end)
    return rendered[len(start) : -len(end)]


@pytest.fixture
def sizes(tmp_path):
    """Reports of two files."""
    report = Report("sizes", {})
    table = report.table("Sizes of things", {"name": "name", "kind": "kind", "value": "value/s"})
    for name, kind, value in [("a", "x", 1.25), ("b, too", "x", 2.0), ("a", "y", 3333.4)]:
        table.add(name=name, kind=kind, value=value)
    report.save(tmp_path)
    report.benchmark, report.tables[0].rows = "more", [{"name": "c", "kind": "x", "value": 0.5}]
    report.save(tmp_path)
    return tmp_path


def test_tables_in_markdown(sizes):
    flat = block_of("table file=sizes title=Sizes columns=name,value where=kind:x", sizes)
    assert flat == "\n| name | value/s |\n| --- | --: |\n| a | 1.25 |\n| b, too | 2 |\n"
    pivot = "table file=sizes title='Sizes of' rows=name across=kind value=value"
    assert block_of(pivot, sizes).splitlines()[3:] == ["| a | 1.25 | 3,333 |", "| b, too | 2 | - |"]
    both = "table file=sizes,more title=Sizes rows=kind,name across=kind value=value digits=1"
    assert block_of(both, sizes).splitlines()[1:] == [
        "| kind | name | x | y |",
        "| --- | --: | --: | --: |",
        "| x | a | 1.2 | - |",
        "| x | b, too | 2.0 | - |",
        "| y | a | - | 3,333.4 |",
        "| x | c | 0.5 | - |",
    ]
    assert block_of("table file=none title=Sizes", sizes).strip() == (
        "Not measured yet: there is no none.json."
    )
    for marker, said in {
        "table file=sizes title=None": "None",
        "table file=sizes title=Sizes columns=colour": "colour",
        "figure file=sizes title=Sizes column=value where=kind:x": "one row, got 2",
        "figure file=sizes title=Sizes column=value where=name:z": "one row, got 0",
        "figure file=sizes title=Sizes column=colour where='kind:x,name:b, too'": "colour",
    }.items():
        with pytest.raises(ValueError, match=said):
            block_of(marker, sizes)


def test_figures_stand_within_a_line(sizes):
    marker = "figure file=sizes title=Sizes column=value where=name:a,kind:x"
    assert block_of(marker, sizes) == "1.25"
    assert block_of(f"{marker} digits=3", sizes, old="") == "1.250"
    line = f"| <!-- {marker} -->7<!-- end --> | <!-- {marker} digits=1 --><!-- end --> |"
    assert re.sub(r"<!--.*?-->", "", tables.render(line, sizes)) == "| 1.25 | 1.2 |"


def test_markdown_out_of_step_is_found(sizes):
    text = sizes / "text.md"
    text.write_text("<!-- table file=more title=Sizes columns=value -->\n<!-- end -->\n")
    options = [str(text), "--results", str(sizes)]
    with pytest.raises(SystemExit, match="out of step"):
        tables.main([*options, "--check"])
    tables.main(options)
    tables.main([*options, "--check"])
    assert "| 0.5 |" in text.read_text()


@pytest.mark.parametrize("path", tables.FILES, ids=lambda path: path.name)
def test_committed_pages_show_the_committed_figures(path):
    """The README's too: both pages have markers, all of which name a file that is there."""
    assert tables.MARKER.search(path.read_text(encoding="utf-8"))
    tables.main([str(path), "--check"])
    assert "Not measured yet" not in path.read_text(encoding="utf-8")
