"""What the figures of calls print."""

import re

from hf_retrieval_assist.stats import CallStats, Stats


def table_of(stats):
    rows = re.findall(r"<tr>(.*?)</tr>", stats._repr_html_(), re.DOTALL)
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]


def test_notebooks_show_the_last_call_and_the_total():
    stats = Stats([], {})
    assert repr(stats) == "no call yet"
    assert [row[1:4] for row in table_of(stats)[1:]] == [["", "0", "0"]] * 2
    call = CallStats(tier="tree", calls=1, steps=4, forwards=4, tokens=13, drafted=20, accepted=8)
    call.seconds |= {"forward": 0.6, "prefill": 0.2, "total": 1.0}
    stats.record(call)
    stats.record(call)
    heading, last, total = table_of(stats)
    assert len(heading) == len(last) == len(total)
    assert last == ["last call", "tree", "13", "5", "2.60", "5.0", "8 of 20", "1.00", "80%"]
    assert total == ["all 2 calls", "tree", "26", "10", "2.60", "5.0", "16 of 40", "2.00", "80%"]


def call_of(saved_seconds=0.0, **changes):
    figures = {"tier": "tree", "calls": 1, "steps": 15, "forwards": 15, "tokens": 48} | changes
    call = CallStats(accepted=figures["tokens"] - figures["steps"] - 1, **figures)
    call.saved_forwards, call.saved_seconds = 32, saved_seconds
    call.seconds["total"] = 2.0
    return call


def test_a_sentence_says_whether_the_assistant_helped():
    assert call_of(1.0).summary == (
        "about 1.50 times as fast as plain steps: 48 tokens in 16 forwards (3.00 a forward, "
        "32 forwards saved), 24.0 tokens/s, 2.00 s where plain steps take about 3.00 s"
    )
    assert call_of(-1.0).summary.startswith("only 0.50 times as fast as plain steps: 48 tokens")
    assert call_of().summary.startswith("48 tokens in 16 forwards (3.00 a forward")
    requests = CallStats(tier="continuous batching", calls=2, steps=6, forwards=4, tokens=16)
    requests.accepted = 8
    assert str(requests) == "16 tokens in 6 forwards (2.00 a forward) [continuous batching]"
    plain = call_of(tier="plain", steps=47, forwards=47)
    assert plain.summary == (
        "not assisted, the log says why: 48 tokens in 48 forwards, 24.0 tokens/s"
    )


def test_figures_of_calls_add_up():
    total = CallStats()
    for call in (call_of(1.0), call_of(-0.5), call_of(rests=1)):
        total.add(call)
    assert (total.saved_seconds, total.plain_seconds, total.saved_forwards) == (0.5, 6.5, 96)
    assert total.tokens_per_forward == 3.0
    assert total.summary.endswith("1 of 3 calls rested")
