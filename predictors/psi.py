"""Psi: what a router chose, as the predictor's input (design section 4): weights of the chosen k, sum 1, zero elsewhere.

Loads without torch, which only the two functions for tensors import.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from seqmoe.profiles.errors import UsageError

if TYPE_CHECKING:
    import torch


def psi_numpy(expert_ids: NDArray[np.integer], weights: NDArray[np.floating] | None, num_experts: int) -> NDArray:
    """ids [S, L, k], weights [S, L, k] or None -> float32 [S, L, E]; a row whose weights are all zero gets 1/k each.

    UsageError for weights of another shape, negative or not finite.
    """
    shares = _shares(expert_ids, weights)
    out = np.zeros((*expert_ids.shape[:-1], num_experts), dtype=np.float32)
    np.put_along_axis(out, expert_ids.astype(np.int64), shares, axis=-1)
    return out


def normalised_weights(expert_ids: NDArray[np.integer], weights: NDArray[np.floating] | None) -> NDArray[np.float32]:
    """The values that Psi has at the chosen experts, [S, L, k] in the order of `expert_ids`."""
    return _shares(expert_ids, weights)


def _shares(expert_ids: NDArray[np.integer], weights: NDArray[np.floating] | None) -> NDArray[np.float32]:
    k = expert_ids.shape[-1]
    if weights is None:
        return np.full(expert_ids.shape, 1.0 / k, dtype=np.float32)
    if weights.shape != expert_ids.shape:
        raise UsageError(f"weights have shape {list(weights.shape)}, expert_ids {list(expert_ids.shape)}")
    shares = weights.astype(np.float32)
    if not np.isfinite(shares).all() or shares.min(initial=0.0) < 0:
        raise UsageError("router weights must be finite and not negative")
    total = shares.sum(axis=-1, keepdims=True)
    # float16 weights may all have been rounded to zero: then nothing is known but the choice
    return np.where(total > 0, shares / np.where(total > 0, total, 1.0), np.float32(1.0 / k)).astype(np.float32)


def psi(expert_ids: "torch.Tensor", shares: "torch.Tensor", num_experts: int) -> "torch.Tensor":
    """ids int64 [..., k], their normalised weights [..., k] -> float32 [..., E]. Static shapes, no host synchronisation."""
    import torch

    out = torch.zeros(*expert_ids.shape[:-1], num_experts, dtype=torch.float32, device=expert_ids.device)
    return out.scatter_(-1, expert_ids, shares.to(torch.float32))


def psi_of_scores(scores: "torch.Tensor", k: int) -> "torch.Tensor":
    """Psi of a forecast, for recursion: probabilities [..., E] -> the best k kept and renormalised, zero elsewhere."""
    best = scores.topk(k, dim=-1)
    shares = best.values / best.values.sum(-1, keepdim=True).clamp_min(1e-20)
    return scores.new_zeros(scores.shape).scatter_(-1, best.indices, shares)


def psi_of_scores_numpy(scores: NDArray[np.floating], k: int) -> NDArray[np.float32]:
    """`psi_of_scores` for arrays."""
    best = np.argpartition(-scores, k - 1, axis=-1)[..., :k]
    values = np.take_along_axis(scores, best, axis=-1).astype(np.float32)
    out = np.zeros(scores.shape, dtype=np.float32)
    np.put_along_axis(out, best, values / np.maximum(values.sum(axis=-1, keepdims=True), 1e-20), axis=-1)
    return out


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float32]:
    """Logits [..., E] -> scores that sum to 1."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)
