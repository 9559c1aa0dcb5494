"""How an experts module is computed from a record's views: which bytes are gate, up and down, which activation, or why not.

Everything is decided here, once, when a model is opened; what the kernels cannot do is refused by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import activations
from transformers.integrations import moe

from seqmoe.profiles.errors import CheckpointError
from seqmoe.runtime.kernels.emit import BF16, F16, F32, GELU_TANH, ITEM_BYTES, RELU, RELU2, SILU

KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
_DISK_KINDS = {"F32": F32, "BF16": BF16, "F16": F16}
_NAMES = {F32: "float32", BF16: "bfloat16", F16: "float16"}


class ViewLike(Protocol):
    """What is needed of `seqmoe.runtime.layout.View`."""

    @property
    def param(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


class LayoutLike(Protocol):
    """What is needed of `seqmoe.runtime.layout.RecordLayout`."""

    @property
    def views(self) -> Sequence[ViewLike]: ...


@dataclass(frozen=True)
class Bias:
    """`rows` values in view `view`, from byte `offset` on."""

    view: int
    offset: int  # bytes
    kind: int


@dataclass(frozen=True)
class Segment:
    """`rows` outputs of a projection: element (row, column) is at offset + row * stride + column * itemsize, or, if
    `transposed`, at offset + column * stride + row * itemsize."""

    rows: int
    view: int
    offset: int  # bytes
    transposed: bool
    stride: int  # bytes
    bias: Bias | None


@dataclass(frozen=True)
class Plan:
    """All that a layer's computation needs to know about its experts.

    `activation` is None where the module's own `_apply_gate` (or `act_fn`) is called between the projections; `up` is
    None if one segment makes up the whole up-projection.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int  # columns of the down-projection
    up_size: int  # rows of the up-projection: gate and up together, or up alone
    gated: bool
    kind: int  # of activations
    weight_kind: int
    activation: int | None
    post_norm: bool
    gate: Segment
    up: Segment | None
    down: Segment
    num_views: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's matrices."""
        return (self.up_size + self.intermediate_size) * self.hidden_size * ITEM_BYTES[self.weight_kind]


def make_plan(layout: LayoutLike, module: torch.nn.Module, dtype: torch.dtype) -> Plan:
    """The plan for an experts module (its parameters may be on the meta device) computed in `dtype`.

    CheckpointError, naming what, for a module or a layout that the kernels cannot compute.
    """
    return _Planner(layout, module, dtype).plan()


class _Planner:
    def __init__(self, layout: LayoutLike, module: torch.nn.Module, dtype: torch.dtype) -> None:
        self.layout, self.module, self.dtype, self.name = layout, module, dtype, type(module).__name__

    def refuse(self, reason: str) -> CheckpointError:
        return CheckpointError(f"experts of {self.name} cannot be computed on the CPU: {reason}")

    def flag(self, name: str) -> bool:
        value = getattr(self.module, name, None)
        if not isinstance(value, bool):
            raise self.refuse(f"the module has no attribute {name} (not one of Transformers' experts modules)")
        return value

    def plan(self) -> Plan:
        if self.dtype not in KINDS:
            raise self.refuse(f"dtype {self.dtype}; float32, bfloat16 and float16 are supported")
        gated, has_bias, transposed = self.flag("has_gate"), self.flag("has_bias"), self.flag("is_transposed")
        up_name = "gate_up_proj" if gated else "up_proj"
        known = {up_name, "down_proj"} | ({f"{up_name}_bias", "down_proj_bias"} if has_bias else set())
        for view in self.layout.views:
            if view.param not in known:
                raise self.refuse(f"parameter {view.param} is not among {', '.join(sorted(known))}")
        up_shape, down_shape = self.shape(up_name), self.shape("down_proj")
        if transposed:
            up_shape, down_shape = (up_shape[0], *up_shape[:0:-1]), (down_shape[0], *down_shape[:0:-1])
        num_experts, up_size, hidden = up_shape
        inner = up_size // 2 if gated else up_size
        if down_shape != (num_experts, hidden, inner):
            raise self.refuse(f"{up_name} is {list(up_shape)} and down_proj {list(down_shape)} as [experts, out, in]")

        kind, weight_kind = KINDS[self.dtype], self.weight_kind(known)
        activation = self.activation(gated)
        segments = self.up_segments(
            up_name, up_size, inner, hidden, transposed, has_bias, activation is not None, gated
        )
        if activation is not None and gated and len(segments) == 1:
            raise AssertionError("a fused gate needs its two halves")
        down = self.segment("down_proj", 0, hidden, inner, transposed, has_bias)
        if len({segment.transposed for segment in segments}) > 1:
            raise self.refuse("gate and up are stored in different orders")
        return Plan(
            num_experts=num_experts, hidden_size=hidden, intermediate_size=inner, up_size=up_size, gated=gated, kind=kind,
            weight_kind=weight_kind, activation=activation, post_norm=self.flag("has_post_expert_norm"),
            gate=segments[0], up=segments[1] if len(segments) > 1 else None, down=down,
            num_views=len(self.layout.views),
        )  # fmt: skip

    def shape(self, name: str) -> tuple[int, ...]:
        parameter = getattr(self.module, name, None)
        if not isinstance(parameter, torch.Tensor) or parameter.dim() != 3:
            raise self.refuse(f"it has no stacked parameter {name}")
        return tuple(parameter.shape)

    def weight_kind(self, known: set[str]) -> int:
        dtypes = {view.dtype for view in self.layout.views if not view.param.endswith("_bias")}
        if len(dtypes) != 1 or not dtypes <= _DISK_KINDS.keys():
            raise self.refuse(f"weights of type {', '.join(sorted(dtypes))}; one of F32, BF16, F16 is supported")
        return self.exact(_DISK_KINDS[dtypes.pop()], "weights")

    def exact(self, disk_kind: int, what: str) -> int:
        """The kind on disk, if computing in `dtype` does not need to round it first."""
        kind = KINDS[self.dtype]
        if disk_kind != kind and kind != F32:
            raise self.refuse(
                f"{what} are {_NAMES[disk_kind]} on disk and would have to be rounded to {_NAMES[kind]};"
                f" use dtype {_NAMES[disk_kind]} or float32"
            )
        return disk_kind

    def activation(self, gated: bool) -> int | None:
        """The fused activation, or None where the module's own function is called."""
        kind: Any = type(self.module)
        if gated and kind._apply_gate is not getattr(moe, "_default_apply_gate", None):
            return None
        act = getattr(self.module, "act_fn", None)
        if isinstance(act, torch.nn.SiLU | activations.SiLUActivation) or act is torch.nn.functional.silu:
            return SILU
        if isinstance(act, activations.GELUTanh):
            tanh = getattr(act.act, "keywords", {}).get("approximate") == "tanh"
            return GELU_TANH if tanh else None
        if isinstance(act, torch.nn.GELU) and act.approximate == "tanh":
            return GELU_TANH
        if isinstance(act, torch.nn.ReLU):
            return RELU
        if isinstance(act, activations.ReLUSquaredActivation):
            return RELU2
        if not gated and not isinstance(act, Callable):  # type: ignore[arg-type]
            raise self.refuse("it has no activation act_fn")
        return None

    def up_segments(
        self, name: str, size: int, inner: int, hidden: int, transposed: bool, has_bias: bool, fused: bool, gated: bool
    ) -> list[Segment]:
        if not gated or (not fused and self.covering(name, 0, size, transposed) is not None):
            return [self.segment(name, 0, size, hidden, transposed, has_bias)]
        return [self.segment(name, start, inner, hidden, transposed, has_bias) for start in (0, inner)]

    def covering(self, name: str, start: int, rows: int, transposed: bool) -> int | None:
        """The view that holds all of these outputs of a matrix."""
        out_dim = 1 if transposed else 0
        for i, view in enumerate(self.layout.views):
            if view.param != name or len(view.shape) != 2:
                continue
            whole_columns = view.dim == out_dim or (
                view.start == 0 and view.shape[view.dim] == self.columns(name, transposed)
            )
            first = view.start if view.dim == out_dim else 0
            if whole_columns and first <= start and start + rows <= first + view.shape[out_dim]:
                return i
        return None

    def columns(self, name: str, transposed: bool) -> int:
        return self.shape(name)[1 if transposed else 2]

    def segment(self, name: str, start: int, rows: int, cols: int, transposed: bool, has_bias: bool) -> Segment:
        index = self.covering(name, start, rows, transposed)
        if index is None:
            raise self.refuse(f"{name}'s outputs {start} to {start + rows - 1} lie in several tensors on disk")
        view = self.layout.views[index]
        out_dim = 1 if transposed else 0
        first = view.start if view.dim == out_dim else 0
        out_stride, in_stride = view.strides[out_dim], view.strides[1 - out_dim]
        item = ITEM_BYTES[_DISK_KINDS[view.dtype]]
        if in_stride == 1 or cols == 1:
            in_order, stride = True, out_stride
        elif out_stride == 1 or rows == 1:
            in_order, stride = False, in_stride
        else:
            raise self.refuse(f"{name} has no contiguous rows or columns on disk (strides {list(view.strides)})")
        offset = (start - first) * out_stride * item
        bias = self.bias(f"{name}_bias", start, rows) if has_bias else None
        return Segment(rows, index, offset, not in_order, stride * item, bias)

    def bias(self, name: str, start: int, rows: int) -> Bias:
        for i, view in enumerate(self.layout.views):
            if view.param != name:
                continue
            if len(view.shape) != 1 or view.strides[0] != 1 or view.dtype not in _DISK_KINDS:
                raise self.refuse(f"{name} is no contiguous vector of floats on disk")
            if view.start <= start and start + rows <= view.start + view.shape[0]:
                kind = self.exact(_DISK_KINDS[view.dtype], "biases")
                return Bias(i, (start - view.start) * ITEM_BYTES[kind], kind)
        raise self.refuse(f"{name} of outputs {start} to {start + rows - 1} lies in no single tensor on disk")
