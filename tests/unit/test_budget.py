"""Hand-worked plans: a model of 2 layers x 4 experts, top-2, with round sizes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmoe.profiles import budget as b
from seqmoe.profiles.budget import (
    budget_for_slots,
    effective_budget,
    plan_memory,
)
from seqmoe.profiles.errors import BudgetError
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.machine import MemoryFacts
from seqmoe.profiles.spec import ModelSpec

MIB = 1 << 20
SPEC = ModelSpec(
    name="tiny", model_type="qwen3_moe", digest="d", num_layers=2, num_experts=4, top_k=2, hidden_size=1024,
    record_bytes=10 * MIB - 4096, slot_bytes=10 * MIB, dense_bytes=100 * MIB, kv_bytes_per_token=1028, state_bytes=0,
    dtype="bfloat16", max_context=4096, vocab_size=0,
)  # fmt: skip
KNOBS = Knobs(queue_depth=8, read_chunk_bytes=1 * MIB, direct_io=False)


def plan(budget_mib, knobs=KNOBS, context=1024, batch=1, spec=SPEC):
    return plan_memory(budget_mib * MIB, spec, context, batch, knobs, 300 * MIB)


def test_every_part_by_hand():
    found = plan(600)
    assert found.kv_bytes == 1024 * 1024 + 4096
    assert plan(600, KNOBS.replace(direct_io=True)).read_buffer_bytes == 0  # straight into the slots
    assert (
        found.activation_bytes == 512 * 1024 * 4 * 14
    )  # pieces of 512 tokens: 12 hidden-sized tensors and 2 expert results in float32
    assert found.read_buffer_bytes == 8 * MIB
    assert found.margin_bytes == 48 * MIB  # more than 2% of 600 MiB
    # 600 - 300 - 100 - 1.004 - 28 - 8 - 48 = 114.996 MiB: all 8 experts of 10 MiB fit
    assert (found.slots, found.pool_bytes, found.residency) == (8, 80 * MIB, 1.0)
    assert plan(566).slots == 8  # 80.996
    assert plan(565).slots == 7  # 79.996
    assert plan(515).slots == 2  # 29.996
    assert sum(
        v for k, v in found.to_dict().items() if k.endswith("_bytes") and k not in ("budget_bytes", "total_bytes")
    ) == (found.total_bytes)


def test_too_small_names_the_smallest_that_works():
    with pytest.raises(BudgetError, match="the smallest that works is 518MiB") as caught:
        plan(505)
    assert caught.value.exit_code == 4
    assert plan(506).slots == 2
    later = plan_memory(518 * MIB, SPEC, 1024, 1, KNOBS, 312 * MIB)  # a process that came out 12 MiB larger
    assert later.slots == 2


def test_sliding_windows_are_planned_as_the_captured_step_keeps_them():
    """2048 positions of a token's 512 bytes in those layers; the prompt cannot go in pieces: 2048 tokens at once."""
    spec = replace(SPEC, state_bytes=65536, window_bytes_per_token=512)
    found = plan(900, context=2048, spec=spec)
    assert found.kv_bytes == 2048 * (1028 + 512) + 65536
    assert found.activation_bytes == 2048 * 1024 * 4 * 14
    assert budget_for_slots(spec, 2, 2048, 1, KNOBS, 300 * MIB) == smallest_that_fits(spec, 2048)


def smallest_that_fits(spec, context):
    budget = next(mib for mib in range(500, 2000) if fits(mib, context, spec))
    return budget * MIB


def fits(budget_mib, context, spec):
    try:
        return plan(budget_mib, context=context, spec=spec).slots >= 2
    except BudgetError:
        return False


def test_the_kernels_working_memory_is_planned():
    spec = replace(SPEC, kernel_bytes=5 * MIB, kernel_bytes_per_token=20_000)
    assert plan(700, spec=spec).activation_bytes == 512 * (1024 * 4 * 12 + 20_000) + 5 * MIB


@given(st.integers(1, 8192), st.integers(1, 4), st.sampled_from([1 << 20, 4 << 20]), st.integers(2, 8))
def test_the_smallest_named_works_and_one_less_does_not(context, batch, chunk, slots):
    knobs = Knobs(read_chunk_bytes=chunk)
    need = budget_for_slots(SPEC, slots, context, batch, knobs, 300 * MIB)
    assert plan(need // MIB, knobs, context, batch).slots >= slots
    with pytest.raises(BudgetError):
        plan(need // MIB - 1, knobs.replace(slots=slots), context, batch)


@given(st.integers(506, 200_000))
def test_a_plan_never_exceeds_its_budget(budget_mib):
    found = plan(budget_mib)
    assert found.total_bytes <= budget_mib * MIB
    assert 2 <= found.slots <= 8


def test_asked_slots_are_kept_or_refused():
    assert plan(600, KNOBS.replace(slots=3)).slots == 3
    assert plan(600, KNOBS.replace(slots=99)).slots == 8  # more than there are experts
    with pytest.raises(BudgetError, match="8 slots do not fit .* at most 7 do; 8 slots need 566MiB"):
        plan(565, KNOBS.replace(slots=8))
    with pytest.raises(BudgetError, match="at least top_k=2"):
        plan(600, KNOBS.replace(slots=1))


def test_context_and_batch_cost_slots():
    assert plan(566, context=4096).slots == plan(566).slots - 1  # 3 MiB of cache
    assert plan(700, batch=4).kv_bytes == 4 * plan(600).kv_bytes


def facts(ram=8000, cgroup=None, address=None, total=16000):
    mib = [None if value is None else value * MIB for value in (total, ram, cgroup, cgroup, address)]
    return MemoryFacts(mib[0], mib[1], mib[2], mib[3], "/group", None, None, mib[4], 0)


def test_the_least_bound_counts_and_is_named():
    assert effective_budget(500 * MIB, facts()).bound_by == "asked"
    tight = effective_budget(6000 * MIB, facts(cgroup=2000))
    assert (tight.budget_bytes, tight.bound_by) == (2000 * MIB, "cgroup")
    assert "/group" in tight.explanation and "5.86 GiB asked" in tight.explanation
    assert effective_budget(9000 * MIB, facts(cgroup=8500)).bound_by == "ram"
    assert effective_budget(9000 * MIB, facts(address=100)).bound_by == "address space"


def test_without_a_wish_ram_keeps_a_reserve_and_a_cgroup_does_not():
    assert effective_budget(None, facts()).budget_bytes == (8000 - 1600) * MIB
    assert effective_budget(None, facts(ram=100)).budget_bytes == 0
    assert effective_budget(None, facts(cgroup=2000)).budget_bytes == 2000 * MIB
    assert b.RESERVE_BYTES == 512 * MIB
