"""Instructions that work on rows, and those that pick; fills `graph_ops.HANDLERS` when imported."""

from typing import Any

import torch

from seqmoe.runtime.graph_ops import (
    HANDLERS,
    INTEGERS,
    Instruction,
    NoInstruction,
    Operand,
    argument,
    contiguous,
    handles,
    merge,
    result,
)
from seqmoe.runtime.graph_tape import Node, Ref
from seqmoe.runtime.kernels import fused_isa as isa


def _row_instruction(op: int, out: Ref, source: Ref, fn: int = 0) -> Instruction:
    """An instruction that works on the last dimension of `source` as a whole and gives rows in the shape of `out`."""
    if source.size[:-1] != out.size[:-1]:
        raise NoInstruction
    sizes, (out_strides, in_strides) = merge(source.size, [out.stride, source.stride], keep_last=True)
    fields: dict[int, int | float] = {isa.OP: op, isa.FN: fn}
    fields.update({isa.SIZES + place: size for place, size in enumerate(sizes)})
    return Instruction(fields, {isa.OUT: Operand(out, out_strides), isa.IN0: Operand(source, in_strides)}, row=sizes[3])


def _last(dim: int, ref: Ref) -> bool:
    return dim % max(1, len(ref.size)) == len(ref.size) - 1


@handles("softmax.int", "_softmax.default")
def _softmax(node: Node, lowering: Any) -> list[Instruction]:
    if not _last(node.args[1], node.args[0]):
        raise NoInstruction
    return [_row_instruction(isa.OP_SOFTMAX, result(node), node.args[0])]


@handles("cumsum.default")
def _cumsum(node: Node, lowering: Any) -> list[Instruction]:
    if not _last(node.args[1], node.args[0]):
        raise NoInstruction
    instruction = _row_instruction(isa.OP_CUMSUM, result(node), node.args[0])
    instruction.fields[isa.INTEGER] = int(result(node).dtype in INTEGERS)
    return [instruction]


@handles("topk.default")
def _topk(node: Node, lowering: Any) -> list[Instruction]:
    source, k = node.args[:2]
    values, indices = node.outs
    if not _last(argument(node, 2, "dim", -1), source) or source.dtype in INTEGERS:
        raise NoInstruction
    sizes, parts = merge(source.size, [values.stride, source.stride, indices.stride], keep_last=True)
    fields: dict[int, int | float] = {
        isa.OP: isa.OP_TOPK,
        isa.AUX: k,
        isa.AUX + 1: int(argument(node, 3, "largest", True)),
    }
    fields.update({isa.SIZES + place: size for place, size in enumerate(sizes)})
    operands = {
        isa.OUT: Operand(values, parts[0]),
        isa.IN0: Operand(source, parts[1]),
        isa.IN1: Operand(indices, parts[2]),
    }
    return [Instruction(fields, operands, row=sizes[3])]


@handles("norm")
def _norm(node: Node, lowering: Any) -> list[Instruction]:
    source, weight = node.args
    instruction = _row_instruction(
        isa.OP_NORM, result(node), source, isa.BF16 if node.kwargs["rounded"] is torch.bfloat16 else isa.F32
    )
    instruction.fields[isa.IMM0] = node.kwargs["eps"]
    if weight is not None:
        instruction.operands[isa.IN1] = Operand(weight, (0, 0, 0, 1))
    return [instruction]


@handles("native_layer_norm.default", "layer_norm.default")
def _layer_norm(node: Node, lowering: Any) -> list[Instruction]:
    source, shape, weight, bias = node.args[:4]
    if len(shape) != 1 or any(row is not None and row.stride != (1,) for row in (weight, bias)):
        raise NoInstruction
    instruction = _row_instruction(isa.OP_NORM, result(node), source, isa.F32)
    instruction.fields[isa.IMM0] = float(argument(node, 4, "eps", 1e-5))
    instruction.fields[isa.AUX] = 1
    for column, row in ((isa.IN1, weight), (isa.IN2, bias)):
        if row is not None:
            instruction.operands[column] = Operand(row, (0, 0, 0, 1))
    return [instruction]


_REDUCTIONS = {"sum": isa.R_SUM, "mean": isa.R_MEAN, "amax": isa.R_MAX, "amin": isa.R_MIN, "prod": isa.R_PROD,
               "any": isa.R_ANY, "all": isa.R_ALL, "argmax": isa.R_ARGMAX}  # fmt: skip


def _reduction(node: Node, lowering: Any) -> list[Instruction]:
    return _reduced(node.args[0], result(node), _REDUCTIONS[node.name.split(".")[1]], argument(node, 1, "dim"))


@handles("max.dim", "min.dim")
def _max_dim(node: Node, lowering: Any) -> list[Instruction]:
    source, dim = node.args[0], node.args[1]
    if "min" in node.name:
        raise NoInstruction
    return [
        *_reduced(source, node.outs[0], isa.R_MAX, dim),
        *_reduced(source, node.outs[1], isa.R_ARGMAX, dim),
    ]


def _reduced(source: Ref, out: Ref, fn: int, dims: Any) -> list[Instruction]:
    if isinstance(dims, bool):
        raise NoInstruction
    if dims is None or dims == ():
        dims = tuple(range(len(source.size)))
    dims = {d % len(source.size) for d in (dims if isinstance(dims, (tuple, list)) else (dims,))}
    integer = source.dtype in INTEGERS and out.dtype is torch.int64 and fn != isa.R_ARGMAX
    if fn == isa.R_ARGMAX and source.dtype in INTEGERS:
        raise NoInstruction
    if integer and fn != isa.R_SUM or (fn == isa.R_ARGMAX and len(dims) != 1):
        raise NoInstruction
    kept = [d for d in range(len(source.size)) if d not in dims]
    # With keepdim the output has all dimensions, else the kept ones only.
    out_strides = [out.stride[d] for d in kept] if len(out.size) == len(source.size) else list(out.stride)
    sizes, parts = merge([source.size[d] for d in kept], [out_strides, [source.stride[d] for d in kept]])
    inner = sorted(dims)
    counts, (steps,) = merge([source.size[d] for d in inner], [[source.stride[d] for d in inner]], room=3)
    if fn == isa.R_ARGMAX and counts[:2] != (1, 1):
        raise NoInstruction
    fields: dict[int, int | float] = {isa.OP: isa.OP_REDUCE, isa.FN: fn, isa.INTEGER: int(integer)}
    fields.update({isa.SIZES + place: size for place, size in enumerate(sizes)})
    fields.update({isa.AUX + place: size for place, size in enumerate(counts)})
    fields.update({isa.AUX + 3 + place: step for place, step in enumerate(steps)})
    return [Instruction(fields, {isa.OUT: Operand(out, parts[0]), isa.IN0: Operand(source, parts[1])})]


for _name in ("sum.dim_IntList", "sum.default", "mean.dim", "mean.default", "amax.default", "amin.default", "prod.dim_int",
              "any.dim", "any.default", "all.dim", "all.default", "argmax.default"):  # fmt: skip
    HANDLERS[f"aten.{_name}"] = _reduction


# -- picking ---------------------------------------------------------------------------------------------------------


def _rows(out: Ref, table: Ref, index: Ref) -> list[Instruction]:
    if len(table.size) != 2 or table.stride[1] != 1 or index.dtype not in (torch.int64, torch.int32):
        raise NoInstruction
    count = index.numel
    _, (steps,) = merge(index.size, [index.stride], room=1)
    columns = table.size[1]
    contiguous(out)
    fields: dict[int, int | float] = {
        isa.OP: isa.OP_ROWS, isa.SIZES + 3: count, isa.AUX: table.stride[0], isa.AUX + 1: columns,
    }  # fmt: skip
    operands = {
        isa.OUT: Operand(out, (0, 0, 0, columns)), isa.IN0: Operand(table), isa.IN1: Operand(index, (0, 0, 0, steps[0])),
    }  # fmt: skip
    return [Instruction(fields, operands)]


@handles("embedding.default")
def _embedding(node: Node, lowering: Any) -> list[Instruction]:
    return _rows(result(node), node.args[0], node.args[1])


@handles("index.Tensor")
def _index(node: Node, lowering: Any) -> list[Instruction]:
    picked = node.args[1]
    if len(picked) != 1 or picked[0] is None:
        raise NoInstruction
    return _rows(result(node), node.args[0], picked[0])


@handles("index_select.default")
def _index_select(node: Node, lowering: Any) -> list[Instruction]:
    if node.args[1] % len(node.args[0].size) != 0:
        raise NoInstruction
    return _rows(result(node), node.args[0], node.args[2])


@handles("gather.default")
def _gather(node: Node, lowering: Any) -> list[Instruction]:
    source, dim, index = node.args[:3]
    dim %= len(source.size)
    strides = tuple(0 if d == dim else step for d, step in enumerate(source.stride))
    sizes, parts = merge(index.size, [result(node).stride, strides, index.stride])
    fields: dict[int, int | float] = {isa.OP: isa.OP_GATHER, isa.AUX: source.stride[dim]}
    fields.update({isa.SIZES + place: size for place, size in enumerate(sizes)})
    operands = {
        isa.OUT: Operand(result(node), parts[0]),
        isa.IN0: Operand(source, parts[1]),
        isa.IN1: Operand(index, parts[2]),
    }
    return [Instruction(fields, operands)]


@handles("scatter_.value", "scatter_.src", "scatter.value", "scatter.src")
def _scatter(node: Node, lowering: Any) -> list[Instruction]:
    target, dim, index, value = node.args[:4]
    out = result(node)
    dim %= len(out.size)
    instructions = [] if "scatter_" in node.name else [Instruction.elementwise(isa.E_COPY, out, [target])]
    strides = tuple(0 if d == dim else step for d, step in enumerate(out.stride))
    from_strides = value.stride if isinstance(value, Ref) else (0,) * len(index.size)
    sizes, parts = merge(index.size, [strides, from_strides, index.stride])
    fields: dict[int, int | float] = {isa.OP: isa.OP_GATHER, isa.FN: 1, isa.AUX: out.stride[dim]}
    fields.update({isa.SIZES + place: size for place, size in enumerate(sizes)})
    source = Operand(value, parts[1]) if isinstance(value, Ref) else Operand(value=float(value))
    operands = {isa.OUT: Operand(out, parts[0]), isa.IN0: source, isa.IN1: Operand(index, parts[2])}
    return [*instructions, Instruction(fields, operands)]
