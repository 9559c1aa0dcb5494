"""One expert for many tokens (prefill): torch's matrix product on blocks of weights, converted as they are needed."""

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from seqmoe.runtime.kernels.emit import BF16, F16, F32, ITEM_BYTES
from seqmoe.runtime.kernels.plan import Bias, Plan, Segment

_DTYPES = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16}
_BLOCK_BYTES = 2 << 20  # of converted weights at a time: they stay in cache until they are multiplied


def fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself (AVX512-BF16 or AMX): without, torch's product is many times
    slower than converting to float32 first."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def memory_view(address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: int) -> torch.Tensor:
    """A tensor over memory that someone else owns; strides in elements."""
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    buffer = (ctypes.c_uint8 * (extent * ITEM_BYTES[kind])).from_address(address)
    return torch.frombuffer(buffer, dtype=_DTYPES[kind]).as_strided(shape, strides)


def segment_view(plan: Plan, segment: Segment, cols: int, addresses: NDArray[np.int64]) -> torch.Tensor:
    """[rows, cols]: a projection's weights, in place."""
    stride = segment.stride // ITEM_BYTES[plan.weight_kind]
    strides = (1, stride) if segment.transposed else (stride, 1)
    return memory_view(int(addresses[segment.view]) + segment.offset, (segment.rows, cols), strides, plan.weight_kind)


def bias_view(bias: Bias, rows: int, addresses: NDArray[np.int64]) -> torch.Tensor:
    """[rows]: a projection's bias, in place."""
    return memory_view(int(addresses[bias.view]) + bias.offset, (rows,), (1,), bias.kind)


class LargeGroups:
    """Computes one expert for a group of tokens."""

    def __init__(self, plan: Plan, module: torch.nn.Module, dtype: torch.dtype) -> None:
        self.plan, self.module, self.dtype = plan, module, dtype
        native = dtype == torch.bfloat16 and plan.weight_kind == BF16 and fast_bfloat16()
        self.product_dtype = torch.bfloat16 if native else torch.float32

    @staticmethod
    def workspace_bytes(plan: Plan, tokens: int) -> int:
        """Memory for a group of at most `tokens` tokens, in bytes."""
        return _BLOCK_BYTES + tokens * (2 * plan.hidden_size + 3 * plan.up_size) * (4 + ITEM_BYTES[plan.kind])

    def compute(self, x: torch.Tensor, addresses: NDArray[np.int64]) -> torch.Tensor:
        """x [n, H] -> [n, H], not weighted; `addresses` int64 [views] of this expert."""
        plan = self.plan
        segments = [s for s in (plan.gate, plan.up) if s is not None]
        parts = [self._project(x, s, plan.hidden_size, addresses) for s in segments]
        up = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        module: Any = self.module
        h = module._apply_gate(up) if plan.gated else module.act_fn(up)
        return self._project(h, plan.down, plan.intermediate_size, addresses)

    def _project(self, x: torch.Tensor, segment: Segment, cols: int, addresses: NDArray[np.int64]) -> torch.Tensor:
        """x [n, cols] -> [n, rows], rounded to the model's dtype.

        The weights are always copied to the same buffer first, even where no conversion is needed: the library's sums
        may depend on how its operands are aligned, and slots differ in that.
        """
        weights = segment_view(self.plan, segment, cols, addresses)
        x = x.to(self.product_dtype).contiguous()
        out = torch.empty(x.shape[0], segment.rows, dtype=self.product_dtype)
        step = max(32, _BLOCK_BYTES // (cols * self.product_dtype.itemsize) // 32 * 32)
        block = torch.empty(min(step, segment.rows), cols, dtype=self.product_dtype)
        for row in range(0, segment.rows, step):
            part = block[: min(step, segment.rows - row)]
            part.copy_(weights[row : row + step])
            out[:, row : row + step] = torch.mm(x, part.T)
        out = out.to(self.dtype)
        if segment.bias is not None:
            out += bias_view(segment.bias, segment.rows, addresses).to(self.dtype)
        return out
