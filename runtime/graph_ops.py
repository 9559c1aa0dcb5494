"""Which aten calls the decode machine has instructions for, and how each is written.

A handler gives the instructions of one recorded call, or raises `NoInstruction` where this call's shapes or types are
beyond the machine; the call then stays plain aten.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from seqmoe.runtime.graph_tape import Node, Ref
from seqmoe.runtime.kernels import fused_isa as isa

INTEGERS = (torch.int64, torch.int32, torch.bool, torch.uint8)
PARALLEL_WEIGHTS = 1 << 19  # a linear layer of more elements than this is worth waking a second thread
MAX_PRODUCT = 1 << 22  # a generic product of more multiplications goes to aten


class NoInstruction(Exception):
    """The machine cannot express this call."""


@dataclass(frozen=True)
class Operand:
    """A tensor, a layer's key (0) or value (1) cache, or a number, with its strides over the instruction's sizes."""

    ref: Ref | None = None
    strides: tuple[int, ...] = (0, 0, 0, 0)
    value: float = 0.0
    cache: tuple[int, int] | None = None


@dataclass
class Instruction:
    """Fields and operands by column of `fused_isa`; a float field is written as its bits."""

    fields: dict[int, int | float]
    operands: dict[int, Operand]
    addresses: dict[int, Ref] = field(default_factory=dict)  # columns that take an address and a type only
    row: int = 0  # elements of the longest row it needs scratch for
    linear_inputs: int = 0

    def refs(self) -> list[Ref]:
        """The tensors it touches."""
        return [o.ref for o in self.operands.values() if o.ref is not None] + list(self.addresses.values())

    @staticmethod
    def elementwise(fn: int, out: Ref, ins: Sequence[Ref | float], imm: Sequence[float] = ()) -> "Instruction":
        """`out = fn(*ins)` with broadcasting."""
        strides = [broadcast(value, out.size) if isinstance(value, Ref) else (0,) * len(out.size) for value in ins]
        sizes, parts = merge(out.size, [out.stride, *strides])
        exact = out.dtype in INTEGERS and all(
            value.dtype in INTEGERS if isinstance(value, Ref) else float(value).is_integer() for value in ins
        )
        fields: dict[int, int | float] = {isa.OP: isa.OP_EW_INT if exact else isa.OP_EW, isa.FN: fn}
        fields.update({isa.SIZES + place: size for place, size in enumerate(sizes)})
        fields.update({isa.IMM0 + place: float(value) for place, value in enumerate(imm)})
        operands = {isa.OUT: Operand(out, parts[0])}
        for column, value, part in zip((isa.IN0, isa.IN1, isa.IN2), ins, parts[1:], strict=False):
            operands[column] = Operand(value, part) if isinstance(value, Ref) else Operand(value=float(value))
        return Instruction(fields, operands)


def broadcast(ref: Ref, size: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of `ref` seen with `size`."""
    if len(ref.size) > len(size):
        raise NoInstruction
    lead = len(size) - len(ref.size)
    strides = [0] * lead
    for place, (mine, stride) in enumerate(zip(ref.size, ref.stride, strict=True)):
        if mine != size[lead + place] and mine != 1:
            raise NoInstruction
        strides.append(stride if mine == size[lead + place] and mine != 1 else 0)
    return tuple(strides)


def merge(
    size: Sequence[int], strides: Sequence[Sequence[int]], keep_last: bool = False, room: int = 4
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The same loop over at most `room` dimensions, neighbours merged where every operand allows; padded in front.

    `keep_last`: the last dimension stays as it is (a row that an instruction works on as a whole).
    """
    dims = [(size[d], tuple(stride[d] for stride in strides)) for d in range(len(size))]
    last = dims.pop() if keep_last else None
    dims = [dim for dim in dims if dim[0] != 1]
    if not keep_last:
        dims.sort(key=lambda dim: -abs(dim[1][0]))
    merged: list[tuple[int, tuple[int, ...]]] = []
    for count, steps in dims:
        if merged and all(outer == inner * count for outer, inner in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * count, steps)
        else:
            merged.append((count, steps))
    if last is not None:
        merged.append(last)
    if len(merged) > room:
        raise NoInstruction
    merged = [(1, (0,) * len(strides))] * (room - len(merged)) + merged
    return tuple(dim[0] for dim in merged), [tuple(dim[1][s] for dim in merged) for s in range(len(strides))]


def result(node: Node) -> Ref:
    return node.outs[0]


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


Handler = Callable[[Node, Any], list[Instruction]]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name if "." not in name or name.startswith("aten") else f"aten.{name}"] = handler
        return handler

    return register


# -- elementwise -----------------------------------------------------------------------------------------------------

_UNARY = {"neg": isa.E_NEG, "rsqrt": isa.E_RSQRT, "sqrt": isa.E_SQRT, "exp": isa.E_EXP, "log": isa.E_LOG, "sigmoid": isa.E_SIGMOID,
          "silu": isa.E_SILU, "tanh": isa.E_TANH, "relu": isa.E_RELU, "cos": isa.E_COS, "sin": isa.E_SIN, "abs": isa.E_ABS,
          "reciprocal": isa.E_RECIPROCAL, "logical_not": isa.E_NOT, "floor": isa.E_FLOOR, "log1p": isa.E_LOG1P,
          "square": isa.E_SQUARE}  # fmt: skip
_BINARY = {"mul": isa.E_MUL, "div": isa.E_DIV, "maximum": isa.E_MAX, "minimum": isa.E_MIN, "eq": isa.E_EQ, "ne": isa.E_NE,
           "lt": isa.E_LT, "le": isa.E_LE, "gt": isa.E_GT, "ge": isa.E_GE, "logical_and": isa.E_AND, "logical_or": isa.E_OR,
           "floor_divide": isa.E_FLOORDIV, "remainder": isa.E_REMAINDER}  # fmt: skip


def _plain(fn: int, count: int) -> Handler:
    def handler(node: Node, lowering: Any) -> list[Instruction]:
        if node.kwargs:
            raise NoInstruction
        return [Instruction.elementwise(fn, result(node), list(node.args[:count]))]

    return handler


for _name, _fn in _UNARY.items():
    for _form in ("default", "Tensor"):
        HANDLERS[f"aten.{_name}.{_form}"] = HANDLERS[f"aten.{_name}_.{_form}"] = _plain(_fn, 1)
for _name, _fn in _BINARY.items():
    for _form in ("Tensor", "Scalar", "default"):
        HANDLERS[f"aten.{_name}.{_form}"] = HANDLERS[f"aten.{_name}_.{_form}"] = _plain(_fn, 2)


@handles("add.Tensor", "add_.Tensor", "add.Scalar", "sub.Tensor", "sub_.Tensor", "rsub.Scalar", "rsub.Tensor")
def _add(node: Node, lowering: Any) -> list[Instruction]:
    if argument(node, 2, "alpha", 1) != 1:
        raise NoInstruction
    a, b = node.args[:2]
    if "rsub" in node.name:
        a, b = b, a
    return [Instruction.elementwise(isa.E_ADD if "add" in node.name else isa.E_SUB, result(node), [a, b])]


@handles("pow.Tensor_Scalar", "pow.Scalar", "pow.Tensor_Tensor")
def _pow(node: Node, lowering: Any) -> list[Instruction]:
    base, exponent = node.args[:2]
    if exponent == 2:
        return [Instruction.elementwise(isa.E_SQUARE, result(node), [base])]
    return [Instruction.elementwise(isa.E_POW, result(node), [base, exponent])]


@handles("gelu.default")
def _gelu(node: Node, lowering: Any) -> list[Instruction]:
    tanh = node.kwargs.get("approximate", "none") == "tanh"
    return [Instruction.elementwise(isa.E_GELU_TANH if tanh else isa.E_GELU, result(node), [node.args[0]])]


@handles("softplus.default")
def _softplus(node: Node, lowering: Any) -> list[Instruction]:
    imm = (float(argument(node, 1, "beta", 1.0)), float(argument(node, 2, "threshold", 20.0)))
    return [Instruction.elementwise(isa.E_SOFTPLUS, result(node), [node.args[0]], imm)]


@handles("clamp.default", "clamp_.default", "clamp_min.default", "clamp_max.default")
def _clamp(node: Node, lowering: Any) -> list[Instruction]:
    low = argument(node, 1, "min") if "max" not in node.name else None
    high = argument(node, 2, "max") if "max" not in node.name else node.args[1]
    if isinstance(low, Ref) or isinstance(high, Ref) or result(node).dtype in INTEGERS:
        raise NoInstruction
    imm = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
    return [Instruction.elementwise(isa.E_CLAMP, result(node), [node.args[0]], imm)]


@handles("clamp.Tensor", "clamp_min.Tensor", "clamp_max.Tensor")
def _clamp_tensor(node: Node, lowering: Any) -> list[Instruction]:
    low = argument(node, 1, "min") if "max" not in node.name else None
    high = argument(node, 2, "max") if "max" not in node.name else node.args[1]
    out, source, instructions = result(node), node.args[0], []
    if low is not None:
        instructions.append(Instruction.elementwise(isa.E_MAX, out, [source, low]))
        source = out
    if high is not None:
        instructions.append(Instruction.elementwise(isa.E_MIN, out, [source, high]))
    return instructions


@handles("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(node: Node, lowering: Any) -> list[Instruction]:
    return [Instruction.elementwise(isa.E_WHERE, result(node), list(node.args[:3]))]


@handles("masked_fill.Scalar", "masked_fill_.Scalar", "masked_fill.Tensor", "masked_fill_.Tensor")
def _masked_fill(node: Node, lowering: Any) -> list[Instruction]:
    value = node.args[2]
    return [Instruction.elementwise(isa.E_WHERE, result(node), [node.args[1], value, node.args[0]])]


def _logical(fn: int) -> Handler:
    def handler(node: Node, lowering: Any) -> list[Instruction]:
        if result(node).dtype is not torch.bool:
            raise NoInstruction
        return [Instruction.elementwise(fn, result(node), list(node.args))]

    return handler


HANDLERS["aten.bitwise_not.default"] = _logical(isa.E_NOT)
HANDLERS["aten.bitwise_and.Tensor"] = HANDLERS["aten.__and__.Tensor"] = _logical(isa.E_AND)
HANDLERS["aten.bitwise_or.Tensor"] = HANDLERS["aten.__or__.Tensor"] = _logical(isa.E_OR)


@handles("to.dtype", "to.other", "to.dtype_layout", "to.device", "_to_copy.default", "clone.default", "contiguous.default",
          "reshape.default", "type_as.default", "float.default", "flatten.using_ints", "repeat.default")  # fmt: skip
def _copy(node: Node, lowering: Any) -> list[Instruction]:
    out, source = result(node), node.args[0]
    if node.name == "aten.repeat.default":
        if any(
            a != b and a != 1 for a, b in zip(source.size, out.size[len(out.size) - len(source.size) :], strict=True)
        ):
            raise NoInstruction
    elif source.size != out.size:
        # A reshape that copies: its result is contiguous, and so is the same walk in the source's shape.
        contiguous(out)
        out = Ref(out.storage, out.offset, source.size, _row_major(source.size), out.dtype)
    return [Instruction.elementwise(isa.E_COPY, out, [source])]


def contiguous(ref: Ref) -> None:
    expected = 1
    for size, stride in zip(reversed(ref.size), reversed(ref.stride), strict=True):
        if size != 1 and stride != expected:
            raise NoInstruction
        expected *= size


def _row_major(size: Sequence[int]) -> tuple[int, ...]:
    steps = [1]
    for count in reversed(size[1:]):
        steps.append(steps[-1] * count)
    return tuple(reversed(steps)) if size else ()


@handles("copy_.default")
def _copy_into(node: Node, lowering: Any) -> list[Instruction]:
    return [Instruction.elementwise(isa.E_COPY, result(node), [node.args[1]])]


@handles("zeros.default", "zeros_like.default", "new_zeros.default", "zero_.default")
def _zeros(node: Node, lowering: Any) -> list[Instruction]:
    return [Instruction.elementwise(isa.E_COPY, result(node), [0.0])]


@handles("ones.default", "ones_like.default", "new_ones.default")
def _ones(node: Node, lowering: Any) -> list[Instruction]:
    return [Instruction.elementwise(isa.E_COPY, result(node), [1.0])]


@handles("full.default", "full_like.default", "new_full.default", "fill_.Scalar")
def _full(node: Node, lowering: Any) -> list[Instruction]:
    value = node.args[2] if "new_full" in node.name else node.args[1]
    return [Instruction.elementwise(isa.E_COPY, result(node), [float(value)])]


@handles("empty.memory_format", "empty_like.default", "new_empty.default", "empty_strided.default")
def _nothing(node: Node, lowering: Any) -> list[Instruction]:
    return []


@handles("cat.default", "stack.default")
def _cat(node: Node, lowering: Any) -> list[Instruction]:
    parts = node.args[0]
    out = result(node)
    dim = argument(node, 1, "dim", 0) % len(out.size)
    stacked = "stack" in node.name
    instructions, at = [], 0
    for part in parts:
        if part.size == (0,):
            continue
        source = part
        if stacked:
            source = Ref(part.storage, part.offset, (*part.size[:dim], 1, *part.size[dim:]),
                         (*part.stride[:dim], 0, *part.stride[dim:]), part.dtype)  # fmt: skip
        target = Ref(out.storage, out.offset + at * out.stride[dim], source.size, out.stride, out.dtype)
        instructions.append(Instruction.elementwise(isa.E_COPY, target, [source]))
        at += source.size[dim]
    return instructions
