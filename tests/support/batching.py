"""Requests for continuous batching, and drafters for them."""

import random

from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.extensions.serving import batching as hosted
from hf_retrieval_assist.types.token_tree import TokenTree

from .memories import wait_until
from .scripted import Scripted

LENGTH = 16
DraftedRequest = hosted.DraftedRequest


def greedy(**options):
    defaults = {"do_sample": False, "max_new_tokens": LENGTH, "eos_token_id": -1}
    return GenerationConfig(**(defaults | options))


def prompts(count=8, seed=0):
    random.seed(seed)
    lengths = [random.randrange(2, 30) for _ in range(count)]
    return [[random.randrange(1, 60) for _ in range(length)] for length in lengths]


def small(**options):
    """A configuration whose cache takes little: by default it takes most of the memory there is."""
    options = {"page_size": 16, "max_batch_tokens": 64, "num_blocks": 64} | options
    return ContinuousBatchingConfig(**options)


def results(model, inputs, config=None, *, persistent_manager=False, **options):
    """What `generate_batch` returns of each request; `assistant`: where one is named."""
    named = {"assistant": options.pop("assistant")} if "assistant" in options else {}
    named |= {"persistent_manager": persistent_manager, "warmup": False}
    return [*model.generate_batch(inputs, config or greedy(), small(**options), **named).values()]


def run(model, inputs, config=None, **options):
    """The generated tokens of each request."""
    found = results(model, inputs, config, **options)
    assert all(output.error is None for output in found)
    return [output.generated_tokens for output in found]


def half_knowing(inputs, outputs, **options):
    """An assistant that drafts the outputs, every seventh token of which it knows wrongly."""
    texts = [[*prompt, *output] for prompt, output in zip(inputs, outputs, strict=True)]
    for text in texts:
        text[6::7] = [1 + token % 50 for token in text[6::7]]
    return SamAssistant(texts, **({"budget": 5} | options))


def half_known(model, count, **options):
    """So many prompts, their outputs, and an assistant that half knows them."""
    inputs = prompts(count)
    plain = run(model, inputs)
    return inputs, plain, half_knowing(inputs, plain, **options)


def drafted(model, inputs, config=None, make=half_knowing, **options):
    """The figures of a run with drafts, whose tokens are those of one without; `make`: makes its
    assistant from both."""
    plain = run(model, inputs, config, **options)
    assistant = make(inputs, plain)
    assert run(model, inputs, config, assistant=assistant, **options) == plain
    return assistant.stats.total


def manager_of(model, assistant, config=None, **options):
    """A scope in which a manager runs."""
    named = {} if assistant is None else {"assistant": assistant}
    named |= {"continuous_batching_config": small(**options), "warmup": False}
    return model.continuous_batching_context_manager(config or greedy(), **named)


def add(manager, inputs, *each, **options):
    """Requests whose names are numbers, each with its own options besides those of all."""
    for name, prompt in numbered(inputs).items():
        own = each[int(name)] if each else {}
        manager.add_request(prompt, request_id=name, **options, **own)


def outputs(manager, requests, errors=False):
    """What a manager delivers until so many requests have finished; fails where its loop ends."""
    while requests:
        output = manager.get_result(timeout=1)
        if output is None:
            assert manager.is_running(), "the loop has ended before its requests"
            continue
        assert errors or output.error is None
        requests -= output.is_finished()
        yield output


def finished(manager, requests):
    """The last outputs of so many requests, with errors and without."""
    return [output for output in outputs(manager, requests, errors=True) if output.is_finished()]


def texts(manager, requests):
    """The tokens of so many requests by their names; none fails."""
    return {output.request_id: output.generated_tokens for output in outputs(manager, requests)}


def numbered(values):
    return {str(number): value for number, value in enumerate(values)}


def settled(manager):
    """Wait until the manager has nothing left to do."""
    processor, drafts = manager.batch_processor, manager.drafts
    wait_until(lambda: not (processor.has_pending_requests() or drafts._texts))


def guess(token):
    """A drafter of one token behind every text, or of what breaks the contract."""
    return Scripted(lambda budget: TokenTree.chain([token] * 2, [0.9, 0.8]), name="guess")
