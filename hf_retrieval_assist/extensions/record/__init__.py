"""What an assistant did in a call, step by step, and how to look at it."""

from .passages import Passage
from .record import Record
from .steps import CallRecord, Step, Witness

__all__ = ["CallRecord", "Passage", "Record", "Step", "Witness"]
