"""Attention of random token trees by Triton's kernels, beside attention as it is defined."""

import torch

from hf_retrieval_assist.engines.cuda.fixed_attention import Seen

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


class Case:
    """Random trees behind rows of unequal lengths, all but the first of them padded."""

    def __init__(self, heads, shared, depth, width, dtype, lengths, **kinds):
        torch.manual_seed(0)
        reach, self.softcap = kinds.get("reach"), kinds.get("softcap")
        batch, capacity = len(lengths), -(-(max(lengths) + width) // 64) * 64
        depths_of = depth, kinds.get("out_depth", depth)
        buffers = (torch.randn(batch, capacity, shared, x, dtype=dtype) for x in depths_of)
        self.key, self.value = (buffer.transpose(1, 2) for buffer in buffers)
        self.query = torch.randn(batch, width, heads, depth, dtype=dtype).transpose(1, 2)
        self.scale, self.width, self.sharing = depth**-0.5, width, heads // shared
        length = torch.tensor(lengths)
        self.first = torch.arange(batch).int() * 5
        self.kept = (length - self.first).int()
        self.slots = length[:, None] + torch.arange(width)
        tree = torch.eye(width, dtype=torch.bool).repeat(batch, 1, 1)
        depths = torch.zeros(batch, width, dtype=torch.int64)
        for row in range(batch):
            for node in range(1, width):
                parent = int(torch.randint(0, node, ()))
                tree[row, node] |= tree[row, parent]
                depths[row, node] = depths[row, parent] + 1
        self.unseen = self.hidden = None
        columns = torch.arange(capacity)
        seen = (columns < length[:, None]) & (columns >= self.first[:, None])
        seen = seen[:, None].repeat(1, width, 1)
        if reach is not None:
            self.unseen = length[:, None] + depths - reach
            tree = tree & (depths[:, None, :] > depths[:, :, None] - reach)
            seen &= columns > self.unseen[..., None]
        if kinds.get("holes"):
            self.hidden = torch.rand(batch, capacity) < 0.3
            self.hidden &= columns < length[:, None]
            seen &= ~self.hidden[:, None]
        self.seen = seen.scatter(2, self.slots[:, None].expand(-1, width, -1), tree)
        edge = torch.ones(batch, width, 1, dtype=torch.bool)
        self.table = torch.cat([edge, tree, edge], 2)
        self.sinks = torch.randn(heads) if kinds.get("sinks") else None

    def run(self, width=None, skipped=0):
        """[batch, heads, queries, depth] of the first nodes, all or `width`, less the very first
        ones, which were fed before."""
        # Needs Triton.
        from hf_retrieval_assist.engines.cuda.triton_attention import tree_attention

        width = width or self.width
        queries = slice(skipped, width)
        reached = None if self.unseen is None else self.unseen[:, queries, None].contiguous()
        table = self.table[:, queries, : width + 2].contiguous()
        out = tree_attention(
            self.query[:, :, queries],
            *(self.key, self.value),
            Seen(self.kept, self.first, table, reached, self.hidden),
            *(self.scale, self.softcap, self.sinks),
        )
        return out.transpose(1, 2)

    def error(self):
        key, value = (x.double().repeat_interleave(self.sharing, 1) for x in (self.key, self.value))
        scores = self.query.double() @ key.transpose(2, 3) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~self.seen[:, None], -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        expected = scores.softmax(-1)[..., : key.shape[2]] @ value
        return float((self.run().double() - expected).norm() / expected.norm())
