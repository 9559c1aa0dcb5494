"""Pieces of LLVM vector code for the inner loops of the CPU experts kernels (`loops.py`).

Written as explicit vector code, not left to the auto-vectoriser, for two reasons: speed without a C compiler, and a
fixed order of additions. Every dot product, for any number of rows and tokens at a time, adds in the same order: 16
lanes, then a fixed tree. So a result does not depend on how many tokens share an expert, nor on threads.

Weights are loaded with alignment 1, since a record lies in its slot wherever the file's alignment puts it.
Blocks are 32 columns: for bfloat16, 32 columns are 16 words of 32 bits, whose low halves are the even columns and high
halves the odd ones (little endian). `x` is stored to match: per block 16 even columns, then 16 odd ones. float16 and
float32 keep the natural order.
"""

from collections.abc import Callable, Sequence

from llvmlite import binding, ir

F32, BF16, F16 = 0, 1, 2  # codes of element types, as in the kernels' arguments
ITEM_BYTES = {F32: 4, BF16: 2, F16: 2}
BLOCK = 32  # columns (or rows of a result) handled together
LANES = 16

i1, i8, i16, i32, i64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
f32, f16 = ir.FloatType(), ir.HalfType()
v16f, v16i = ir.VectorType(f32, LANES), ir.VectorType(i32, LANES)
void = ir.VoidType()

HAS_FMA = bool(binding.get_host_cpu_features().get("fma", True))  # x86 says; elsewhere fma is in the base set


def splat(value: float, of: ir.Type = v16f) -> ir.Constant:
    """The vector constant whose 16 lanes are all `value`."""
    return ir.Constant(of, [value] * LANES)


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once where the processor can."""
    if not HAS_FMA:
        return b.fadd(b.fmul(x, y), z)
    name = "llvm.fma.v16f32"
    intrinsic = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(v16f, [v16f] * 3), name)
    return b.call(intrinsic, (x, y, z))


def at(b: ir.IRBuilder, address: ir.Value, of: ir.Type) -> ir.Value:
    """The integer address as a pointer to `of`."""
    return b.inttoptr(address, of.as_pointer())


def load(b: ir.IRBuilder, address: ir.Value, of: ir.Type, offset: int = 0) -> ir.Value:
    """An unaligned load from `address + offset` bytes."""
    return b.load(at(b, b.add(address, i64(offset)) if offset else address, of), align=1)


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
    """An unaligned store to `address + offset` bytes."""
    b.store(value, at(b, b.add(address, i64(offset)) if offset else address, value.type), align=1)


def prefetch(b: ir.IRBuilder, address: ir.Value, offset: int = 0) -> None:
    """Ask for the cache line at `address + offset`; harmless wherever that is."""
    name = "llvm.prefetch.p0i8"
    kind = ir.FunctionType(void, [i8.as_pointer(), i32, i32, i32])
    intrinsic = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    b.call(intrinsic, (at(b, b.add(address, i64(offset)) if offset else address, i8), i32(0), i32(3), i32(1)))


def loop(
    b: ir.IRBuilder, count: ir.Value, carried: Sequence[ir.Value], body: Callable[[ir.Value, list], list]
) -> list[ir.Value]:
    """`for i in range(count): carried = body(i, carried)`; returns what is carried out."""
    before, head = b.block, b.append_basic_block("head")
    step, done = b.append_basic_block("step"), b.append_basic_block("done")
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(i64)
    index.add_incoming(i64(0), before)
    phis = []
    for value in carried:
        phi = b.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    b.cbranch(b.icmp_signed("<", index, count), step, done)
    b.position_at_end(step)
    out = body(index, phis)
    index.add_incoming(b.add(index, i64(1)), b.block)
    for phi, value in zip(phis, out, strict=True):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(done)
    return phis


def load_block(b: ir.IRBuilder, kind: int, address: ir.Value) -> tuple[ir.Value, ir.Value]:
    """32 elements of type `kind` as two float vectors: (even, odd) for bfloat16, (first, second half) otherwise."""
    if kind == BF16:
        words = load(b, address, v16i)
        low = b.bitcast(b.shl(words, splat(16, v16i)), v16f)
        return low, b.bitcast(b.and_(words, splat(0xFFFF0000, v16i)), v16f)
    if kind == F16:
        half = ir.VectorType(f16, LANES)
        return b.fpext(load(b, address, half), v16f), b.fpext(load(b, address, half, 32), v16f)
    return load(b, address, v16f), load(b, address, v16f, 64)


def interleave(b: ir.IRBuilder, even: ir.Value, odd: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(even, odd) columns to (first, second half) in natural order."""
    masks = [[(base + i // 2) + LANES * (i % 2) for i in range(LANES)] for base in (0, LANES // 2)]
    first, second = (b.shuffle_vector(even, odd, ir.Constant(v16i, mask)) for mask in masks)
    return first, second


def deinterleave(b: ir.IRBuilder, first: ir.Value, second: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(first, second half) in natural order to (even, odd) columns."""
    even, odd = (
        b.shuffle_vector(first, second, ir.Constant(v16i, [2 * i + odd for i in range(LANES)])) for odd in (0, 1)
    )
    return even, odd


def to_bf16_bits(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Floats rounded to nearest even bfloat16, as 32-bit words whose low half is zero; NaN stays NaN."""
    bits = b.bitcast(x, v16i)
    lsb = b.and_(b.lshr(bits, splat(16, v16i)), splat(1, v16i))
    rounded = b.and_(b.add(bits, b.add(lsb, splat(0x7FFF, v16i))), splat(0xFFFF0000, v16i))
    return b.select(b.fcmp_unordered("uno", x, x), splat(0x7FC00000, v16i), rounded)


def round_to(b: ir.IRBuilder, kind: int, x: ir.Value) -> ir.Value:
    """Floats rounded to the nearest value of type `kind`, still as floats."""
    if kind == BF16:
        return b.bitcast(to_bf16_bits(b, x), v16f)
    if kind == F16:
        return b.fpext(b.fptrunc(x, ir.VectorType(f16, LANES)), v16f)
    return x


def exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e**x to about 1 ulp (Cephes' expf: range reduction by log 2, then a polynomial of degree 6)."""
    low, high = splat(-87.3365478515625), splat(88.3762626647949)
    inside = b.select(b.fcmp_ordered("<", x, low), low, x)
    inside = b.select(b.fcmp_ordered(">", inside, high), high, inside)
    magic = splat(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
    shifted = fma(b, inside, splat(1.44269502162933349609375), magic)
    n = b.fsub(shifted, magic)
    r = fma(b, n, splat(-0.693359375), inside)
    r = fma(b, n, splat(2.12194442749023437500e-4), r)
    poly = splat(1.98756912513636052608490e-4)
    for c in (1.39819993637502193450927734375e-3, 8.33345204591751098632812e-3, 4.16657961905002593994140625e-2,
              1.66666656732559204101562e-1, 5.00000000000000000e-1):  # fmt: skip
        poly = fma(b, poly, r, splat(c))
    poly = b.fadd(fma(b, poly, b.fmul(r, r), r), splat(1.0))
    # 2**n: n as an integer is in the low bits of `shifted`.
    power = b.shl(b.add(b.bitcast(shifted, v16i), splat(127, v16i)), splat(23, v16i))
    return b.fmul(poly, b.bitcast(power, v16f))


def silu(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """x / (1 + e**-x), as torch computes it."""
    return b.fdiv(x, b.fadd(splat(1.0), exp(b, b.fsub(splat(-0.0), x))))


def gelu_tanh(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """gelu(x), tanh approximation: x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3), which equals 0.5 x (1 + tanh u)."""
    cube = b.fmul(b.fmul(x, x), x)
    twice = b.fmul(splat(2 * 0.7978845608028654), fma(b, cube, splat(0.044715), x))
    return b.fdiv(x, b.fadd(splat(1.0), exp(b, b.fsub(splat(-0.0), twice))))


def relu(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """max(x, 0); NaN stays NaN."""
    return b.select(b.fcmp_ordered("<", x, splat(0.0)), splat(0.0), x)


def relu2(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """max(x, 0) squared. Rounding the maximum changes nothing, so one rounding at the end is torch's result too."""
    positive = relu(b, x)
    return b.fmul(positive, positive)


ACTIVATIONS: tuple[Callable[[ir.IRBuilder, ir.Value], ir.Value], ...] = (silu, gelu_tanh, relu, relu2)
SILU, GELU_TANH, RELU, RELU2 = range(4)


def sum_lanes(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The sum of 16 lanes by a fixed tree: halves are added until one lane is left."""
    width = LANES
    while width > 1:
        half = width // 2
        mask = ir.VectorType(i32, half)
        low = b.shuffle_vector(x, x, ir.Constant(mask, list(range(half))))
        high = b.shuffle_vector(x, x, ir.Constant(mask, list(range(half, width))))
        x, width = b.fadd(low, high), half
    return b.extract_element(x, i32(0))


def load_one(b: ir.IRBuilder, kind: int, address: ir.Value) -> ir.Value:
    """One element of type `kind` as a float."""
    if kind == BF16:
        return b.bitcast(b.shl(b.zext(load(b, address, i16), i32), i32(16)), f32)
    return b.fpext(load(b, address, f16), f32) if kind == F16 else load(b, address, f32)


def store_block(b: ir.IRBuilder, kind: int, first: ir.Value, second: ir.Value, address: ir.Value) -> None:
    """32 floats in natural order, rounded to type `kind`, to memory."""
    if kind == BF16:
        even, odd = deinterleave(b, first, second)
        low = b.lshr(to_bf16_bits(b, even), splat(16, v16i))
        store(b, b.or_(low, to_bf16_bits(b, odd)), address)
    elif kind == F16:
        for x, offset in ((first, 0), (second, 32)):
            store(b, b.fptrunc(x, ir.VectorType(f16, LANES)), address, offset)
    else:
        store(b, first, address)
        store(b, second, address, 64)
