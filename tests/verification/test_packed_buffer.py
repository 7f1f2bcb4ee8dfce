"""Named arrays that cross to a device in one copy."""

import numpy as np
import torch

from hf_retrieval_assist.verification.packed_buffer import PackedBuffer

CPU = torch.device("cpu")


def test_a_packed_buffer_crosses_in_one_copy():
    fields = {
        "flags": (torch.bool, (3,)),
        "ids": (torch.int64, (2, 3)),
        "logits": (torch.bfloat16, (2, 2, 5)),
    }
    buffer = PackedBuffer(fields, CPU)
    buffer.host["ids"].numpy()[:] = np.arange(6).reshape(2, 3)
    buffer.host["flags"].numpy()[:] = [True, False, True]
    buffer.send()
    assert buffer.device["ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert buffer.device["flags"].tolist() == [True, False, True]
    buffer.device["logits"].fill_(2.5)
    buffer.device["ids"].add_(1)
    buffer.fetch()
    buffer.wait()
    assert (buffer.host["logits"] == 2.5).all()
    assert buffer.host["ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
