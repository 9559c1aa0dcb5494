"""The CPU experts kernels' parts: inner loops against torch, the small compiler, the plan's refusals, the threads."""

import ctypes
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from seqmoe.profiles.errors import CheckpointError
from seqmoe.runtime.kernels import emit, loops, native
from seqmoe.runtime.kernels.emit import BF16, BLOCK, F16, F32
from seqmoe.runtime.kernels.loops import DOT_SHAPES
from seqmoe.runtime.kernels.openmp import find_openmp
from seqmoe.runtime.kernels.plan import make_plan
from seqmoe.runtime.kernels.reference import act_ref
from seqmoe.runtime.layout import RecordLayout, View

DTYPES = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16}
KINDS = list(DTYPES)


def call(name: loops.Name, *arguments: int) -> None:
    (address,) = loops.addresses([name])
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)(*arguments)


def prepared(x: torch.Tensor, paired: bool) -> torch.Tensor:
    """x [cols] as `prepare` gives it."""
    out = torch.full((-(-len(x) // BLOCK) * BLOCK,), 7.0)
    kind = next(k for k, dtype in DTYPES.items() if dtype == x.dtype)
    call(("prepare", kind, int(paired)), x.data_ptr(), len(x), out.data_ptr())
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_prepare_pads_with_zeros_and_sorts_columns(kind: int, paired: bool, count: int) -> None:
    x = torch.randn(count).to(DTYPES[kind])
    blocks = torch.nn.functional.pad(x.float(), (0, -count % BLOCK)).view(-1, BLOCK)
    expected = torch.cat([blocks[:, ::2], blocks[:, 1::2]], dim=1) if paired else blocks
    assert torch.equal(prepared(x, paired), expected.reshape(-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [1, 2, 31, 32, 33, 64, 200])
def test_dot_is_right_and_the_same_for_any_rows_and_tokens_at_a_time(kind: int, cols: int) -> None:
    weights, x = torch.randn(4, cols).to(DTYPES[kind]), torch.randn(4, cols)
    inputs = [prepared(row, kind == BF16) for row in x]
    table = np.array([row.data_ptr() for row in inputs])
    results = {}
    for rows, tokens in DOT_SHAPES:
        out = torch.zeros(4, 4)
        for r in range(0, 4, rows):
            for t in range(0, 4, tokens):
                call(
                    ("dot", kind, rows, tokens), weights[r].data_ptr(), cols * weights.element_size(),
                    table.ctypes.data + 8 * t, cols, out[t, r:].data_ptr(), 16, 4,
                )  # fmt: skip
        results[rows, tokens] = out
    torch.testing.assert_close(results[1, 1], x @ weights.float().T, rtol=1e-5, atol=1e-5)
    for shape, out in results.items():
        assert torch.equal(out, results[1, 1]), shape


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [33, 64])
def test_dot_reads_nothing_past_the_last_row(kind: int, cols: int) -> None:
    """The row ends where the mapping ends: one byte more would be a segmentation fault, so it runs in a process."""
    code = f"""
import ctypes, mmap, numpy as np
from seqmoe.runtime.kernels import loops
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [ctypes.c_long] * 5
page, size = mmap.PAGESIZE, {cols * emit.ITEM_BYTES[kind]}
base = libc.mmap(None, 2 * page, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
assert libc.mprotect(ctypes.c_void_p(base + page), page, 0) == 0
x, out = np.ones(96, np.float32), np.ones(1, np.float32)
table = np.array([x.ctypes.data])
(address,) = loops.addresses([("dot", {kind}, 1, 1)])
ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)(address)(
    base + page - size, 0, table.ctypes.data, {cols}, out.ctypes.data, 4, 4)
assert out[0] == 0
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 8])
def test_outer_adds_rows_of_transposed_weights(kind: int, rows: int) -> None:
    weights, x = torch.randn(rows, 2 * BLOCK).to(DTYPES[kind]), torch.randn(rows)
    y = torch.zeros(2 * BLOCK)
    stride = 2 * BLOCK * weights.element_size()
    call(("outer", kind, rows), weights.data_ptr(), stride, x.data_ptr(), 2, y.data_ptr())
    if kind == BF16:
        call(("interleave",), y.data_ptr(), 2)
    expected = x @ weights.float()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    tail = torch.zeros(5)
    call(("outer_tail", kind), weights.data_ptr(), stride, x.data_ptr(), rows, 5, tail.data_ptr())
    torch.testing.assert_close(tail, expected[:5], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [3, 32, 77])
def test_store_rounds_as_torch_does(kind: int, count: int) -> None:
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 1.00390625, 65504.0, 3.3e38])
    y = torch.cat([special, torch.randn(96 - len(special))])[torch.randperm(96)]
    out = torch.full((96,), 5.0).to(DTYPES[kind])
    call(("store", kind), y.data_ptr(), count, out.data_ptr())
    assert torch.equal(out[:count].nan_to_num(123.0), y[:count].to(DTYPES[kind]).nan_to_num(123.0))
    assert (out[count:] == 5.0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", range(len(emit.ACTIVATIONS)))
@pytest.mark.parametrize("gated", [False, True])
def test_gate_against_torch(kind: int, activation: int, gated: bool) -> None:
    dtype = DTYPES[kind]
    values = torch.cat([torch.linspace(-120, 120, 4001), torch.randn(4000) * 3])[: 250 * BLOCK]
    g, u = values.clone(), torch.randn(len(values))
    h = torch.empty_like(g)
    for i in range(0, len(g), BLOCK):
        at = 4 * i
        call(("gate", kind, activation, int(gated)), g.data_ptr() + at, u.data_ptr() + at, h.data_ptr() + at, 0)
    expected = act_ref(g.to(dtype), activation)
    expected = expected * u.to(dtype) if gated else expected
    if kind == F32:
        torch.testing.assert_close(h, expected, rtol=2e-6, atol=1e-6)
    else:
        # A last bit of exp's may round the other way, rarely; never further than one step of the dtype.
        # (Where almost nothing is left, torch's 1 + tanh has lost its digits, and ours has not.)
        counted = expected.float().abs() > 1e-4
        assert (h != expected.float())[counted].float().mean() < 0.01
        torch.testing.assert_close(h, expected.float(), rtol=0.016 if kind == BF16 else 0.002, atol=1e-4)


def test_gate_keeps_nan_and_infinity() -> None:
    g = torch.zeros(BLOCK)
    g[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    h = torch.empty_like(g)
    call(("gate", F32, emit.SILU, 0), g.data_ptr(), 0, h.data_ptr(), 0)
    assert h[0].isnan() and h[1] == float("inf")


# --- the compiler


def fibonacci(n):
    a, b = 0, 1
    for _i in range(n):
        a, b = b, a + b
    return a


def branches(x, y):
    total = 0
    while True:
        total += 1 if x > y and x != 7 or y < 0 else 10
        x -= 1
        if x <= 0:
            break
    for i in range(10, 0, -3):
        total += i
    return total + min(x, y) * max(x, y) + total // 3 + total % 5 + (total << 2) + (3 if 0 <= y < 5 else 0)


def calls(x):
    return fibonacci(x) if x < 20 else -fibonacci(x - 10)


def bad_float(x):
    return x / 2


def bad_call(x):
    return sorted(x)


def compiled(*functions: object) -> list[object]:
    names = [f.__name__ for f in functions]  # type: ignore[attr-defined]
    addresses, owner = native.compile_module(lambda module: native.emit(module, functions), names)  # type: ignore[arg-type]
    result = []
    for address, function in zip(addresses, functions, strict=True):
        num_args = function.__code__.co_argcount  # type: ignore[attr-defined]
        result.append(ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * num_args)(address))
    result[0].owner = owner  # type: ignore[attr-defined]
    return result


def test_compiled_functions_do_what_python_does() -> None:
    fib, branch, call_both = compiled(fibonacci, branches, calls)
    for n in range(30):
        assert fib(n) == fibonacci(n) and call_both(n) == calls(n)  # type: ignore[operator]
    for x in range(-3, 12):
        for y in range(-3, 12):
            assert branch(x, y) == branches(x, y), (x, y)  # type: ignore[operator]


@pytest.mark.parametrize("function", [bad_float, bad_call])
def test_what_is_not_in_the_subset_is_refused(function: object) -> None:
    with pytest.raises(NotImplementedError, match="not in the compiled subset"):
        compiled(function)


def test_kernels_share_torch_openmp() -> None:
    openmp = find_openmp()
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}
    assert openmp.available and loaded == {openmp.path}, loaded


# --- the plan


@dataclass
class Case:
    reason: str
    views: tuple[View, ...]
    dtype: torch.dtype = torch.bfloat16


def view(
    param: str, shape: tuple[int, ...], dim: int = 0, start: int = 0, strides: object = None, dtype: str = "BF16"
) -> View:
    strides = strides or tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return View(param, dim, start, shape, strides, dtype)  # type: ignore[arg-type]


UP, DOWN = view("gate_up_proj", (96, 32)), view("down_proj", (32, 48))
CASES = {
    "split": Case("gate_up_proj's outputs 0 to 47 lie in several tensors", (view("gate_up_proj", (20, 32)), DOWN)),
    "missing": Case("down_proj's outputs", (UP,)),
    "strides": Case("no contiguous rows or columns", (view("gate_up_proj", (96, 32), strides=(64, 2)), DOWN)),
    "unknown": Case("parameter gate_scale is not among", (UP, DOWN, view("gate_scale", (4,)))),
    "mixed": Case("weights of type BF16, F32", (UP, view("down_proj", (32, 48), dtype="F32"))),
    "fp8": Case("weights of type F8_E4M3", (view("gate_up_proj", (96, 32), dtype="F8_E4M3"),)),
    "rounded": Case(
        "would have to be rounded to bfloat16", tuple(view(v.param, v.shape, dtype="F32") for v in (UP, DOWN))
    ),
    "float64": Case("dtype torch.float64", (UP, DOWN), torch.float64),
}


def qwen_experts() -> torch.nn.Module:
    with torch.device("meta"):
        return Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=48, num_experts=4))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_cannot_be_computed_is_refused_by_name(case: Case) -> None:
    with pytest.raises(CheckpointError) as error:
        make_plan(RecordLayout(case.views), qwen_experts(), case.dtype)
    message = str(error.value)
    assert case.reason in message and "Qwen3MoeExperts" in message and "\n" not in message


def test_a_module_without_the_interface_is_refused() -> None:
    with pytest.raises(CheckpointError, match="Linear cannot be computed .* no attribute has_gate"):
        make_plan(RecordLayout((UP, DOWN)), torch.nn.Linear(2, 2), torch.bfloat16)


def test_bfloat16_weights_in_float32_are_exact() -> None:
    plan = make_plan(RecordLayout((UP, DOWN)), qwen_experts(), torch.float32)
    assert (plan.kind, plan.weight_kind, plan.activation) == (F32, BF16, emit.SILU)
