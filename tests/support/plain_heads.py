"""Heads that draft, written out from their tensors by the formulas of their papers."""

import math

import torch

from .plain_layers import PlainLayers
from .published_heads import as_speculators


class PlainHead(PlainLayers):
    """What EAGLE and DFlash heads have in common.

    Args:
        tensors: by the names of `speculators`.
        settings: of config.json, in one.
        target: whose embeddings and output layer stand in for those the head lacks.
    """

    def __init__(self, tensors, settings, target):
        names = {as_speculators(name): tensor for name, tensor in tensors.items()}
        super().__init__(names, settings["rms_norm_eps"], settings.get("rope_theta", 1e4))
        self.settings = settings
        own = "embed_tokens.weight", "lm_head.weight"
        theirs = target.get_input_embeddings().weight, target.get_output_embeddings().weight
        self.embeddings, self.output = (
            names.get(name, t) for name, t in zip(own, theirs, strict=True)
        )
        self.head_dim = settings.get("head_dim") or (
            names["layers.0.self_attn.q_proj.weight"].shape[0] // settings["num_attention_heads"]
        )

    def may_norm(self, x, name):
        return self.norm(x, name) if f"{name}.weight" in self.tensors else x

    def heads(self, x, layer, name):
        """[n, heads, head_dim], normed where the head norms queries and keys."""
        projected = self.linear(x, f"{layer}.self_attn.{name}_proj")
        bias = self.tensors.get(f"{layer}.self_attn.{name}_proj.bias", 0)
        split = (projected + bias).unflatten(-1, (-1, self.head_dim))
        return self.may_norm(split, f"{layer}.self_attn.{name}_norm")

    def feed_forward(self, x, layer):
        return x + self.swiglu(self.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")

    def target_id(self, drafted):
        return drafted + int(self.tensors["d2t"][drafted]) if "d2t" in self.tensors else drafted


class PlainEagle(PlainHead):
    """An EAGLE head."""

    def fused(self, features):
        """Hidden states that the first layer is fed, from features [n, widths]."""
        if "layers.0.hidden_norm.weight" not in self.tensors:
            return features
        if "fc_norm.0.weight" in self.tensors:
            parts = features.chunk(3, dim=-1)
            normed = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
            features = torch.cat(normed, dim=-1)
        return self.linear(self.may_norm(features, "input_norm"), "fc")

    def outputs(self, hidden, tokens):
        """[n, width]; each hidden state with the token one place later."""
        embedded = self.embeddings[torch.tensor(tokens)]
        if "layers.0.hidden_norm.weight" in self.tensors:
            normed = self.norm(hidden, "layers.0.hidden_norm")
            read = torch.cat([self.norm(embedded, "layers.0.input_layernorm"), normed], dim=-1)
            x = normed if self.settings.get("norm_before_residual") else hidden
        else:
            x = read = self.linear(torch.cat([embedded, hidden], dim=-1), "fc")
        q, k, v = (self.heads(read, "layers.0", name) for name in "qkv")
        mixed = self.attention(self.rotate(q), self.rotate(k), v).flatten(1)
        x = x + self.linear(mixed, "layers.0.self_attn.o_proj")
        x = self.feed_forward(x, "layers.0")
        return self.norm(x, "norm") if self.settings.get("norm_output") else x

    def probs(self, outputs):
        normed = outputs if self.settings.get("norm_output") else self.may_norm(outputs, "norm")
        return (normed @ self.output.T).softmax(-1)

    def given(self, features, text, path):
        """Probabilities [ids] behind a path of drafted tokens, from [n − 1, widths] features."""
        hidden, tokens = self.fused(features), list(text[1:])
        for token in path:
            hidden = torch.cat([hidden, self.outputs(hidden, tokens)[-1:]])
            tokens.append(token)
        return self.probs(self.outputs(hidden, tokens)[-1])


class PlainParallel(PlainEagle):
    """A P-EAGLE head: masks beside the vector that it learnt, whatever the path."""

    def given(self, features, text, path):
        masks = self.tensors["mask_hidden"][0].expand(len(path), -1)
        hidden = self.fused(torch.cat([features, masks]))
        tokens = [*text[1:], *[self.settings["mask_token_id"]] * len(path)]
        return self.probs(self.outputs(hidden, tokens)[-1])


class PlainBlock(PlainHead):
    """A DFlash or DSpark head.

    Args:
        first: the slot that drafts the next token.
        causal: whether slots of layers with a window see those before them alone.

    Attributes:
        top_k: how many ids of a slot the Markov head speaks of.
    """

    top_k = None

    def __init__(self, tensors, settings, target, first, causal):
        super().__init__(tensors, settings, target)
        self.first, self.causal = first, causal

    def states(self, features, text):
        """[slots, width], from features [n − 1, widths]."""
        size = self.settings["block_size"]
        masks = [self.settings["mask_token_id"]] * (size - 1)
        x = self.embeddings[torch.tensor([text[-1], *masks])]
        x = x * self.settings.get("input_embedding_scale", 1)
        context, known = self.norm(self.linear(features, "fc"), "hidden_norm"), len(features)
        for number in range(self.settings["num_hidden_layers"]):
            layer = f"layers.{number}"
            normed = self.norm(x, f"{layer}.input_layernorm")
            kernels = self.kernels(normed, f"{layer}.attention_conv")
            read = torch.cat([context, self.convolved(normed, kernels, 0)])
            q, k, v = (self.heads(read, layer, name) for name in "qkv")
            later = torch.zeros(known + size, known + size, dtype=torch.bool)
            kinds = self.settings.get("layer_types", [])
            if self.causal and kinds[number : number + 1] == ["sliding_attention"]:
                later = later.logical_not().triu(1)
            if kernels is not None and kinds[number : number + 1] == ["sliding_attention"]:
                places = torch.arange(known + size)
                window = self.settings["sliding_window"]
                later = later | ((places[:, None] - places).abs() >= window)
            mixed = self.attention(self.rotate(q), self.rotate(k), v, later)[known:].flatten(1)
            mixed = self.linear(mixed, f"{layer}.self_attn.o_proj")
            x = x + self.convolved(mixed, kernels, 1)
            normed = self.norm(x, f"{layer}.post_attention_layernorm")
            kernels = self.kernels(normed, f"{layer}.mlp_conv")
            inner = self.swiglu(self.convolved(normed, kernels, 0), f"{layer}.mlp")
            x = x + self.convolved(inner, kernels, 1)
        return self.norm(x, "norm")[self.first :]

    def kernels(self, x, conv):
        """[2, taps, n, width]; None in a head without convolutions."""
        if f"{conv}.base_kernel" not in self.tensors:
            return None
        base, group = self.tensors[f"{conv}.base_kernel"], self.settings["conv_group_size"]
        made = self.linear(x, f"{conv}.kernel_projection").unflatten(-1, (*base.shape[:2], -1))
        return base[:, :, None] + made.permute(1, 2, 0, 3).repeat_interleave(group, dim=-1)

    @staticmethod
    def convolved(x, kernels, side):
        """Each slot mixed with those before it."""
        if kernels is None:
            return x
        found = torch.zeros_like(x)
        for slot in range(len(x)):
            for back, weights in enumerate(kernels[side][: slot + 1]):
                found[slot] += weights[slot] * x[slot - back]
        return found

    def given(self, features, text, path):
        """Probabilities [ids] behind a path; a confidence head's is that of the likeliest one."""
        states, rank = self.states(features, text), self.settings.get("markov_rank", 0)
        memory, before = torch.zeros(rank), text[-1]
        for hidden, token in zip(states, [*path, None], strict=False):
            row = self.tensors["markov_head.markov_w1.weight"][before] if rank else hidden[:0]
            logits = hidden @ self.output.T * self.settings.get("output_multiplier", 1)
            if cap := self.settings.get("final_logit_softcapping"):
                logits = cap * (logits / cap).tanh()
            looked_at = self.settings.get("selector_top_k", self.top_k or len(logits))
            seen = logits.topk(looked_at).indices
            if "selector_rank" in self.settings:
                weighed = self.linear(hidden, "candidate_selector.hidden_projection")
                weighed = weighed * self.tensors["candidate_selector.predecessor_codebook"][before]
                share = self.tensors["candidate_selector.successor_codebook"] @ weighed
                logits = logits.index_add(0, seen, share[seen])
            if rank:
                inner, memory = self.inner(row, hidden, memory)
                share = self.tensors["markov_head.markov_w2.weight"] @ inner
                logits = logits.index_add(0, seen, share[seen])
            before = token
        probs = logits.softmax(-1)
        if "confidence_head.proj.weight" not in self.tensors:
            return probs
        weight = self.tensors["confidence_head.proj.weight"][0]
        sure = (
            weight @ torch.cat([hidden, row]) + self.tensors["confidence_head.proj.bias"]
        ).sigmoid()
        best = seen[probs[seen].argmax()]
        estimates = probs * (1 - sure) / (1 - probs[best])
        estimates[best] = sure
        return estimates

    def inner(self, row, hidden, memory):
        kind = self.settings["markov_head_type"]
        if kind == "vanilla":
            return row, memory
        if kind == "gated":
            return self.biased(torch.cat([hidden, row]), "gate").sigmoid() * row, memory
        gate, candidate, output = self.biased(torch.cat([memory, row, hidden]), "joint").chunk(3)
        memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
        return output.tanh(), memory

    def biased(self, x, name):
        name = f"markov_head.{name}_proj"
        return self.linear(x, name) + self.tensors[f"{name}.bias"]


def plain_head(tensors, config, target):
    """The head of a published configuration."""
    settings = config | config.get("transformer_layer_config", {})
    settings |= config.get("eagle_config", {}) | config.get("dflash_config", {})
    if "mask_hidden" in tensors:
        return PlainParallel(tensors, settings, target)
    if "block_size" not in settings:
        return PlainEagle(tensors, settings, target)
    is_theirs, drafts = "speculators_config" in settings, math.inf
    if is_theirs:
        drafts = settings["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    zlab = "markov_rank" not in settings and not is_theirs
    first = 1 if zlab or drafts < settings["block_size"] else 0
    return PlainBlock(tensors, settings, target, first, causal=is_theirs)
