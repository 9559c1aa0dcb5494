"""Loads, stores and rounding on raw addresses, for numba kernels that see a tensor as (address, strides).

bfloat16 has no numba type: it travels as 16 bits, is widened to float32 by a shift and rounded back to nearest even, as torch does.
Every function here is an LLVM intrinsic of one to five instructions, so loops over them vectorise.
"""

import functools
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}}

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32, _F64 = ir.FloatType(), ir.DoubleType()


@functools.cache
def sources() -> str:
    """Digest of all of the decode machine's kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("fused_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def stamped(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under a name that changes with any kernel's source.

    Numba's disk cache looks at the file that a function stands in and not at those of the functions it calls: without
    this, a change in one file would leave old machine code in use for another's.
    """
    if not function.__qualname__.endswith(sources()):
        function.__qualname__ = f"{function.__qualname__}_{sources()}"
    return function


def kernel(*signature: str) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with the machine's options; with a signature it is compiled, or loaded, at once."""

    def decorate(function: Callable[..., Any]) -> Any:
        return njit(*signature, **OPTIONS)(stamped(function))

    return decorate


def _pointer(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def _loader(numba_type: Any, kind: Any) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(_pointer(builder, args[0], args[1], kind))
            value.align = kind.width // 8 if isinstance(kind, ir.IntType) else (4 if kind is _F32 else 8)
            return value

        return numba_type(types.int64, types.int64), codegen

    return load


def _storer(numba_type: Any, kind: Any) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[2], _pointer(builder, args[0], args[1], kind))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, numba_type), codegen

    return store


load_f32, store_f32 = _loader(types.float32, _F32), _storer(types.float32, _F32)
load_i64, store_i64 = _loader(types.int64, _I64), _storer(types.int64, _I64)
load_i32, store_i32 = _loader(types.int32, _I32), _storer(types.int32, _I32)
load_u16, store_u16 = _loader(types.uint16, _I16), _storer(types.uint16, _I16)
load_u8, store_u8 = _loader(types.uint8, _I8), _storer(types.uint8, _I8)


@intrinsic
def load_bf16(typingctx: Any, address: Any, index: Any) -> Any:
    """The bfloat16 at `address[index]` as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.load(_pointer(builder, args[0], args[1], _I16))
        return builder.bitcast(builder.shl(builder.zext(bits, _I32), _I32(16)), _F32)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def store_bf16(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Store float32 `value` as bfloat16, rounded to nearest even; any NaN becomes the quiet NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[2], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16))
        is_nan = builder.fcmp_unordered("uno", args[2], args[2])
        short = builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), _I16)
        builder.store(short, _pointer(builder, args[0], args[1], _I16))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


@intrinsic
def f64_from_bits(typingctx: Any, bits: Any) -> Any:
    """Reinterpret an int64 as float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F64)

    return types.float64(types.int64), codegen


@intrinsic
def pow2_f32(typingctx: Any, exponent: Any) -> Any:
    """2 ** exponent for an int32 in -126..127."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(args[0], _I32(127)), _I32(23)), _F32)

    return types.float32(types.int32), codegen


@intrinsic
def floor_f32(typingctx: Any, value: Any) -> Any:
    """floor of a float32, one vector instruction."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.floor", [_F32]), [args[0]])

    return types.float32(types.float32), codegen


@intrinsic
def sqrt_f32(typingctx: Any, value: Any) -> Any:
    """Square root of a float32, correctly rounded."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [_F32]), [args[0]])

    return types.float32(types.float32), codegen


@intrinsic
def int_f32(typingctx: Any, value: Any) -> Any:
    """float32 to int32, towards zero."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fptosi(args[0], _I32)

    return types.int32(types.float32), codegen


@intrinsic
def f32(typingctx: Any, value: Any) -> Any:
    """A literal or float64 as float32 (numba widens literals to float64, which would halve the vectors)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fptrunc(args[0], _F32)

    return types.float32(types.float64), codegen


@njit(inline="always")
def exp_f32(x: float) -> float:
    """exp in float32 to about one unit in the last place; vectorises, unlike libm's. Cephes' expf polynomial."""
    low, high = f32(-87.33654), f32(88.72283)
    y = min(max(x, low), high)
    n = floor_f32(y * f32(1.44269504088896341) + f32(0.5))
    r = y - n * f32(0.693359375) + n * f32(2.12194440e-4)
    p = f32(1.9875691500e-4)
    p = p * r + f32(1.3981999507e-3)
    p = p * r + f32(8.3334519073e-3)
    p = p * r + f32(4.1665795894e-2)
    p = p * r + f32(1.6666665459e-1)
    p = p * r + f32(5.0000001201e-1)
    p = p * r * r + r + f32(1.0)
    half = int_f32(n) >> 1
    result = p * pow2_f32(half) * pow2_f32(int_f32(n) - half)
    if x < low:
        result = f32(0.0)
    if x > high:
        result = f32(float("inf"))
    if math.isnan(x):
        result = x
    return result


@intrinsic
def take(typingctx: Any, address: Any) -> Any:
    """The int64 at an address before one is added to it, atomically."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), _I64(1), "seq_cst")

    return types.int64(types.int64), codegen


@intrinsic
def call_parallel(typingctx: Any, function: Any, work: Any, data: Any, threads: Any, flags: Any) -> Any:
    """GOMP_parallel(work, data, threads, flags) of the libgomp that has `function` as its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I32, _I32])
        pointer = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(pointer, [args[1], args[2], builder.trunc(args[3], _I32), builder.trunc(args[4], _I32)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), codegen


def _caller(count: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [_I64] * count).as_pointer())
        builder.call(pointer, args[1:])
        return context.get_dummy_value()

    return codegen


@intrinsic
def call_one(typingctx: Any, function: Any, a: Any) -> Any:
    """Calls void f(int64) at an address."""
    return types.void(types.int64, types.int64), _caller(1)


@intrinsic
def call_two(typingctx: Any, function: Any, a: Any, b: Any) -> Any:
    """Calls void f(int64, int64) at an address."""
    return types.void(types.int64, types.int64, types.int64), _caller(2)
