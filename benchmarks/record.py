"""Record what Gemma-3-270M writes: `python -m benchmarks.record` makes `traces/sampled.npz`.

For each prompt of `prompts/`, one sampled output becomes a request; further samples become the
corpus, as a service would hold that answered much the same before.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import DynamicCache, set_seed

from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.tools.demo_model import load_demo_model

from .inputs import read_prompts
from .traces import SHIPPED, Ids, Trace, write_npz


def sample(
    model: Any, prompt: torch.Tensor, samples: int, new_tokens: int, seed: int
) -> Iterator[Ids]:
    """Independent outputs for one prompt (int64 [1, length]), each up to its end token."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt[:, :-1], **{CACHE: cache})
    # All samples share the forward over the prompt.
    cache.batch_repeat_interleave(samples)
    set_seed(seed)
    rows = model.generate(
        prompt.repeat(samples, 1),
        attention_mask=torch.ones(samples, prompt.shape[1], dtype=torch.int64),
        **{CACHE: cache},
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=0.7,
    )
    ends = np.atleast_1d(model.generation_config.eos_token_id)
    for row in rows[:, prompt.shape[1] :].numpy().astype(np.int32):
        stops = np.flatnonzero(np.isin(row, ends))
        yield row[: stops[0] + 1] if len(stops) else row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=int, default=5, help="further samples of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model, tokenizer = load_demo_model("gemma3")
    trace = Trace("sampled", [])
    for prompt in tqdm(read_prompts()):
        ids = tokenizer(prompt.text, return_tensors="pt").input_ids
        output, *others = sample(
            model, ids, 1 + arguments.corpus, arguments.new_tokens, arguments.seed
        )
        trace.requests.append((ids[0].numpy().astype(np.int32), output))
        trace.corpus.extend(others)
    write_npz(SHIPPED / f"{trace.name}.npz", trace)


if __name__ == "__main__":
    main()
