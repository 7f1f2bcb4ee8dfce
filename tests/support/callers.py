"""Code of a caller's that acts within a call, beside plain decoding."""

import torch
from transformers import StoppingCriteria

from tests.support.lossless import INPUTS, PROMPT
from tests.support.oracle_drafter import agreeing

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


def agree(model, each, inputs="one row", seed=1, assistant=None, **options):
    """The figures of a call whose text is plain decoding's; `each`: see `agreeing`."""
    make = None if assistant is None else lambda plain: assistant
    given = {"seed": seed, "make": make, "each": each, **TEXT, **options}
    return agreeing(model, INPUTS[inputs], **given)[2].stats.last
