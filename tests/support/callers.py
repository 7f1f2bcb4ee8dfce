"""Code of a caller's that acts within a call, beside plain decoding."""

import torch
from transformers import StoppingCriteria

from tests.support.lossless import INPUTS, PROMPT
from tests.support.oracle_drafter import oracle_assistant, sequences_of

START = PROMPT.shape[1]
TEXT = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 24}


class Each(StoppingCriteria):
    """Code of a caller's that acts at some lengths; it is asked as a criterion."""

    def __init__(self, act):
        self.act = act

    def __call__(self, ids, scores, **options):
        self.act(ids.shape[1])
        return torch.zeros(len(ids), dtype=torch.bool)


class Shows:
    """The same as a streamer."""

    def __init__(self, act):
        self.act, self.length = act, None

    def put(self, ids):
        self.length = ids.shape[1] if self.length is None else self.length + 1
        self.act(self.length)

    def end(self):
        pass


def as_processor(act):
    """The same as a logits processor, which sees a token less."""

    def process(ids, scores):
        act(ids.shape[1] + 1)
        return scores

    return {"logits_processor": [process]}


ASKED = {
    "criterion": lambda act: {"stopping_criteria": [Each(act)]},
    "processor": as_processor,
    "streamer": lambda act: {"streamer": Shows(act)},
}


def both(model, make, inputs="one row", seed=1, assistant=None, **options):
    """The results of plain decoding and of an assistant whose drafts are right, and that assistant.

    Args:
        make: the options of one call, whose objects are its own.
    """
    options, given = TEXT | options, INPUTS[inputs]
    results = []
    for assistants in (False, True):
        torch.manual_seed(seed)
        if assistants and assistant is None:
            assistant = oracle_assistant(results[0], given.get("attention_mask"))
        extra = {"assistant": assistant} if assistants else {}
        results.append(model.generate(**given, **options, **make(), **extra))
    return *results, assistant


def agree(model, make, **options):
    plain, assisted, assistant = both(model, make, **options)
    assert torch.equal(sequences_of(plain), sequences_of(assisted))
    return assistant.stats.last
