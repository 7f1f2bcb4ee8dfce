"""Drafts for vLLM, whose `speculative_config` names `Proposer` by its dotted path."""

from .proposer import Proposer

__all__ = ["Proposer"]
