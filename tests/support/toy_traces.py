"""Small traces for predictor tests, made by rules that a predictor can or cannot learn."""

import numpy as np

from seqmoe.predictors.trace import Trace


def trace_of(lengths: list[int], ids: np.ndarray, num_experts: int, tokens: np.ndarray | None = None) -> Trace:
    """A trace with random weights, best first."""
    rng = np.random.default_rng(len(ids))
    weights = -np.sort(-rng.random(ids.shape, dtype=np.float32), axis=-1)
    length = np.array(lengths, dtype=np.int64)
    start = np.concatenate([[0], np.cumsum(length)[:-1]]).astype(np.int64)
    return Trace(ids.astype(np.int16), weights, tokens, start, length, num_experts)


def random_trace(lengths: list[int], layers: int = 3, experts: int = 8, k: int = 2, seed: int = 0) -> Trace:
    """Choices without any rule, and tokens from 0 to 19."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((sum(lengths), layers, experts)), axis=-1)[..., :k]
    return trace_of(lengths, ids, experts, rng.integers(0, 20, sum(lengths)).astype(np.int32))


def walking_trace(sequences: int, steps: int, layers: int = 3, experts: int = 8, seed: int = 0) -> Trace:
    """k = 2: every layer goes round its experts by 1 or by 3 a step, each sequence in its own way and from its own start."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(sequences):
        start, pace = rng.integers(0, experts, layers), rng.choice([1, 3])
        first = (start + pace * np.arange(steps)[:, None]) % experts
        parts.append(np.stack([first, (first + pace) % experts], axis=-1))
    tokens = rng.integers(0, 20, sequences * steps).astype(np.int32)
    return trace_of([steps] * sequences, np.concatenate(parts), experts, tokens)
