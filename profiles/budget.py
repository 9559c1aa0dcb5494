"""Where the memory goes, before any of it is taken: pure arithmetic from a budget to a number of slots.

The plan counts all that the process comes to hold: interpreter and libraries, dense weights, the pool of experts, the KV
cache and recurrent state for the asked context and batch, read buffers, activations and logits, and a margin.
"""

from dataclasses import dataclass

from seqmoe.profiles.errors import BudgetError
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.machine import MemoryFacts
from seqmoe.profiles.sizes import format_bytes
from seqmoe.profiles.spec import ModelSpec

MIB = 1 << 20
# Allocator waste, thread stacks, compiled kernels: this much and this share of the budget stay unplanned.
MARGIN_BYTES = 48 * MIB
MARGIN_SHARE = 0.02
# Left to the rest of the machine when the user names no budget: the larger of the two.
RESERVE_BYTES = 512 * MIB
RESERVE_SHARE = 0.10
# A prompt goes through the model in pieces of this many tokens, so that activations do not grow with it.
PREFILL_TOKENS = 512
# The resident set of a process that has only imported differs by a few MiB from one start to the next: the smallest
# budget that an error names must work when it is tried.
PROCESS_JITTER_BYTES = 12 * MIB


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part; `total_bytes` is their sum and never more than the budget."""

    budget_bytes: int
    slots: int
    total_experts: int
    pool_bytes: int
    dense_bytes: int
    kv_bytes: int  # KV cache and recurrent state, for the whole context and batch
    read_buffer_bytes: int
    interpreter_bytes: int
    activation_bytes: int
    margin_bytes: int
    total_bytes: int

    @property
    def residency(self) -> float:
        """Share of the model's experts that have a slot."""
        return self.slots / self.total_experts

    def to_dict(self) -> dict[str, int]:
        """Plain numbers, for JSON and profiles."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class EffectiveBudget:
    """The budget that counts, and which bound made it so: "asked", "cgroup", "ram", "address space"."""

    budget_bytes: int
    bound_by: str
    explanation: str  # one line for the user


def effective_budget(asked_bytes: int | None, memory: MemoryFacts) -> EffectiveBudget:
    """The least of `--memory`, the cgroup's room, available RAM and the address space limit.

    Without `asked_bytes`: what the machine leaves, less a reserve for everything else that runs here.
    """
    bounds = [(memory.ram_room_bytes, "ram", "the RAM that is available now")]
    if memory.cgroup_room_bytes is not None:
        bounds.append((memory.cgroup_room_bytes, "cgroup", f"the control group's limit ({memory.cgroup_path})"))
    if memory.address_room_bytes is not None:
        bounds.append((memory.address_room_bytes, "address space", "the address space limit (ulimit -v or -d)"))
    room, bound_by, words = min(bounds)
    if asked_bytes is None:
        # A cgroup was cut for this work, so all of it may be used; RAM is shared with everything else.
        reserve = max(RESERVE_BYTES, int(memory.ram_total_bytes * RESERVE_SHARE)) if bound_by == "ram" else 0
        budget = max(0, room - reserve)
        minus = f" less a reserve of {format_bytes(reserve)}" if reserve else ""
        return EffectiveBudget(budget, bound_by, f"{format_bytes(budget)}: {words}{minus}")
    if asked_bytes <= room:
        return EffectiveBudget(asked_bytes, "asked", f"{format_bytes(asked_bytes)}, as asked")
    return EffectiveBudget(
        room, bound_by, f"{format_bytes(room)}: {words}, less than the {format_bytes(asked_bytes)} asked"
    )


def min_slots(spec: ModelSpec) -> int:
    """The fewest slots that work: one token's experts of one layer (a layer that needs more runs in rounds)."""
    return min(spec.top_k, spec.total_experts)


def activation_bytes(spec: ModelSpec, tokens: int, context_tokens: int, batch: int) -> int:
    """Upper estimate of a forward pass's working memory for `tokens` at once in each of `batch` sequences.

    In float32: a dozen hidden-sized tensors, the mask that a padded batch needs, three copies of the last token's logits;
    and what the expert kernels take, at least one result for each (token, chosen expert) pair.
    """
    hidden = batch * tokens * spec.hidden_size * 4 * 12
    experts = batch * tokens * max(spec.kernel_bytes_per_token, spec.hidden_size * 4 * spec.top_k) + spec.kernel_bytes
    mask = batch * tokens * context_tokens if batch > 1 else 0
    return hidden + experts + mask + 3 * batch * spec.vocab_size * 4


def prefill_tokens(spec: ModelSpec, context_tokens: int) -> int:
    """Most tokens of a sequence in one forward pass."""
    return context_tokens if spec.whole_prefill else min(context_tokens, PREFILL_TOKENS)


def plan_memory(
    budget_bytes: int,
    spec: ModelSpec,
    context_tokens: int,
    batch: int,
    knobs: Knobs,
    process_bytes: int,
) -> MemoryPlan:
    """Slots that `budget_bytes` holds, all else paid. `process_bytes`: RSS of a process that has imported everything.

    `knobs.slots` is kept when it fits.
    Raises BudgetError that names the smallest budget that works.
    """
    parts = {
        "dense_bytes": spec.dense_bytes,
        "kv_bytes": batch * (context_tokens * (spec.kv_bytes_per_token + spec.window_bytes_per_token) + spec.state_bytes),
        # Direct reads land in their slots; others go through the page cache, which is dropped behind them.
        "read_buffer_bytes": 0 if knobs.direct_io else knobs.queue_depth * min(knobs.read_chunk_bytes, spec.slot_bytes),
        "interpreter_bytes": process_bytes,
        "activation_bytes": activation_bytes(spec, prefill_tokens(spec, context_tokens), context_tokens, batch),
    }
    fixed = sum(parts.values())
    margin = max(MARGIN_BYTES, int(budget_bytes * MARGIN_SHARE))
    fit = min(spec.total_experts, (budget_bytes - fixed - margin) // spec.slot_bytes)
    least = min_slots(spec)
    if fit < least:
        need = smallest_budget(fixed + least * spec.slot_bytes + PROCESS_JITTER_BYTES)
        raise BudgetError(
            f"a memory budget of {format_bytes(budget_bytes)} is too small for {spec.name}: the smallest that works is "
            f"{need // MIB}MiB (weights besides experts {format_bytes(spec.dense_bytes)}, process {format_bytes(process_bytes)}, "
            f"context of {context_tokens} tokens x {batch} {format_bytes(parts['kv_bytes'] + parts['activation_bytes'])}, "
            f"{least} experts {format_bytes(least * spec.slot_bytes)}, reads and margin {format_bytes(parts['read_buffer_bytes'] + margin)})"
        )
    slots = fit if knobs.slots is None else min(knobs.slots, spec.total_experts)
    if slots > fit:
        need = smallest_budget(fixed + slots * spec.slot_bytes)
        raise BudgetError(
            f"{slots} slots do not fit a memory budget of {format_bytes(budget_bytes)}: at most {fit} do; "
            f"{slots} slots need {need // MIB}MiB"
        )
    if slots < least:
        raise BudgetError(f"slots must be at least top_k={least} for {spec.name}, got {slots}")
    pool = slots * spec.slot_bytes
    return MemoryPlan(
        budget_bytes, slots, spec.total_experts, pool, margin_bytes=margin, total_bytes=fixed + pool + margin, **parts
    )


def smallest_budget(need_bytes: int) -> int:
    """The least budget, in whole MiB, that holds `need_bytes` and the margin that comes with that budget."""
    need = max(need_bytes + MARGIN_BYTES, int(need_bytes / (1 - MARGIN_SHARE)) + 1)
    return -(-need // MIB) * MIB


def budget_for_slots(
    spec: ModelSpec, slots: int, context_tokens: int, batch: int, knobs: Knobs, process_bytes: int
) -> int:
    """The least budget, in whole MiB, whose plan has at least `slots` slots."""
    probe = plan_memory(1 << 60, spec, context_tokens, batch, knobs.replace(slots=None), process_bytes)
    fixed = probe.total_bytes - probe.pool_bytes - probe.margin_bytes
    return smallest_budget(fixed + slots * spec.slot_bytes)
