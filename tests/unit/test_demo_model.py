"""The demo model's parts that can be wrong without anyone noticing: its experts function and its cache counters."""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "demo_model"


@pytest.fixture
def routing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("routing")


def test_segment_experts_equal_the_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    monkeypatch.syspath_prepend(str(FOLDER))
    fast: Any = importlib.import_module("fast_experts")
    torch.manual_seed(0)
    config = qwen.Qwen3MoeConfig(
        hidden_size=16, moe_intermediate_size=8, num_experts=6, num_experts_per_tok=2, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    experts = qwen.Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    # Expert 5 is never chosen, expert 0 by most tokens: an empty segment and a long one.
    index = torch.stack([torch.tensor([0, 1 + t % 4]) if t % 3 else torch.tensor([3, 2]) for t in range(20)])

    results = []
    for forward in (experts, lambda *args: fast.segment_experts(experts, *args)):
        experts.zero_grad()
        hidden = torch.randn(20, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        weights = torch.rand(20, 2, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = forward(hidden, index, weights)
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        gate_up, down = experts.gate_up_proj.grad, experts.down_proj.grad
        results.append([out.detach(), hidden.grad, weights.grad, gate_up.clone(), down.clone()])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


def test_segment_experts_are_registered_under_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    monkeypatch.syspath_prepend(str(FOLDER))
    fast: Any = importlib.import_module("fast_experts")
    monkeypatch.setattr(moe, "ALL_EXPERTS_FUNCTIONS", SimpleNamespace(register=(calls := {}).__setitem__))
    assert calls[fast.register()] is fast.segment_experts


def test_hits_of_one_expert_a_position(routing: ModuleType) -> None:
    needs = [[0], [1], [2], [0], [1], [3], [0], [1]]
    # Two slots. LRU always evicts the one needed next, and never hits.
    assert routing.lru_hits(needs, 2) == 0
    # Belady: 2 replaces 1 (used at 4, 0 at 3); 0 hits; 1 replaces 2; 3 replaces 1 (at 7, 0 at 6); 0 hits; 1 misses.
    assert routing.belady_hits(needs, 2) == 2


def test_hits_of_several_experts_a_position(routing: ModuleType) -> None:
    # Two layers of four experts, top-2, two steps of the same choice: flat ids 0, 1 and 4, 5.
    choices = np.array([[[0, 1], [0, 1]], [[0, 1], [0, 1]]])
    needs = routing.positions(choices, 4)
    assert needs == [[0, 1], [4, 5], [0, 1], [4, 5]]
    # Three slots. LRU, oldest first: 0 1 | 1 4 5 | 1 hits, 0 replaces 4: 5 1 0 | 5 hits, 4 replaces 1.
    assert routing.lru_hits(needs, 3) == 2
    # Belady can do no better here: two of the four must go between uses, and its own layer's are not eligible.
    assert routing.belady_hits(needs, 3) == 2
    # With room for all, only the first uses miss.
    assert routing.lru_hits(needs, 4) == routing.belady_hits(needs, 4) == 4


def test_belady_is_never_below_lru(routing: ModuleType) -> None:
    rng = np.random.default_rng(0)
    for slots in (3, 5, 8, 13):
        needs = [[int(e) for e in rng.choice(16, size=3, replace=False)] for _ in range(200)]
        assert routing.belady_hits(needs, slots) >= routing.lru_hits(needs, slots)


def test_too_few_slots_are_refused(routing: ModuleType) -> None:
    with pytest.raises(ValueError, match="at least the experts of one position=2, got 1"):
        routing.lru_hits([[0, 1]], 1)


def test_layer_stats_of_a_hand_worked_case(routing: ModuleType) -> None:
    # One layer, four experts, top-2. Overlaps: {0,1}->{0,2} one of two, {0,2}->{0,2} two of two. Expert 0: 3 of 6.
    (stats,) = routing.layer_stats([np.array([[[0, 1]], [[0, 2]], [[0, 2]]])], 4)
    assert (stats.used, stats.dead, stats.overlap, stats.max_share) == (3, 1, 0.75, 0.5)
    shares = np.array([3, 1, 2]) / 6
    assert stats.entropy == pytest.approx(-(shares * np.log(shares)).sum() / np.log(4))
