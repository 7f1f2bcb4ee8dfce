"""Figures of reports in Markdown, read from files."""

import pytest

from benchmarks import tables
from benchmarks.report import Report

pytestmark = pytest.mark.slow


@pytest.fixture
def sizes(tmp_path):
    """The folder of a report."""
    report = Report("sizes", {})
    table = report.table("Sizes of things", {"name": "name", "kind": "kind", "value": "value/s"})
    for name, kind, value in [("a", "x", 1.25), ("b, too", "x", 0.5), ("a", "y", 3333.4)]:
        table.add(name=name, kind=kind, value=value)
    report.save(tmp_path)
    return tmp_path


def test_a_line_for_each_value_and_a_column_for_each_of_another(sizes):
    marker = "table file=sizes title=Sizes rows=kind,name across=kind value=value digits=1"
    assert tables.render(f"<!-- {marker} --><!-- end -->", sizes).splitlines()[1:-1] == [
        "| kind | name | x | y |",
        "| --- | --: | --: | --: |",
        "| x | a | 1.2 | - |",
        "| x | b, too | 0.5 | - |",
        "| y | a | - | 3,333.4 |",
    ]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("title=None column=value", "None"),
        ("title=Sizes column=value where=kind:x", "one row, got 2"),
        ("title=Sizes column=colour where='kind:x,name:b, too'", "colour"),
    ],
)
def test_a_marker_that_names_nothing_or_too_much_is_refused(sizes, asked, said):
    with pytest.raises(ValueError, match=said):
        tables.render(f"<!-- figure file=sizes {asked} --><!-- end -->", sizes)
    unknown = "<!-- table file=none title=Sizes --><!-- end -->"
    assert "Not measured yet: there is no none.json." in tables.render(unknown, sizes)


def test_markdown_out_of_step_is_found(sizes):
    text = sizes / "text.md"
    text.write_text("<!-- table file=sizes title=Sizes columns=value -->\n<!-- end -->\n")
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
