"""What the figures of calls print."""

from html.parser import HTMLParser

from hf_retrieval_assist.stats import CallStats, Stats


class Cells(HTMLParser):
    """Collects the rows of a table, and checks that tags close as they open."""

    def __init__(self):
        super().__init__()
        self.rows, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.rows[-1][-1] += data


def table_of(stats):
    cells = Cells()
    cells.feed(stats._repr_html_())
    assert not cells.open
    return cells.rows


def test_notebooks_show_the_last_call_and_the_total():
    stats = Stats([], {})
    assert [row[1:4] for row in table_of(stats)[1:]] == [["", "0", "0"]] * 2
    call = CallStats(tier="tree", calls=1, steps=4, tokens=13, drafted=20, accepted=8)
    call.seconds |= {"forward": 0.6, "prefill": 0.2, "total": 1.0}
    stats.record(call)
    stats.record(call)
    heading, last, total = table_of(stats)
    assert len(heading) == len(last) == len(total)
    assert last == ["last call", "tree", "13", "4", "3.00", "5.0", "1.00", "80%"]
    assert total == ["2 calls", "tree", "26", "8", "3.00", "5.0", "2.00", "80%"]
