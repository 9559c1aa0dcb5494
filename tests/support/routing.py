"""Synthetic routing with something to learn: tokens that bring their experts, habits of a sequence, router inputs."""

import numpy as np

from seqmoe.predictors.routers import Routers
from seqmoe.predictors.trace import Trace, TraceMeta


def routed_trace(
    seed: int = 0, lengths: tuple[int, ...] = (12, 9, 15), *, router_inputs: bool = False, **shape: int
) -> Trace:
    """A hidden state drifts from step to step and from layer to layer; routers, the same for every seed, choose."""
    trace, _ = routed(seed, lengths, **shape)
    if router_inputs:
        return trace
    parts = (trace.expert_ids, trace.expert_weights, trace.tokens, trace.seq_start, trace.seq_len, trace.num_experts)
    return Trace(*parts, None, trace.meta)


def routed(
    seed: int = 0,
    lengths: tuple[int, ...] = (12, 9, 15),
    layers: int = 3,
    experts: int = 8,
    top_k: int = 2,
    hidden: int = 6,
    vocabulary: int = 5,
) -> tuple[Trace, Routers]:
    """The trace with router inputs, and the routers that chose."""
    model = np.random.default_rng(1234)
    weight = (1.5 * model.standard_normal((layers, experts, hidden))).astype(np.float32)
    embedding = model.standard_normal((vocabulary, hidden))
    turned = [np.linalg.qr(np.eye(hidden) + 0.3 * model.standard_normal((hidden, hidden))) for _ in range(layers)]
    turn = np.stack([q * np.sign(np.diag(r)) for q, r in turned])  # rotations near to none, as a residual stream has
    rng = np.random.default_rng(seed)
    steps = sum(lengths)
    tokens = rng.integers(0, vocabulary, steps).astype(np.int32)
    inputs = np.empty((steps, layers, hidden), dtype=np.float16)
    start = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    for first, length in zip(start.tolist(), lengths, strict=True):
        topic = rng.standard_normal(hidden)
        for t in range(first, first + length):
            x = topic + embedding[tokens[t]]
            for layer in range(layers):
                x = turn[layer] @ x + 0.1 * rng.standard_normal(hidden)
                inputs[t, layer] = x
    logits = np.einsum("slh,leh->sle", inputs.astype(np.float32), weight)
    ids = np.argsort(-logits, axis=2)[:, :, :top_k].astype(np.int16)
    chosen = np.take_along_axis(logits, ids.astype(np.int64), axis=2)
    weights = np.exp(chosen - chosen.max(axis=2, keepdims=True))
    weights = (weights / weights.sum(axis=2, keepdims=True)).astype(np.float32)
    meta = TraceMeta("abc123", "synthetic", f"seed {seed}")
    length = np.array(lengths, dtype=np.int64)
    return Trace(ids, weights, tokens, start, length, experts, inputs, meta), Routers(weight)
