"""Instructions for linear layers, products, convolution, cache and attention; fills `graph_ops.HANDLERS` when imported."""

from typing import Any

import torch

from seqmoe.runtime.graph_ops import (
    HANDLERS,
    MAX_PRODUCT,
    PARALLEL_WEIGHTS,
    Instruction,
    NoInstruction,
    Operand,
    broadcast,
    handles,
    merge,
    result,
)
from seqmoe.runtime.graph_tape import Node, Ref
from seqmoe.runtime.kernels import fused_isa as isa

_FLOATS = (torch.float32, torch.bfloat16)
_MAX_ROWS = 16  # more rows than this (a large batch) are a matrix product, which aten does better


def _matrix_rows(ref: Ref) -> tuple[int, int]:
    """(rows, row stride) of a tensor seen as [rows, last], where its leading dimensions are one walk."""
    if ref.stride[-1] != 1 and ref.size[-1] != 1:
        raise NoInstruction
    sizes, (strides,) = merge(ref.size[:-1], [ref.stride[:-1]], room=1)
    return sizes[0], strides[0]


def _linear(out: Ref, x: Ref, weight: Ref, bias: Ref | None, lowering: Any) -> list[Instruction]:
    """`weight` [n, k] with contiguous rows."""
    cast = lowering.casts.get(weight.storage)
    if cast is not None and cast.size == weight.size and cast.stride == weight.stride and weight.offset == 0:
        weight = cast  # widening is exact, so the widened copy need not exist
    if not all(ref.dtype in _FLOATS for ref in (out, x, weight)) or (bias is not None and bias.dtype not in _FLOATS):
        raise NoInstruction
    n, k = weight.size
    m, x_stride = _matrix_rows(x)
    out_rows, out_stride = _matrix_rows(out)
    if (
        m > _MAX_ROWS
        or out_rows != m
        or (weight.stride[1] != 1 and k != 1)
        or (bias is not None and bias.stride != (1,))
    ):
        raise NoInstruction
    fields: dict[int, int | float] = {
        isa.OP: isa.OP_LINEAR, isa.SIZES: m, isa.SIZES + 1: n, isa.SIZES + 2: k, isa.AUX: int(n * k > PARALLEL_WEIGHTS),
    }  # fmt: skip
    operands = {
        isa.OUT: Operand(out, (0, 0, out_stride, 1)),
        isa.IN0: Operand(x, (0, 0, x_stride if m > 1 else k, 1)),
        isa.IN1: Operand(weight, (0, 0, weight.stride[0], 1)),
    }
    if bias is not None:
        operands[isa.IN2] = Operand(bias)
    return [Instruction(fields, operands, linear_inputs=m * k)]


@handles("linear.default")
def _linear_node(node: Node, lowering: Any) -> list[Instruction]:
    bias = node.args[2] if len(node.args) > 2 else None
    return _linear(result(node), node.args[0], node.args[1], bias, lowering)


def _product(out: Ref, a: Ref, b: Ref, scale: float, add: Ref | None, keep: float, lowering: Any) -> list[Instruction]:
    """out = scale * a @ b + keep * add, batched."""
    if not all(ref.dtype in _FLOATS for ref in (out, a, b)):
        raise NoInstruction
    if len(a.size) < 2 or len(b.size) < 2:
        raise NoInstruction
    if len(b.size) == 2 and b.stride[0] == 1 and scale == 1.0 and (add is None or (keep == 1.0 and len(add.size) == 1)):
        weight = Ref(b.storage, b.offset, (b.size[1], b.size[0]), (b.stride[1], b.stride[0]), b.dtype)
        return _linear(out, a, weight, add, lowering)
    m, k = a.size[-2:]
    n = b.size[-1]
    batch = out.size[:-2]
    if out.numel * k > MAX_PRODUCT:
        raise NoInstruction

    def strides(ref: Ref) -> tuple[tuple[int, ...], tuple[int, int]]:
        lead = Ref(ref.storage, ref.offset, ref.size[:-2], ref.stride[:-2], ref.dtype)
        return broadcast(lead, batch), (ref.stride[-2], ref.stride[-1])

    lead_a, in_a = strides(a)
    lead_b, in_b = strides(b)
    lead_add, in_add = ((0,) * len(batch), (0, 0))
    if add is not None:
        steps = broadcast(add, out.size)
        lead_add, in_add = steps[:-2], (steps[-2], steps[-1])
    sizes, parts = merge(batch, [out.stride[:-2], lead_a, lead_b, lead_add], room=3)
    fields: dict[int, int | float] = {isa.OP: isa.OP_MATMUL, isa.IMM0: float(scale), isa.IMM1: float(keep)}
    fields.update({isa.SIZES + place: size for place, size in enumerate(sizes)})
    numbers = (m, n, k, out.stride[-2], out.stride[-1], *in_a, *in_b, *in_add)
    fields.update({isa.AUX + place: number for place, number in enumerate(numbers)})
    operands = {
        isa.OUT: Operand(out, (*parts[0], 0)),
        isa.IN0: Operand(a, (*parts[1], 0)),
        isa.IN1: Operand(b, (*parts[2], 0)),
    }
    if add is not None:
        operands[isa.IN2] = Operand(add, (*parts[3], 0))
    return [Instruction(fields, operands)]


@handles("matmul.default", "bmm.default", "mm.default")
def _matmul(node: Node, lowering: Any) -> list[Instruction]:
    return _product(result(node), node.args[0], node.args[1], 1.0, None, 0.0, lowering)


@handles("addmm.default", "baddbmm.default")
def _addmm(node: Node, lowering: Any) -> list[Instruction]:
    add, a, b = node.args[:3]
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    return _product(result(node), a, b, float(alpha), add, float(beta), lowering)


@handles("conv1d.default", "convolution.default")
def _conv(node: Node, lowering: Any) -> list[Instruction]:
    source, weight, bias = node.args[:3]
    stride = node.args[3] if len(node.args) > 3 else (1,)
    padding = node.args[4] if len(node.args) > 4 else (0,)
    dilation = node.args[5] if len(node.args) > 5 else (1,)
    groups = node.args[-1] if len(node.args) > 6 else 1
    if "convolution" in node.name and node.args[6]:
        raise NoInstruction
    plain = (
        tuple(stride) == (1,) and not isinstance(padding, str) and tuple(padding) == (0,) and tuple(dilation) == (1,)
    )
    if not plain or len(source.size) != 3 or groups != source.size[1] or weight.size[:2] != (groups, 1):
        raise NoInstruction
    out = result(node)
    fields: dict[int, int | float] = {isa.OP: isa.OP_CONV, isa.SIZES: 1, isa.AUX: weight.size[2]}
    fields.update({isa.SIZES + 1 + place: size for place, size in enumerate(out.size)})
    operands = {
        isa.OUT: Operand(out, (0, *out.stride)),
        isa.IN0: Operand(source, (0, *source.stride)),
        isa.IN1: Operand(weight, (0, 0, weight.stride[0], weight.stride[2])),
    }
    if bias is not None:
        operands[isa.IN2] = Operand(bias)
    return [Instruction(fields, operands)]


def _append(node: Node, lowering: Any) -> list[Instruction]:
    keys, values = node.args
    layer = node.kwargs["layer"]
    capacity = lowering.caches[layer][0].shape[2]
    batch, heads, _, dk = keys.size
    dv = values.size[3]
    fields: dict[int, int | float] = {isa.OP: isa.OP_APPEND}
    fields.update({isa.AUX + place: number for place, number in enumerate((batch, heads, dk, dv, capacity))})
    operands = {
        isa.OUT: Operand(cache=(layer, 0)),
        isa.IN0: Operand(keys, (keys.stride[0], keys.stride[1], 0, keys.stride[3])),
        isa.IN1: Operand(values, (values.stride[0], values.stride[1], 0, values.stride[3])),
        isa.IN2: Operand(cache=(layer, 1)),
    }
    return [Instruction(fields, operands, row=max(dk, dv))]


def _attend(node: Node, lowering: Any) -> list[Instruction]:
    query, out = node.args[0], result(node)
    facts = node.kwargs
    layer = facts["layer"]
    keys, values = lowering.caches[layer]
    batch, heads, _, dk = query.size
    numbers = (
        batch,
        heads,
        keys.shape[1],
        dk,
        values.shape[3],
        keys.shape[2],
        facts["mask"].window,
        facts["mask"].chunk,
    )
    fields: dict[int, int | float] = {
        isa.OP: isa.OP_ATTEND, isa.IMM0: float(facts["scale"]), isa.IMM1: float(facts["softcap"]),
    }  # fmt: skip
    fields.update({isa.AUX + place: number for place, number in enumerate(numbers)})
    operands = {
        # recorded as [batch, 1, heads, dv]
        isa.OUT: Operand(out, (out.stride[0], out.stride[2], 0, out.stride[3])),
        isa.IN0: Operand(query, (query.stride[0], query.stride[1], 0, query.stride[3])),
        isa.IN1: Operand(cache=(layer, 0)),
        isa.IN2: Operand(cache=(layer, 1)),
    }
    instruction = Instruction(fields, operands, row=dk + values.shape[3])
    if len(node.args) > 1:
        sinks = node.args[1]
        if sinks.size != (heads,) or sinks.stride != (1,):
            raise NoInstruction
        instruction.addresses[isa.AUX + 8] = sinks
    return [instruction]


def _attend_latent(node: Node, lowering: Any) -> list[Instruction]:
    query, weight = node.args
    out, facts = result(node), node.kwargs
    layer = facts["layer"]
    latents, rotated = lowering.caches[layer]
    batch, heads, _, dk = query.size
    dv, rank, rope = out.size[3], latents.shape[3], rotated.shape[3]
    numbers = (batch, heads, dk - rope, rope, dv, rank, latents.shape[2], facts["mask"].window, facts["mask"].chunk)
    if weight.stride[1] != 1 or weight.dtype not in _FLOATS:
        raise NoInstruction
    fields: dict[int, int | float] = {isa.OP: isa.OP_LATENT, isa.IMM0: float(facts["scale"])}
    fields.update({isa.AUX + place: number for place, number in enumerate(numbers)})
    fields[isa.AUX + 11] = weight.stride[0]
    operands = {
        isa.OUT: Operand(out, (out.stride[0], out.stride[2], 0, out.stride[3])),
        isa.IN0: Operand(query, (query.stride[0], query.stride[1], 0, query.stride[3])),
        isa.IN1: Operand(cache=(layer, 0)),
        isa.IN2: Operand(cache=(layer, 1)),
    }
    return [Instruction(fields, operands, addresses={isa.AUX + 9: weight}, row=dk + dv + 2 * rank)]


HANDLERS["append"] = _append
HANDLERS["attend_latent"] = _attend_latent
HANDLERS["attend"] = _attend
