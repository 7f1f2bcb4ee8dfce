"""A tiny model and its tokenizer: every character is a token, for prompts and rewards in words."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.tiny_models import tiny_config, tiny_model

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def character_tokenizer(alphabet):
    vocabulary = {symbol: i for i, symbol in enumerate([*SPECIAL, *alphabet])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    pad, bos, eos, unk = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        padding_side="left",
    )


def small_world(alphabet, **overrides):
    """A model over the alphabet's characters, and its tokenizer."""
    tokenizer = character_tokenizer(alphabet)
    config = tiny_config(
        LlamaForCausalLM.config_class,
        vocab_size=len(tokenizer),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **overrides,
    )
    return tiny_model(LlamaForCausalLM, config), tokenizer
