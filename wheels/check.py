"""What an installed wheel must do: import, and generate what plain `generate` does.

Run by the Python of an environment into which nothing but the wheel was installed, outside of the
source tree.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_retrieval_assist
from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.engines.cpu import skinny
from hf_retrieval_assist.structures import suffix_array, suffix_automaton, suffix_tree


def main() -> None:
    package = Path(hf_retrieval_assist.__file__).parent
    assert "site-packages" in package.parts, f"not the installed package: {package}"
    for module in (skinny, suffix_array, suffix_automaton, suffix_tree):
        assert Path(module.__file__).is_relative_to(package), module.__file__
    assert not list(package.rglob("*.pyx")), "sources in the wheel"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(3, 64, (1, 24))
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 48, "do_sample": False}
    plain = model.generate(prompt, **options)
    assistant = SamAssistant(memory=OutputMemory(), budget=8)
    for _ in range(2):
        assert torch.equal(plain, model.generate(prompt, assistant=assistant, **options))
    stats = assistant.stats.last
    assert stats.accepted > 0, stats
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}: {stats}")


if __name__ == "__main__":
    main()
