"""A model and its tokenizer that read every text."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast


def small_model():
    """A random model with a vocabulary of bytes, so that every text has tokens of its own."""
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(["<pad>", *alphabet])}
    bytes_alone = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, pad_token="<pad>")
    config = Gemma3TextConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=32,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).eval(), tokenizer
