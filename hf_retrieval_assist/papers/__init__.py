"""Published systems whose own rules choose between drafts, with the papers' defaults.

The assistants of the same sources in :mod:`~hf_retrieval_assist.presets` let measurements decide.
"""

from .sam_decoding import SamDecoding as SamDecoding
from .suffix_decoding import SuffixDecoding as SuffixDecoding
