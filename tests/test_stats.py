"""What the figures of calls print."""

import re

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.stats import CallStats, Stats
from hf_retrieval_assist.token_tree import TokenTree
from tests.support.lossless import PROMPT, run
from tests.support.scripted import Scripted


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


def test_sources_count_what_was_accepted_and_no_token_besides(llama):
    """A drafter that knows the token behind an accepted one too has drafted no more of the step."""
    start = PROMPT.shape[1]
    text = run(llama, max_new_tokens=12)[0, start:].tolist()
    length = [0]

    def chain(tokens):
        return TokenTree.chain(tokens, [0.9] * len(tokens))

    def wrong(token):
        return (token + 1) % 67

    def knowing(depth, right):
        """Drafts so many tokens of the text, the first `right` of them rightly."""

        def propose(budget):
            coming = text[length[0] :][:depth]
            return chain([*coming[:right], *map(wrong, coming[right:])])

        return propose

    drafters = {
        "two": Scripted(knowing(2, 2), lambda tokens, _: length.append(length.pop() + len(tokens))),
        "one of two": Scripted(knowing(2, 1)),
        "nothing": Scripted(knowing(2, 0)),
        "silent": Scripted(knowing(0, 0)),
    }
    for name, drafter in drafters.items():
        drafter.name = name
    assistant = Assistant([*drafters.values()], budget=16)
    assert run(llama, max_new_tokens=12, assistant=assistant)[0, start:].tolist() == text
    # The prefill's token, and three a step, of which the last is the model's own; then two.
    assert assistant.stats.last.forwards == 4
    assert assistant.stats.last.accepted == 7
    counted = {name: assistant.stats.sources[name] for name in drafters}
    assert counted == {"two": 7, "one of two": 4, "nothing": 0, "silent": 0}
