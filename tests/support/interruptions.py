"""Where calls are interrupted, as by Ctrl-C."""

from contextlib import contextmanager, nullcontext
from unittest import mock

from .callers import ASKED
from .watching import Interrupt, interrupted_forward


@contextmanager
def raising(owner, name, calls):
    """Scope in which a function raises in the place of another call, after so many."""
    function, left = getattr(owner, name), iter(range(calls))

    def called(*arguments, **options):
        if next(left, None) is None:
            raise Interrupt
        return function(*arguments, **options)

    with mock.patch.object(owner, name, called):
        yield


# Scopes, given the model and the assistant. Blocks of a forward behind the second one lack what
# those before them have.
INTERRUPTIONS = {
    "a prompt's forward": lambda model, assistant: interrupted_forward(model, 0, block=1),
    "a step's forward": lambda model, assistant: interrupted_forward(model, 1, block=1),
    "a drafter": lambda model, assistant: raising(assistant.policy, "draft", 2),
    **dict.fromkeys(ASKED, lambda model, assistant: nullcontext()),
}


def code_that_interrupts(place, at):
    """Options of a call whose criterion, processor or streamer, if `place` is one of these, raises
    at a length."""

    def act(length):
        if length == at:
            raise Interrupt

    return ASKED[place](act) if place in ASKED else {}
