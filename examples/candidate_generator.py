"""Retrieved drafts in transformers' own assisted decoding loop.

The loop asks `_get_candidate_generator` of the model for its drafts when `prompt_lookup_num_tokens`
is set. Overriding that method in a subclass of the model's class is how it takes another source.

    python examples/candidate_generator.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_retrieval_assist import RetrievalCandidateGenerator, SamAssistant


class RetrievalLlama(LlamaForCausalLM):
    """A Llama whose prompt lookup is done by an assistant's drafters."""

    assistant = SamAssistant()

    def _get_candidate_generator(self, generation_config, **kwargs):
        return RetrievalCandidateGenerator.for_model(
            self.assistant, self, generation_config.max_length
        )


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=None,
    )
    model = RetrievalLlama(config).eval()
    prompt = torch.randint(3, 512, (1, 16))
    plain = model.generate(prompt, max_new_tokens=48, do_sample=False)
    # The number only selects the loop; the drafts are the assistant's.
    drafted = model.generate(prompt, max_new_tokens=48, do_sample=False, prompt_lookup_num_tokens=1)
    print("same tokens:", torch.equal(plain, drafted))


if __name__ == "__main__":
    main()
