"""One of two processes that compute one model together; started by the tests, never collected.

Usage: rank_process.py CASE MODEL_FOLDER STORE RANK. Prints "done" where all held.
"""

import datetime
import faulthandler
import os
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM, set_seed

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.papers import Sequoia
from tests.support.memories import remembering

NEW_TOKENS = 48


def prompts(rows, vocab_size):
    """int64 [rows, 36]: texts that repeat themselves, each its own."""
    generator = torch.Generator().manual_seed(3)
    once = torch.randint(2, vocab_size, (rows, 12), generator=generator)
    return once.repeat(1, 3)


def run(model, ids, **options):
    set_seed(5)
    whole = {"attention_mask": torch.ones_like(ids)}
    options = whole | {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    return model.generate(ids, **options)


def everywhere(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def knowing(text, rank):
    """A memory that is another on each rank: the first one knows the output, the second junk."""
    memory = OutputMemory()
    memory.add(text.numpy() if rank == 0 else np.arange(60) % 60)
    return memory


def lossless(model, rank):
    """Greedy, sampled and batched calls, each rank with timings and a memory of its own."""
    whole = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32).eval()
    for sample, rows in ((False, 1), (True, 1), (False, 3)):
        ids = prompts(rows, model.config.vocab_size)
        plain = run(model, ids, do_sample=sample)
        if not sample:
            assert torch.equal(plain, run(whole, ids))
        for preset in (SamAssistant, remembering):
            assistant = preset(memory=knowing(plain[0, ids.shape[1] :], rank))
            for _ in range(6 if preset is remembering and rows == 1 else 2):
                assert torch.equal(plain, run(model, ids, do_sample=sample, assistant=assistant))
            counts = everywhere(assistant.stats.total)
            assert counts[0].steps == counts[1].steps
            assert counts[0].accepted == counts[1].accepted > 0
            print(preset.__name__, sample, rows, counts[rank].mean_accepted_tokens, flush=True)


def undrafted(model, rank):
    """Calls that every rank decodes plainly."""
    ids = prompts(2, model.config.vocab_size)
    assistant = SamAssistant(budget=8)
    assert torch.equal(run(model, ids), run(model, ids, assistant=assistant))
    assert assistant.stats.total.tier == "plain"
    assert assistant.stats.total.drafted == 0


def padded(model, rank):
    """Rows of unequal length, which later stages of a pipeline do not know of."""
    ids = prompts(2, model.config.vocab_size)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    plain = run(model, ids, attention_mask=mask, max_new_tokens=12)
    options = {"max_new_tokens": 12, "assistant": SamAssistant(budget=8)}
    assert torch.equal(plain, run(model, ids, attention_mask=mask, **options))


def raising(tokens):
    """A processor that raises behind so many tokens."""
    left = iter(range(tokens))

    def process(ids, scores):
        if next(left, None) is None:
            raise ArithmeticError("this rank's own fault")
        return scores

    return process


def fails(model, rank):
    """A rank that raises between two forwards ends the call of the other one by an error."""
    ids = prompts(1, model.config.vocab_size)
    plain = run(model, ids)
    for culprit in (0, 1):
        for tokens in (0, 7):
            kind, message = (RuntimeError, "another process that computes this model has failed")
            if rank == culprit:
                kind, message = (ArithmeticError, "this rank's own fault")
            processors = [raising(tokens if rank == culprit else 1 << 30)]
            with pytest.raises(kind, match=message):
                run(model, ids, assistant=SamAssistant(), logits_processor=processors)
            assert torch.equal(plain, run(model, ids, assistant=SamAssistant()))


def refuses(model, rank):
    """Drafters that would have to run a model of which every rank holds a part."""
    ids = prompts(1, model.config.vocab_size)
    whole = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32).eval()
    plain = run(model, ids)
    assert torch.equal(plain, run(model, ids, assistant=Sequoia(whole)))
    for assistant, message in (
        (Sequoia(model), "draft model: expected a model that each process holds"),
        (Sequoia(whole, temperature=1.0), "residual: expected False"),
    ):
        with pytest.raises(ValueError, match=message):
            run(model, ids, do_sample=True, assistant=assistant)


def own_batches(model, rank, **options):
    """Each rank has a batch of its own, of another length, and an assistant of its own."""
    for sample, rows in ((False, 2 + rank), (True, 1)):
        ids = prompts(rows, model.config.vocab_size)[:, rank:]
        options |= {"do_sample": sample, "max_new_tokens": NEW_TOKENS - 20 * rank}
        plain = run(model, ids, **options)
        known = knowing(plain[0, ids.shape[1] :], 0)
        # Whoever counts forwards has a hook of its own.
        assistant = remembering(memory=known, budget=8, trust_forward=True)
        for _ in range(3):
            assert torch.equal(plain, run(model, ids, assistant=assistant, **options))
        assert assistant.stats.total.accepted > 0


def in_company(model, rank, **options):
    """The same where every forward takes all ranks, so that the one that ends first goes on."""
    forwards = []
    count = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    own_batches(model, rank, **options)
    count.remove()
    assert len(set(everywhere(len(forwards)))) == 1


def data_parallel(model, rank):
    own_batches(torch.nn.parallel.DistributedDataParallel(model).module, rank)


def fsdp2(model, rank):
    for layer in model.model.layers:
        fully_shard(layer)
    in_company(fully_shard(model), rank)


def fsdp1(model, rank):
    layers = ModuleWrapPolicy({type(model.model.layers[0])})
    device = torch.device("cpu")
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=layers, device_id=device)
    assert isinstance(model.model.layers[0], FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(wrapped, recurse=False):
        in_company(wrapped.module, rank, synced_gpus=True)


def configured(model, rank):
    """What `distributed_config=` does by itself."""
    assert not any(p.device.type == "meta" for p in model.parameters())
    in_company(model, rank)


def offloaded(folder, rank):
    """Layers on two devices, of which one is the disk."""

    def check(model, rank):
        assert {*map(str, model.hf_device_map.values())} == {"cpu", "disk"}
        assert any(parameter.device.type == "meta" for parameter in model.parameters())
        own_batches(model, rank)

    there = dict.fromkeys(("model.layers.1", "lm_head"), "disk")
    here = ("model.embed_tokens", "model.layers.0", "model.layers.2", "model.norm")
    places = dict.fromkeys((*here, "model.rotary_emb"), "cpu") | there
    loaded(check, device_map=places, offload_folder=f"{sys.argv[3]}-{rank}")(folder, rank)


def zero3(folder, rank):
    """DeepSpeed's third stage: each rank holds a part of every weight."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage}
    loading = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = deepspeed.initialize(model=model, config=config)[0].module.eval()
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    in_company(model, rank)
    del loading


def loaded(check, **options):
    """A check of the model that `from_pretrained` makes with these options."""

    def case(folder, rank):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        check(model.eval(), rank)
        print(check.__name__, flush=True)

    return case


def distributed(check, **sizes):
    """The same with `distributed_config=`."""

    def case(folder, rank):
        from transformers.distributed import DistributedConfig

        loaded(check, distributed_config=DistributedConfig(**sizes))(folder, rank)

    return case


CASES = {
    "tensor_parallel": tuple(loaded(c, tp_plan="auto") for c in (lossless, padded, fails, refuses)),
    "own_batches": tuple(map(loaded, (data_parallel, fsdp2, fsdp1))),
    "offloaded": (offloaded,),
    "distributed_config": (distributed(lossless, tp_size=2), distributed(configured, fsdp_size=2)),
    "pipeline_parallel": tuple(distributed(c, pp_size=2) for c in (lossless, padded, fails)),
    "plain_pipeline": (distributed(undrafted, pp_size=2),),
    "deepspeed": (zero3,),
}


def main():
    case, folder, store, rank = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    faulthandler.enable()
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{store}", limit, world_size=2, rank=rank)
    for check in CASES[case]:
        check(folder, rank)
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)
    # The threads of gloo may let go of tensors after the interpreter has ended, and asking for its
    # lock then aborts the process. What was to be shown has been.
    os._exit(0)


if __name__ == "__main__":
    main()
