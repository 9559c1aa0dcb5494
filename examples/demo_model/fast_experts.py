"""A fast experts function for training a small MoE on a CPU: sort the tokens by expert, one matmul per expert's segment.

Padding every expert to the fullest one and using `torch.bmm` was tried first: routing is uneven enough early on (the
fullest expert has three times the mean) that two thirds of its work is padding.

Shape letters: T tokens, k experts per token, S = T*k, E experts, H hidden, F intermediate size of an expert.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

NAME = "segment_mm"


class _SegmentLinear(torch.autograd.Function):
    """Rows [S, in], sorted by expert, times that expert's weight [E, out, in] -> [S, out]; bounds has E + 1 row numbers."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bounds: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.bounds = bounds
        out = rows.new_empty(rows.size(0), weight.size(1))
        for expert, (start, end) in enumerate(pairwise(bounds)):
            if end > start:
                torch.mm(rows[start:end], weight[expert].T, out=out[start:end])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_rows, grad_weight = torch.empty_like(rows), torch.zeros_like(weight)
        for expert, (start, end) in enumerate(pairwise(ctx.bounds)):
            if end > start:
                torch.mm(grad[start:end], weight[expert], out=grad_rows[start:end])
                torch.mm(grad[start:end].T, rows[start:end], out=grad_weight[expert])
        return grad_rows, grad_weight, None


class _Permute(torch.autograd.Function):
    """`rows[order]` for a permutation; its gradient is then a plain copy, where torch would add row by row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return torch.empty_like(grads[0]).index_copy_(0, order, grads[0]), None


def _segment_linear(rows: Tensor, weight: Tensor, bounds: list[int]) -> Tensor:
    out: Tensor = _SegmentLinear.apply(rows, weight, bounds)  # type: ignore[no-untyped-call]
    return out


def _permute(rows: Tensor, order: Tensor) -> Tensor:
    out: Tensor = _Permute.apply(rows, order)  # type: ignore[no-untyped-call]
    return out


def segment_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Transformers' experts contract: hidden [T, H], index and weights [T, k] -> [T, H]. CPU only, gated, no biases."""
    experts: Any = module
    tokens, top_k = top_k_index.shape
    flat = top_k_index.reshape(-1)  # (S,)
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel()))
    bounds = [0, *torch.bincount(flat, minlength=experts.num_experts).cumsum(0).tolist()]

    copies = hidden_states.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, hidden_states.size(1))  # (S, H)
    gate, up = _segment_linear(_permute(copies, order), experts.gate_up_proj, bounds).chunk(2, dim=-1)  # (S, F) each
    out = _segment_linear(experts.act_fn(gate) * up, experts.down_proj, bounds)  # (S, H)
    out = _permute(out, inverse).view(tokens, top_k, -1)
    return (out * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


def register() -> str:
    """Make it known to transformers; give the returned name to `experts_implementation`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, segment_experts)
    return NAME
