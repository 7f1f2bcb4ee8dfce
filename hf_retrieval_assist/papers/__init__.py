"""Published systems as their papers have them: a rule of their own drafts, and what it drafts is
verified whole. :class:`~hf_retrieval_assist.presets.SamAssistant` drafts from all their sources,
and lets measurements decide."""

from .rest import Rest as Rest
from .sam_decoding import SamDecoding as SamDecoding
from .sequoia import Sequoia as Sequoia
from .suffix_decoding import SuffixDecoding as SuffixDecoding
from .token_recycling import TokenRecycling as TokenRecycling
