"""The CPU experts against Transformers' own `eager` experts of real families, and against themselves bit for bit:
in rounds, at odd addresses, with other numbers of threads, and each token alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from seqmoe.runtime.kernels import experts_cpu
from seqmoe.runtime.kernels.experts_cpu import ExpertsCompute, workspace_bytes
from seqmoe.runtime.kernels.reference import forward_ref
from seqmoe.runtime.layout import RecordLayout, View

DISK = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# Relative to the largest value. bfloat16: Transformers adds the experts up in bfloat16, seqmoe in float32.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 0.02, torch.float16: 0.003}


@dataclass(frozen=True)
class Family:
    """An experts class, its tiny config, and how a checkpoint may store its parameters."""

    module: str  # path of the class under transformers.models
    config: str
    sizes: dict[str, Any]
    stored: tuple[str, ...] = ("as module", "gate and up apart", "transposed")
    config_of: Callable[[Any], Any] = field(default=lambda config: config)


COMMON = {"hidden_size": 80, "num_experts_per_tok": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {
    "qwen3_moe": Family("qwen3_moe.Qwen3MoeExperts", "Qwen3MoeConfig", {"num_experts": 8, "moe_intermediate_size": 72}),
    "mixtral": Family("mixtral.MixtralExperts", "MixtralConfig", {"num_local_experts": 8, "intermediate_size": 100}),
    "gpt_oss": Family(
        "gpt_oss.GptOssExperts", "GptOssConfig", {"num_local_experts": 8, "intermediate_size": 72, "swiglu_limit": 1.5},
        ("as module", "transposed"),
    ),
    "deepseek_v3": Family(
        "deepseek_v3.DeepseekV3Experts", "DeepseekV3Config", {"n_routed_experts": 8, "moe_intermediate_size": 64}
    ),
    "deepseek_v4": Family(
        "deepseek_v4.DeepseekV4Experts", "DeepseekV4Config",
        {"n_routed_experts": 8, "moe_intermediate_size": 72, "swiglu_limit": 0.5},
    ),
    "phimoe": Family("phimoe.PhimoeExperts", "PhimoeConfig", {"num_local_experts": 8, "intermediate_size": 33}),
    "granitemoe": Family("granitemoe.GraniteMoeExperts", "GraniteMoeConfig", {"num_local_experts": 8, "intermediate_size": 96}),
    "gemma4": Family(
        "gemma4.Gemma4TextExperts", "Gemma4TextConfig",
        {"num_experts": 8, "moe_intermediate_size": 64, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "gelu": Family(  # an activation that is not fused
        "qwen3_moe.Qwen3MoeExperts", "Qwen3MoeConfig",
        {"num_experts": 8, "moe_intermediate_size": 64, "hidden_act": "gelu"},
    ),
    "nemotron_h": Family(  # no gate
        "nemotron_h.NemotronHExperts", "NemotronHConfig",
        {"n_routed_experts": 8, "moe_intermediate_size": 72, "mlp_hidden_act": "relu2"}, ("as module", "transposed"),
    ),
    "aria": Family(  # [in, out] in the module
        "aria.AriaExperts", "AriaTextConfig", {"moe_num_experts": 8, "intermediate_size": 72}
    ),
    "muse_spark": Family(  # a norm of its own after each expert
        "muse_spark.MuseSparkExperts", "MuseSparkTextConfig",
        {"num_local_experts": 8, "moe_intermediate_size": 72, "moe_hidden_size": 80},
    ),
}  # fmt: skip


class Layer:
    """A module with random weights and their copy in one buffer, at chosen offsets, as a pool's slots would hold it."""

    def __init__(self, name: str, dtype: torch.dtype, stored: str = "as module", shift: int = 0) -> None:
        family = FAMILIES[name]
        package, class_name = family.module.split(".")
        config = getattr(transformers, family.config)(**{**COMMON, **family.sizes})
        config._experts_implementation = "eager"
        modeling = __import__(f"transformers.models.{package}.modeling_{package}", fromlist=[class_name])
        torch.manual_seed(0)
        self.module = getattr(modeling, class_name)(config).to(dtype).eval()
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * (2 * parameter.shape[-1]) ** -0.5)
        self.dtype = dtype
        stacked = {n: p for n, p in self.module.named_parameters(recurse=False)}
        self.num_experts = next(iter(stacked.values())).shape[0]
        self.hidden_size = COMMON["hidden_size"]
        views, pieces = [], []
        for param, tensor in stacked.items():
            for start, size in self._parts(param, tensor, stored):
                dim = self._out_dim(tensor)
                part = tensor.narrow(dim + 1, start, size)
                on_disk = part.transpose(1, 2) if stored == "transposed" and tensor.dim() == 3 else part
                on_disk = on_disk.contiguous()
                strides = on_disk[0].stride()
                strides = strides[::-1] if stored == "transposed" else strides
                views.append(View(param, dim, start, tuple(part.shape[1:]), tuple(strides), DISK[dtype]))
                pieces.append(on_disk)
        self.layout = RecordLayout(tuple(views))
        # Each expert's views one after the other, each expert at another offset from the alignment.
        item = dtype.itemsize
        record = sum(p[0].numel() * item for p in pieces)
        slot = -(-(record + 64 + shift) // 64) * 64
        self.memory = torch.zeros((self.num_experts + 1) * slot, dtype=torch.uint8)
        base = -self.memory.data_ptr() % 64
        self.addresses: NDArray[np.int64] = np.zeros((self.num_experts, len(views)), dtype=np.int64)
        for expert in range(self.num_experts):
            at = base + expert * slot + (shift * (1 + expert % 3) if shift else 0)
            for i, piece in enumerate(pieces):
                data = piece[expert].reshape(-1).view(torch.uint8)
                self.memory[at : at + len(data)] = data
                self.addresses[expert, i] = self.memory.data_ptr() + at
                at += len(data)

    def _out_dim(self, tensor: torch.Tensor) -> int:
        return 1 if self.module.is_transposed and tensor.dim() == 3 else 0

    def _parts(self, param: str, tensor: torch.Tensor, stored: str) -> list[tuple[int, int]]:
        size = tensor.shape[self._out_dim(tensor) + 1]
        if stored == "gate and up apart" and param.startswith("gate_up_proj"):
            return [(0, size // 2), (size // 2, size // 2)]
        return [(0, size)]

    def compute(self, threads: int = 2) -> ExpertsCompute:
        return ExpertsCompute(self.layout, self.module, self.dtype, threads)

    def inputs(self, tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(tokens, self.hidden_size, generator=generator).to(self.dtype)
        weights, index = torch.rand(tokens, self.num_experts, generator=generator).softmax(-1).topk(3)
        return hidden, index, weights


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    scale = theirs.float().abs().max().item()
    assert ours.dtype == theirs.dtype and scale > 0.01
    difference = (ours.float() - theirs.float()).abs().max().item()
    assert difference <= TOLERANCE[theirs.dtype] * scale, (difference, scale)


CASES = [(name, stored) for name, family in FAMILIES.items() for stored in family.stored]


@pytest.mark.parametrize("dtype", DISK, ids=DISK.values())
@pytest.mark.parametrize(("name", "stored"), CASES)
def test_as_transformers_eager(name: str, stored: str, dtype: torch.dtype) -> None:
    layer = Layer(name, dtype, stored, shift=6 if dtype.itemsize == 2 else 2)
    compute = layer.compute()
    for tokens in (1, 2, 5, 90):
        hidden, index, weights = layer.inputs(tokens)
        for router_weights in (weights, weights.to(dtype)):
            ours = compute.forward(hidden, index, router_weights, layer.addresses)
            close(ours, layer.module(hidden, index, router_weights))
    hidden, index, weights = layer.inputs(4)
    close(
        compute.forward(hidden, index, weights, layer.addresses),
        forward_ref(compute, hidden, index, weights, layer.addresses),
    )


def test_fused_and_not_fused_are_told_apart() -> None:
    fused = {name: Layer(name, torch.bfloat16).compute().fused for name in FAMILIES}
    assert {name for name, is_fused in fused.items() if not is_fused} == {"gpt_oss", "deepseek_v4", "gelu"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 70, 300])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "muse_spark"])
def test_rounds_in_any_order_are_one_go_bit_for_bit(name: str, tokens: int, dtype: torch.dtype) -> None:
    layer = Layer(name, dtype)
    compute, other = layer.compute(), Layer("mixtral", dtype).compute()
    hidden, index, weights = layer.inputs(tokens)
    whole = compute.forward(hidden, index, weights, layer.addresses)
    generator = np.random.default_rng(tokens)
    for _ in range(3):
        job = compute.begin(hidden, index, weights)
        assert job.active == sorted(set(index.flatten().tolist()))
        order = generator.permutation(job.active).tolist()
        while order:
            size = int(generator.integers(1, 4))
            chosen = order[:size]
            # Only the rows of the experts at hand are valid.
            addresses = np.zeros_like(layer.addresses)
            addresses[chosen] = layer.addresses[chosen]
            job.add(chosen, addresses)
            order = order[size:]
        assert torch.equal(job.finish(), whole)
    assert other is not compute


@pytest.mark.parametrize("dtype", DISK, ids=DISK.values())
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("tokens", [1, 4, 280])
def test_odd_addresses_and_threads_change_no_bit(name: str, tokens: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(experts_cpu, "LARGE_GROUP", 64)  # both ways to compute
    aligned, shifted = Layer(name, dtype), Layer(name, dtype, shift=2)
    hidden, index, weights = aligned.inputs(tokens)
    expected = aligned.compute().forward(hidden, index, weights, aligned.addresses)
    for threads in (1, 2, 3):
        assert torch.equal(shifted.compute(threads).forward(hidden, index, weights, shifted.addresses), expected)


@pytest.mark.parametrize("name", ["qwen3_moe", "aria", "gpt_oss"])
def test_a_token_alone_is_the_token_among_others(name: str) -> None:
    layer = Layer(name, torch.bfloat16)
    compute = layer.compute()
    tokens = 40 if compute.fused else experts_cpu.FEW_ROWS
    hidden, index, weights = layer.inputs(tokens)
    together = compute.forward(hidden, index, weights, layer.addresses)
    for t in range(tokens):
        alone = compute.forward(hidden[t : t + 1], index[t : t + 1], weights[t : t + 1], layer.addresses)
        assert torch.equal(alone[0], together[t]), t


def test_many_tokens_of_one_expert_go_to_torch_and_agree() -> None:
    layer = Layer("qwen3_moe", torch.float32)
    compute = layer.compute()
    hidden, index, weights = layer.inputs(600)
    index[:, 0] = 2
    index[:, 1:] = torch.where(index[:, 1:] == 2, 5, index[:, 1:])
    ours = compute.forward(hidden, index, weights, layer.addresses)
    close(ours, layer.module(hidden, index, weights))


def test_ids_outside_the_experts_add_nothing() -> None:
    layer = Layer("qwen3_moe", torch.float32)
    compute = layer.compute()
    hidden, index, weights = layer.inputs(5)
    index[0, 1] = index[3, 0] = layer.num_experts
    index[4] = layer.num_experts
    ours = compute.forward(hidden, index, weights, layer.addresses)
    close(ours, layer.module(hidden, index, weights))
    assert (ours[4] == 0).all()
    job = compute.begin(hidden, index, weights)
    job.add(job.active, layer.addresses)
    assert torch.equal(job.finish(), ours)


def test_strided_inputs_and_no_tokens() -> None:
    layer = Layer("qwen3_moe", torch.bfloat16)
    compute = layer.compute()
    hidden, index, weights = layer.inputs(6)
    expected = compute.forward(hidden, index, weights, layer.addresses)
    wide = torch.cat([hidden, hidden], dim=1)[:, : layer.hidden_size]
    ours = compute.forward(wide, index.T.contiguous().T, weights.T.contiguous().T, layer.addresses)
    assert torch.equal(ours, expected)
    none = compute.forward(hidden[:0], index[:0], weights[:0], layer.addresses)
    assert none.shape == (0, layer.hidden_size)


def test_a_job_that_is_not_complete_is_our_bug() -> None:
    layer = Layer("qwen3_moe", torch.bfloat16)
    job = layer.compute().begin(*layer.inputs(4))
    job.add(job.active[1:], layer.addresses)
    with pytest.raises(AssertionError, match="not computed"):
        job.finish()


def test_scratch_memory_stays_below_what_is_announced() -> None:
    layer = Layer("qwen3_moe", torch.bfloat16)
    compute = layer.compute()
    scratch = experts_cpu._scratch
    scratch.buffers.clear()
    scratch.token = object()
    hidden, index, weights = layer.inputs(300)
    compute.forward(hidden, index, weights, layer.addresses)
    used = sum(buffer.numel() for buffer in scratch.buffers.values())
    assert used <= workspace_bytes(compute.plan, 300, 3, compute.num_threads) + 4096 * len(scratch.buffers)
