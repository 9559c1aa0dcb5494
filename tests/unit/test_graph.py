"""The decode machine against torch, call by call; masks; what a step refuses; caches in and out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.families import FAMILIES, make_model
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

import seqmoe.runtime.graph  # noqa: F401  (fills the table of handlers)
from seqmoe.runtime.graph import DecodeGraph, PlainDecode
from seqmoe.runtime.graph_lower import Lowering, Program, Stretch
from seqmoe.runtime.graph_tape import GraphUnsupported, MaskKind, Recorder, Tape, classify_mask, stand_in_experts

BF16, F32 = torch.bfloat16, torch.float32


pytestmark = pytest.mark.usefixtures("one_thread")


def lower(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Program:
    """`function` of one changing tensor as a program that reads `x`'s memory."""
    tape = Tape()
    with torch.inference_mode():
        ref = tape.ref(x)
        with Recorder(tape):
            out = function(x)
        return Lowering(tape, ref, ref, tape.ref(out), {}, 1).program()


@torch.inference_mode()
def run(program: Program) -> torch.Tensor:
    program.execute(None)
    return program.logits


def check(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *, aten: int = 0, ulps: int = 1) -> None:
    """The program equals torch on the values that were there at capture and on others; `aten` calls may stay."""
    program = lower(function, x)
    assert len(program.aten_calls) == aten, program.aten_calls
    for seed in range(2):
        if seed:
            x.copy_(x.flip(-1) * 0.7 + 0.1)
        run(program)
        want = function(x)
        assert program.logits.shape == want.shape
        if want.dtype.is_floating_point:
            eps = torch.finfo(want.dtype).eps * ulps
            torch.testing.assert_close(program.logits.float(), want.float(), rtol=eps, atol=eps * max(1.0, float(want.abs().max())))
        else:
            assert torch.equal(program.logits, want)


def values(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": lambda x: -x, "square": lambda x: x.pow(2), "cube": lambda x: x.pow(3), "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "exp": torch.exp, "sigmoid": torch.sigmoid, "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh, "relu": F.relu, "cos": torch.cos, "sin": torch.sin, "softplus": F.softplus, "log": lambda x: (x.abs() + 1).log(),
    "clamp": lambda x: x.clamp(-0.5, 0.5), "clamp_max": lambda x: x.clamp(max=0.25), "scalar": lambda x: (x + 1.5) * 0.25 - 2,
    "rsub": lambda x: 1 - x, "row": lambda x: x * x[0], "column": lambda x: x / (x[:, :1].abs() + 1), "where": lambda x: torch.where(x > 0, x, -2 * x),
    "masked_fill": lambda x: x.masked_fill(x < 0, float("-inf")), "transpose": lambda x: (x.t() + x.t()).contiguous(),
    "rotate_half": lambda x: torch.cat((-x[..., 4:], x[..., :4]), -1), "stack": lambda x: torch.stack((x, x * 2), 1), "in_place": lambda x: (x * 2).mul_(3),
    "clone": lambda x: x[1:].clone(), "maximum": lambda x: torch.maximum(x, -x), "widen": lambda x: x.float() * 2, "narrow": lambda x: (x * 3).to(BF16),
    "reshape_copy": lambda x: x.t().reshape(-1) * 2, "int": lambda x: (x > 0).long().cumsum(-1) * 2 + 1, "bool": lambda x: ~(x > 0) & (x < 1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_calls_equal_torch(name: str, dtype: torch.dtype) -> None:
    check(ELEMENTWISE[name], values(4, 8, dtype=dtype), ulps=4)


ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1), "softmax_float": lambda x: F.softmax(x, -1, dtype=F32), "sum": lambda x: x.sum(-1, keepdim=True),
    "sum_all": lambda x: x.sum(), "sum_first": lambda x: x.float().sum(0), "mean": lambda x: x.float().mean(-1), "amax": lambda x: x.amax(-1),
    "argmax": lambda x: x.argmax(-1), "max_indices": lambda x: x.max(-1)[1], "topk_values": lambda x: x.topk(3, -1)[0], "topk_indices": lambda x: x.topk(3, -1)[1],
    "gather": lambda x: x.gather(1, x.topk(2, -1)[1]), "scatter": lambda x: torch.zeros_like(x).scatter_(1, x.topk(2, -1)[1], 1.0),
    "cumsum": lambda x: x.float().cumsum(-1), "any": lambda x: (x > 1).any(-1), "layer_norm": lambda x: F.layer_norm(x, (8,), torch.arange(8).to(x.dtype), None),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ROWS)
def test_calls_on_rows_equal_torch(name: str, dtype: torch.dtype) -> None:
    check(ROWS[name], values(4, 8, dtype=dtype), ulps=8)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 3])
def test_linear_layers_equal_torch(dtype: torch.dtype, rows: int) -> None:
    weight, bias = values(40, 72, dtype=dtype, seed=1), values(40, dtype=dtype, seed=2)
    check(lambda x: F.linear(x, weight, bias), values(rows, 72, dtype=dtype), ulps=16)
    check(lambda x: x @ weight.t(), values(rows, 72, dtype=dtype), ulps=16)
    check(lambda x: F.linear(x.float(), weight.float()), values(rows, 72, dtype=dtype), ulps=64)


def test_a_large_linear_layer_is_the_same_on_two_threads() -> None:
    weight = values(1024, 1024, dtype=BF16, seed=1)
    x = values(2, 1024, dtype=BF16)
    alone = lower(lambda x: F.linear(x, weight), x)
    torch.set_num_threads(2)
    shared = lower(lambda x: F.linear(x, weight), x)
    assert torch.equal(run(alone), run(shared))
    torch.testing.assert_close(alone.logits, F.linear(x, weight), rtol=1e-2, atol=0.3)


def test_batched_products_and_convolution_equal_torch() -> None:
    other = values(2, 3, 8, 5, seed=1)
    check(lambda x: x.view(2, 1, 4, 8) @ other, values(2, 4, 8), ulps=64)
    kernel, bias = values(6, 1, 4, seed=2), values(6, seed=3)
    check(lambda x: F.conv1d(x, kernel, bias, groups=6), values(2, 6, 7), ulps=64)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("form", ["qwen", "gpt_oss", "gemma", "plain"])
def test_a_norm_is_one_instruction_and_rounds_as_torch_does(form: str, dtype: torch.dtype) -> None:
    weight = values(96, dtype=dtype, seed=1)

    def norm(x: torch.Tensor) -> torch.Tensor:
        h = x.to(F32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        if form == "qwen":
            return weight * h.to(x.dtype)
        if form == "gpt_oss":
            return (weight * h).to(x.dtype)
        if form == "gemma":
            return (h * (1.0 + weight.float())).to(x.dtype)
        return h.to(x.dtype)

    x = values(3, 96, dtype=dtype)
    assert len(lower(norm, x).code) == 1
    check(norm, x, ulps=2)


def test_an_embedding_reads_the_token() -> None:
    table = values(30, 8, seed=1)
    tokens = torch.tensor([[3], [7]])
    program = lower(lambda x: F.embedding(x, table), tokens)
    tokens[1, 0] = 29
    assert torch.equal(run(program), table[tokens])


def test_constants_are_folded_and_dead_calls_dropped() -> None:
    rows = values(8, seed=1)

    def function(x: torch.Tensor) -> torch.Tensor:
        (x * 17).softmax(-1)
        return x * (rows.exp() + torch.arange(8) * 2)

    assert len(lower(function, values(2, 8)).code) == 1


def test_state_written_in_place_lives_on_from_step_to_step() -> None:
    state = torch.zeros(1, 4)
    x = torch.ones(1, 4)
    program = lower(lambda x: state.mul_(0.5).add_(x) * 1.0, x)
    state.zero_()
    for _ in range(3):
        run(program)
    assert torch.equal(program.logits, torch.full((1, 4), 1.75))


def test_what_the_machine_lacks_stays_aten_in_place() -> None:
    check(lambda x: torch.flip(x * 2, (0,)) + 1, values(4, 8), aten=1)
    program = lower(lambda x: torch.flip(x * 2, (0,)) + 1, values(4, 8))
    assert [isinstance(step, Stretch) for step in program.steps] == [True, False, True]


def test_calls_whose_result_has_no_fixed_shape_are_refused() -> None:
    with pytest.raises(GraphUnsupported, match="nonzero"):
        lower(lambda x: x[:2] * (x > 0).nonzero().sum(), values(2, 8))


def test_mask_functions_are_recognised_by_asking_them() -> None:
    assert classify_mask(causal_mask_function, 1000) == MaskKind()
    assert classify_mask(sliding_window_causal_mask_function(128), 1000) == MaskKind(window=128)
    assert classify_mask(sliding_window_causal_mask_function(4096), 1000) == MaskKind()
    chunked = chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.long))
    assert classify_mask(chunked, 1000) == MaskKind(chunk=64)
    with pytest.raises(GraphUnsupported, match="neither causal"):
        classify_mask(lambda b, h, q, k: (k <= q) & (k % 3 != 1), 1000)


def graph_of(name: str = "qwen3_moe", batch: int = 1, context: int = 24) -> tuple[Any, DecodeGraph]:
    model = make_model(FAMILIES[name])
    graph = DecodeGraph.build(
        model, lambda layer, *arguments: stand_in_experts(*arguments), max_context=context, batch=batch
    )
    return model, graph


def test_a_step_beyond_the_context_is_refused() -> None:
    _, graph = graph_of(context=8)
    token = torch.tensor([[3]])
    for _ in range(8):
        graph.step(token)
    with pytest.raises(ValueError, match="at most 8 tokens"):
        graph.step(token)


def test_padding_elsewhere_than_on_the_left_is_refused() -> None:
    model, graph = graph_of(batch=2)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.ones(2, 4, dtype=torch.long), use_cache=True, cache=cache)
    with pytest.raises(ValueError, match="pad batches on the left"):
        graph.load_cache(cache, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]))


def test_experts_are_called_in_layer_order_with_the_steps_own_tensors() -> None:
    model, graph = graph_of(batch=2)
    seen: list[tuple[int, torch.Size, torch.Size, torch.dtype]] = []

    def call(layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        seen.append((layer, hidden.shape, index.shape, index.dtype))
        return torch.zeros_like(hidden).t().contiguous().t()  # any strides are taken

    graph.experts_call = call
    graph.step(torch.tensor([[3], [4]]))
    k = model.config.num_experts_per_tok
    assert seen == [(layer, torch.Size([2, 32]), torch.Size([2, k]), torch.int64) for layer in range(2)]
    assert len(graph.experts_modules) == 2  # the family's tiny model has one dense layer


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "deepseek_v3"])
def test_an_exported_cache_goes_on_where_the_graph_stopped(name: str) -> None:
    _, graph = graph_of(name)
    tokens = [torch.tensor([[token]]) for token in (5, 9, 2, 44)]
    want = [graph.step(token).clone() for token in tokens][-1]
    other = graph_of(name)[1]
    for token in tokens[:-1]:
        other.step(token)
    again = graph_of(name)[1]
    again.load_cache(other.export_cache())
    torch.testing.assert_close(again.step(tokens[-1]), want, rtol=1e-4, atol=1e-4)


def test_the_plain_step_is_the_models_forward() -> None:
    model = make_model(FAMILIES["qwen3_moe"])
    plain = PlainDecode(model, "because")
    ids = torch.tensor([[4, 8, 15, 16]])
    rows = [plain.step(ids[:, place : place + 1]) for place in range(4)]
    with torch.inference_mode():
        want = model(input_ids=ids).logits
    torch.testing.assert_close(torch.stack(rows, 1), want, rtol=1e-3, atol=1e-3)


def test_a_model_may_read_values_where_it_does_the_same_for_all_of_them() -> None:
    """Long-context rope picks its frequencies in Python by the length: capturable while every length picks the same."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "short_mscale": 1.0, "long_mscale": 1.2, "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = make_model(FAMILIES["phimoe"], rope_parameters=rope)
    assert len(DecodeGraph.build(model, None, max_context=32, batch=1).program.steps)  # type: ignore[arg-type]
    with pytest.raises(GraphUnsupported, match="decodes differently for it within 64 tokens"):
        DecodeGraph.build(model, None, max_context=64, batch=1)  # type: ignore[arg-type]


def test_another_dtype_is_refused_by_name() -> None:
    model = make_model(FAMILIES["qwen3_moe"], dtype=torch.float16)
    with pytest.raises(GraphUnsupported, match="float16"):
        DecodeGraph.build(model, None, max_context=16, batch=1)  # type: ignore[arg-type]


def test_logits_do_not_depend_on_what_shares_the_machine() -> None:
    """Bit-identical when the same step runs again: no uninitialised memory, no order of threads."""
    _, graph = graph_of(batch=3)
    token = torch.tensor([[3], [4], [5]])
    first = graph.step(token).clone().numpy()
    for _ in range(3):
        graph.reset()
        assert np.array_equal(graph.step(token).numpy(), first)
