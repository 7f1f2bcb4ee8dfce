"""Made-up outputs, and what memories and logs hold of them."""

import struct
import zlib

import numpy as np

from hf_retrieval_assist.memory.log import OutputLog


def count(memory, tokens, fingerprint=""):
    tree = memory.tree(fingerprint)
    return 0 if tree is None else tree.count(np.array(tokens, dtype=np.int32))


def random_output(rng, length=200, vocabulary=500):
    return rng.integers(0, vocabulary, length).astype(np.int32)


def logged(path):
    log, found = OutputLog(path, 1 << 30), []
    while outputs := log.read()[1]:
        found += [output.token_ids.tolist() for output in outputs]
    return found


def former_log(*outputs, version=1):
    """The bytes of a log of outputs of the model "m" as versions before 0.2 wrote it."""
    rest = struct.pack("<QQ", 1, 0)
    data = b"HFRAoutM" + struct.pack("<II", version, zlib.crc32(rest)) + rest
    for number, tokens in enumerate(outputs):
        body = struct.pack("<QII", number, 1, len(tokens)) + b"m"
        body += np.array(tokens, "<u4").tobytes()
        data += b"\xf5out" + struct.pack("<I", zlib.crc32(body)) + body
    return data
