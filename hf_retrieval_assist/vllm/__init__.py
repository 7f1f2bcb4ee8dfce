"""Drafts for vLLM: `speculative_config={"model": "hf_retrieval_assist.vllm.Proposer", ...}`."""

from .proposer import Proposer

__all__ = ["Proposer"]
