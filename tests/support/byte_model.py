"""A model and its tokenizer that read every text."""

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast


def byte_tokenizer(first=(), special=(), **names):
    """Bytes, each a token; a text's last token is always the one it would have in a longer text.

    Args:
        first: tokens in front of the bytes'.
        special: tokens behind them that stand for themselves.
    """
    symbols = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def small_model():
    """A random model with a vocabulary of bytes, so that every text has tokens of its own."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(["<pad>"], pad_token="<pad>")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 32}
    config = Gemma3TextConfig(vocab_size=len(tokenizer), pad_token_id=0, **sizes)
    return AutoModelForCausalLM.from_config(config).eval(), tokenizer
