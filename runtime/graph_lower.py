"""From a recorded step to a program of the decode machine: what is constant is dropped, views cost nothing, the rest
becomes instructions (`graph_ops`) or, where the machine has none, plain aten calls on views of the same memory.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from seqmoe.runtime.graph_fuse import fuse_norms, refs_in
from seqmoe.runtime.graph_ops import HANDLERS, Instruction, NoInstruction, Operand
from seqmoe.runtime.graph_tape import GraphUnsupported, Node, Ref, Tape
from seqmoe.runtime.kernels import fused_isa as isa
from seqmoe.runtime.kernels.fused_ops import CHUNK
from seqmoe.runtime.kernels.fused_vm import JOB_FIELDS, TABLE_FIELDS, operation, run_program, work_of
from seqmoe.runtime.kernels.team import at_work, parallel_address

_ALIGN = 64
_THREAD_TRIALS = 6
_DTYPES = {torch.float32: isa.F32, torch.bfloat16: isa.BF16, torch.int64: isa.I64, torch.bool: isa.U8,
           torch.uint8: isa.U8, torch.int32: isa.I32}  # fmt: skip
# Calls whose result is random or depends on more than their arguments: never replayed.
_IMPURE = ("rand", "bernoulli", "dropout", "multinomial", "nonzero", "unique", "masked_select")


def _round_up(number: int) -> int:
    return -(-number // _ALIGN) * _ALIGN


def inputs_of(node: Node) -> list[Ref]:
    """The tensors that a node reads."""
    return refs_in((node.args, tuple(node.kwargs.values())))


class ExpertsCall(Protocol):
    """Runs the chosen experts of one MoE layer: hidden [tokens, H], index int64 and weights [tokens, k] -> [tokens, H]."""

    def __call__(
        self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor: ...


@dataclass
class ExpertsStep:
    """A call out of the program into the experts of one layer; its result's address goes into `slot` of the run array."""

    layer: int
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    slot: int


@dataclass
class AtenStep:
    """A call that the machine has no instruction for: `func` on views of the program's memory, results copied back."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[torch.Tensor | None, ...]
    name: str

    def __call__(self) -> None:
        result = self.func(*self.args, **self.kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        for out, value in zip(self.outs, results, strict=True):
            if out is not None:
                out.copy_(value)


@dataclass(frozen=True)
class Stretch:
    """Instructions first..last-1, run in one call."""

    first: int
    last: int


@dataclass
class Program:
    """A decode step, ready to run."""

    code: np.ndarray  # int64 [instructions, WIDTH]
    steps: list[Stretch | ExpertsStep | AtenStep]
    run: np.ndarray  # int64, see `fused_isa`
    logits: torch.Tensor
    alive: list[Any] = field(default_factory=list)  # everything whose address is in `code`

    def __post_init__(self) -> None:
        # `ndarray.ctypes.data` takes a microsecond
        self._code_at, self._run_at = self.code.ctypes.data, self.run.ctypes.data

    def execute(self, experts_call: ExpertsCall | None) -> None:
        """Runs the step once, on whatever its inputs hold now; `logits` holds the result."""
        code_at, run_at, run = self._code_at, self._run_at, self.run
        kept: Any = None
        for item in self.steps:
            if isinstance(item, Stretch):
                run_program(code_at, item.first, item.last, run_at)
            elif isinstance(item, ExpertsStep):
                assert experts_call is not None
                out = experts_call(item.layer, *item.arguments)
                if not out.is_contiguous() or out.dtype is not item.dtype or out.shape != item.shape:
                    out = out.to(item.dtype).reshape(item.shape).contiguous()
                run[item.slot] = out.data_ptr()
                kept = out  # read by the next stretch
            else:
                item()
        del kept

    def choose_threads(self) -> None:
        """Keeps those linear layers on one thread for which waking the others did not pay when tried, here and now."""
        shapes: dict[tuple[int, ...], list[int]] = {}
        for place in np.flatnonzero((self.code[:, isa.OP] == isa.OP_LINEAR) & (self.code[:, isa.AUX] != 0)):
            row = self.code[place]
            key = (*row[isa.SIZES : isa.SIZES + 3].tolist(), int(row[isa.IN1 + 1]))
            shapes.setdefault(key, []).append(int(place))
        for places in shapes.values():
            took_us = [float("inf"), float("inf")]
            with at_work():
                for trial in range(2 * _THREAD_TRIALS):
                    # Other layers' weights each time, so that they come from memory as they do in a step.
                    here, parallel = places[trial % len(places)], trial // 2 % 2
                    self.code[here, isa.AUX] = parallel
                    started = time.perf_counter()
                    run_program(self._code_at, here, here + 1, self._run_at)
                    took_us[parallel] = min(took_us[parallel], (time.perf_counter() - started) * 1e6)
            self.code[places, isa.AUX] = int(took_us[1] < took_us[0])

    @property
    def aten_calls(self) -> list[str]:
        """Names of the calls that stayed plain aten."""
        return [step.name for step in self.steps if isinstance(step, AtenStep)]


class Lowering:
    """One use: `Lowering(tape, ...).program()`."""

    def __init__(
        self,
        tape: Tape,
        tokens: Ref,
        positions: Ref,
        logits: Ref,
        caches: dict[int, tuple[torch.Tensor, torch.Tensor]],
        batch: int,
    ) -> None:
        self.tape, self.logits, self.caches, self.batch = tape, logits, caches, batch
        self.inputs = {tokens.storage, positions.storage}
        self.dynamic = self._find_dynamic()
        self.casts = self._find_casts()
        self.instructions: list[Instruction | tuple[str, Node]] = []
        self.longest_row = 64
        self.linear_inputs = 64

    # -- what has to run ------------------------------------------------------------------------------------------

    def _find_dynamic(self) -> set[int]:
        """Storages whose contents differ from step to step."""
        dynamic = set(self.inputs)
        while True:
            before = len(dynamic)
            for node in self.tape.nodes:
                special = node.func is None
                if special or any(ref.storage in dynamic for ref in inputs_of(node)):
                    dynamic.update(node.fresh)
                    dynamic.update(node.writes)
            if len(dynamic) == before:
                return dynamic

    def _find_casts(self) -> dict[int, Ref]:
        """Storages that hold a constant widened to float32, and that constant: a linear layer reads it directly."""
        casts = {}
        for node in self.tape.nodes:
            if node.name in ("aten.to.dtype", "aten._to_copy.default", "aten.float.default") and node.fresh:
                source, out = node.args[0], node.outs[0]
                if source.storage not in self.dynamic and (source.dtype, out.dtype) == (torch.bfloat16, torch.float32):
                    casts[out.storage] = source
        return casts

    def live_nodes(self) -> list[Node]:
        """The nodes that a step must execute, in order."""
        runs = []
        for node in self.tape.nodes:
            touched = set(node.fresh) | set(node.writes)
            if node.func is None or touched & self.dynamic:
                runs.append(node)
        live = {self.logits.storage} | {key for key in self.dynamic if key not in self.tape.created}
        # A call that writes keeps everything it reads alive, so go backwards until nothing changes (loops through state).
        while True:
            before = len(live)
            for node in reversed(runs):
                if node.name in ("experts", "append") or (set(node.fresh) | set(node.writes)) & live:
                    live.update(ref.storage for ref in inputs_of(node))
                    live.update(node.fresh)
            if len(live) == before:
                break
        return [
            node for node in runs if node.name in ("experts", "append") or (set(node.fresh) | set(node.writes)) & live
        ]

    # -- building -------------------------------------------------------------------------------------------------

    def program(self) -> Program:
        """Lowers everything; GraphUnsupported for calls that cannot be replayed."""
        nodes = fuse_norms(self.live_nodes(), {self.logits.storage})
        plan: list[tuple[Node, list[Instruction] | None]] = []
        for node in nodes:
            for ref in inputs_of(node):
                if ref.storage in self.tape.guarded:
                    raise GraphUnsupported(
                        f"{node.name} reads {self.tape.guarded[ref.storage]} outside of the attention function"
                    )
            if any(word in node.name for word in _IMPURE):
                raise GraphUnsupported(f"{node.name} during decode")
            plan.append((node, self._lower(node)))
        self._allocate(nodes)

        steps: list[Stretch | ExpertsStep | AtenStep] = []
        code: list[np.ndarray] = []
        first = 0
        slots = isa.RUN_PADDING + self.batch

        def cut() -> None:
            nonlocal first
            if len(code) > first:
                steps.append(Stretch(first, len(code)))
            first = len(code)

        for node, instructions in plan:
            if node.name == "experts":
                cut()
                hidden, index, weights = (self.tensor(ref) for ref in node.args)
                out: Ref = node.outs[0]
                steps.append(ExpertsStep(node.kwargs["layer"], (hidden, index, weights), out.size, out.dtype, slots))
                copy = Instruction.elementwise(isa.E_COPY, out, [out])
                row = self._encode(copy)
                row[isa.SOURCE_SLOT] = slots + 1
                slots += 1
                code.append(row)
            elif instructions is None:
                cut()
                steps.append(self._aten(node))
            else:
                code.extend(self._encode(instruction) for instruction in instructions)
        cut()
        run = np.zeros(slots, np.int64)
        used = {ref.storage for node in nodes for ref in (*inputs_of(node), *refs_in(node.outs))}
        used |= {ref.storage for _, made in plan for one in made or () for ref in one.refs()} | {self.logits.storage}
        constants = [tensor for key, tensor in self.tape.storages.items() if key in used and key not in self.offsets]
        alive: list[Any] = [
            self.arena,
            constants,
            self.caches,
            self._work_space(run, {int(row[isa.OP]) for row in code}),
        ]
        return Program(np.array(code, np.int64).reshape(-1, isa.WIDTH), steps, run, self.tensor(self.logits), alive)

    def _work_space(self, run: np.ndarray, operations: set[int]) -> np.ndarray:
        """Scratch memory, room for each thread, what threads share and the table of operations, entered into `run`."""
        capacity = max((pair[0].shape[2] for pair in self.caches.values()), default=0)
        scratch = _round_up(4 * max(4 * CHUNK, 5 * self.longest_row, self.linear_inputs))
        room = _round_up(4 * (capacity + 4 * self.longest_row))
        threads = torch.get_num_threads()
        memory = np.zeros(scratch + room * threads + 8 * JOB_FIELDS + 8 * TABLE_FIELDS + _ALIGN, np.uint8)
        start = _round_up(memory.ctypes.data)
        run[isa.RUN_SCRATCH], run[isa.RUN_ROOM], run[isa.RUN_ROOM_BYTES] = start, start + scratch, room
        run[isa.RUN_JOB] = start + scratch + room * threads
        run[isa.RUN_TABLE] = run[isa.RUN_JOB] + 8 * JOB_FIELDS
        table = memory[int(run[isa.RUN_TABLE]) - memory.ctypes.data :][: 8 * TABLE_FIELDS].view(np.int64)
        for op in operations:
            table[op] = operation(op).address
            work = work_of(op)
            if work is not None:
                table[32 + op] = work.address
        run[isa.RUN_PARALLEL] = parallel_address(threads)
        run[isa.RUN_THREADS] = threads if run[isa.RUN_PARALLEL] else 1
        return memory

    def _lower(self, node: Node) -> list[Instruction] | None:
        if node.name == "experts":
            return []
        handler: Callable[[Node, Lowering], list[Instruction]] | None = HANDLERS.get(node.name)
        if handler is None:
            return None
        try:
            instructions = handler(node, self)
            for instruction in instructions:
                for operand in instruction.operands.values():
                    if isinstance(operand, Operand) and operand.ref is not None and operand.ref.dtype not in _DTYPES:
                        return None
                self.longest_row = max(self.longest_row, instruction.row)
                self.linear_inputs = max(self.linear_inputs, instruction.linear_inputs)
            return instructions
        except NoInstruction:
            if node.func is None:
                raise GraphUnsupported(f"the decode machine cannot express this model's {node.name}") from None
            return None

    def _aten(self, node: Node) -> AtenStep:
        def restore(value: Any) -> Any:
            if isinstance(value, Ref):
                return self.tensor(value)
            if isinstance(value, (tuple, list)):
                return [restore(item) for item in value]
            return value

        fresh = set(node.fresh)
        outs = tuple(self.tensor(ref) if isinstance(ref, Ref) and ref.storage in fresh else None for ref in node.outs)
        kwargs = {key: restore(value) for key, value in node.kwargs.items()}
        return AtenStep(node.func, tuple(restore(value) for value in node.args), kwargs, outs, node.name)

    # -- memory ---------------------------------------------------------------------------------------------------

    def _allocate(self, nodes: Sequence[Node]) -> None:
        """Places every storage that the step creates in one arena; two share a place where their lives do not overlap."""
        last_use: dict[int, int] = {}
        for place, node in enumerate(nodes):
            for key in (*(ref.storage for ref in inputs_of(node)), *node.fresh, *node.writes):
                last_use[key] = place
        last_use[self.logits.storage] = len(nodes)
        self.offsets: dict[int, int] = {}
        free: list[tuple[int, int]] = []  # (size, offset)
        end = 0
        dying: dict[int, list[tuple[int, int]]] = {}
        for place, node in enumerate(nodes):
            for key in node.fresh:
                size = max(_ALIGN, -(-self.tape.storages[key].numel() // _ALIGN) * _ALIGN)
                fitting = [hole for hole in free if hole[0] == size]
                if fitting:
                    hole = fitting[-1]
                    free.remove(hole)
                    offset = hole[1]
                else:
                    offset, end = end, end + size
                self.offsets[key] = offset
                dying.setdefault(last_use[key], []).append((size, offset))
            free.extend(dying.pop(place, ()))
        self.arena = torch.zeros(end + _ALIGN, dtype=torch.uint8)
        self.base = -(-self.arena.data_ptr() // _ALIGN) * _ALIGN - self.arena.data_ptr()

    def address(self, ref: Ref) -> int:
        """Absolute address of a tensor's first element."""
        inside = ref.offset * ref.dtype.itemsize
        if ref.storage in self.offsets:
            return self.arena.data_ptr() + self.base + self.offsets[ref.storage] + inside
        return self.tape.storages[ref.storage].data_ptr() + inside

    def tensor(self, ref: Ref) -> torch.Tensor:
        """The tensor itself, over the program's memory."""
        view = torch.empty(0, dtype=ref.dtype)
        if ref.storage in self.offsets:
            start = self.base + self.offsets[ref.storage]
            storage = self.arena.untyped_storage()
            return view.set_(storage, start // ref.dtype.itemsize + ref.offset, ref.size, ref.stride)
        return view.set_(self.tape.storages[ref.storage].untyped_storage(), ref.offset, ref.size, ref.stride)

    def _encode(self, instruction: Instruction) -> np.ndarray:
        row = np.zeros(isa.WIDTH, np.int64)
        for column, value in instruction.fields.items():
            row[column] = np.float64(value).view(np.int64) if isinstance(value, float) else value
        for column, operand in instruction.operands.items():
            if operand.ref is not None:
                row[column] = self.address(operand.ref)
                row[column + 1] = _DTYPES[operand.ref.dtype]
            elif operand.cache is not None:
                layer, which = operand.cache
                tensor = self.caches[layer][which]
                row[column], row[column + 1] = tensor.data_ptr(), _DTYPES[tensor.dtype]
            else:
                row[column], row[column + 1] = np.float64(operand.value).view(np.int64), isa.IMMEDIATE
            row[column + 2 : column + 6] = operand.strides
        for column, ref in instruction.addresses.items():
            row[column], row[column + 1] = self.address(ref), _DTYPES[ref.dtype]
        return row
