"""Whether code of the caller's, asked at each token of a call, has changed the model."""

from __future__ import annotations

from ..host.lookups import ForwardLookups, ModelWatch
from ..host.plain_step import why_exchanged
from .call import Call


class CallWatch:
    """Compares the model of a call with what its last forward has left.

    Nothing is compared in calls in which no code of the caller's runs between forwards: whoever
    changes their model does so from another thread, and plain decoding does not say what then comes
    out either.

    Args:
        call: whose model.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._model: ModelWatch | None = None

    def begin(self, lookups: ForwardLookups | None) -> None:
        """The prompt's forward is done.

        Args:
            lookups: of the model's forward.
        """
        if self._call.asks_caller and lookups is not None:
            self._model = ModelWatch(self._call.model, lookups)

    def look(self) -> None:
        """A forward is done."""
        if self._model is not None:
            self._model.look()

    @property
    def changed(self) -> bool:
        """Whether the model is another one than in the last forward."""
        if self._model is None:
            return False
        return self._model.changed or why_exchanged(self._call.model) is not None
