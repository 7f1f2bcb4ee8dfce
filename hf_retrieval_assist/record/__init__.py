"""What an assistant did in a call, step by step, and how to look at it."""

from .record import CallRecord, Record, Step, Witness

__all__ = ["CallRecord", "Record", "Step", "Witness"]
