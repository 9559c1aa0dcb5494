"""What the CPU kernels compute, in plain torch: the same arguments, the same rounding, no speed."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from seqmoe.runtime.kernels.emit import GELU_TANH, RELU, RELU2, SILU
from seqmoe.runtime.kernels.experts_cpu import ExpertsCompute
from seqmoe.runtime.kernels.large import bias_view, segment_view
from seqmoe.runtime.kernels.plan import Segment


def act_ref(x: torch.Tensor, activation: int) -> torch.Tensor:
    """The fused activations (`emit.ACTIVATIONS`), rounded to x's dtype."""
    return {
        SILU: functional.silu,
        GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
        RELU: functional.relu,
        RELU2: lambda x: functional.relu(x).square(),
    }[activation](x)


def project_ref(
    compute: ExpertsCompute, x: torch.Tensor, segment: Segment, addresses: NDArray[np.int64]
) -> torch.Tensor:
    """x [n, cols] -> [n, rows]: summed in float64, rounded to the model's dtype, then the bias in that dtype."""
    weights = segment_view(compute.plan, segment, x.shape[1], addresses).double()
    out = (x.double() @ weights.T).to(compute.dtype)
    if segment.bias is not None:
        out = out + bias_view(segment.bias, segment.rows, addresses).to(compute.dtype)
    return out


def forward_ref(
    compute: ExpertsCompute,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    addresses: NDArray[np.int64],
) -> torch.Tensor:
    """`ExpertsCompute.forward`, one pair of token and expert at a time."""
    plan, module = compute.plan, compute.module
    out = torch.zeros(hidden.shape, dtype=torch.float32)
    for t, chosen in enumerate(index.tolist()):
        for j, expert in enumerate(chosen):
            if not 0 <= expert < plan.num_experts:
                continue
            at = addresses[expert]
            parts = [project_ref(compute, hidden[t : t + 1], s, at) for s in (plan.gate, plan.up) if s is not None]
            if plan.activation is not None:
                h = act_ref(parts[0], plan.activation)
                h = h * parts[1] if len(parts) > 1 else h
            else:
                up = torch.cat(parts, dim=1)
                h = module._apply_gate(up) if plan.gated else module.act_fn(up)  # type: ignore[operator]
            y = project_ref(compute, h, plan.down, at)
            if plan.post_norm:
                y = module.post_expert_norm(y)  # type: ignore[operator]
            out[t] += (y[0] * weights[t, j]).float()
    return out.to(hidden.dtype)
