"""The experts of one MoE layer on the CPU, computed in place from wherever their bytes lie: no copy of the weights.

Decode and small groups of tokens go through `layer.py`'s kernels, which read each weight once for all tokens that share
the expert. In a layer of more than `LARGE_GROUP` tokens, an expert with more than that many is a matrix product of
torch's, weights converted block by block. The way an expert goes depends on these two numbers alone, and its tokens are
always computed together, so a result does not depend on slots, residency, or the rounds a layer takes. Rounding is that
of Transformers' experts: both projections, activation and gating are rounded to the model's dtype. The sum over a
token's experts is in float32 and in the router's order, as in Transformers' `batched_mm`.
"""

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from seqmoe.runtime.kernels import layer, loops
from seqmoe.runtime.kernels.emit import BF16, BLOCK, F32, ITEM_BYTES
from seqmoe.runtime.kernels.large import LargeGroups, fast_bfloat16
from seqmoe.runtime.kernels.openmp import find_openmp
from seqmoe.runtime.kernels.plan import KINDS, LayoutLike, Plan, Segment, make_plan
from seqmoe.runtime.kernels.team import parallel_address

# Tokens of one expert up to which the kernels are at least as fast as torch's product (measured; with AVX2, and guessed where
# torch multiplies bfloat16 itself).
LARGE_GROUP = 32 if fast_bfloat16() else 256
FEW_ROWS = 8  # of one expert: the module's own gate is called for each alone
_MAX_PLACES = 2048  # most pairs computed in one call of the kernels, and
_MAX_SCRATCH_BYTES = 32 << 20  # most scratch memory for their rows
_CALL = struct.Struct("8q")
_RUN_ALL = layer.DO_GROUP | layer.DO_PREPARE | layer.DO_UP | layer.DO_DOWN | layer.DO_SUM


class _Scratch(threading.local):
    """Buffers that grow and are kept, shared by all layers of a Python thread."""

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}
        self.token = object()  # another one whenever a buffer has moved

    def address(self, name: str, nbytes: int) -> int:
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self.buffers[name] = torch.empty(-(-nbytes // 4096) * 4096, dtype=torch.uint8)
            self.token = object()
        return buffer.data_ptr()


_scratch = _Scratch()


def _padded(count: int) -> int:
    return -(-count // BLOCK) * BLOCK


class ExpertsCompute:
    """Computes one layer's experts. Layers share compiled code and scratch memory."""

    def __init__(
        self, layout: LayoutLike, module: torch.nn.Module, dtype: torch.dtype, threads: int | None = None
    ) -> None:
        """`module`: Transformers' experts module (its weights may be on the meta device). `threads`: by default as many
        as torch uses; with another number, OpenMP ends and starts threads at every change between the two.

        CheckpointError, naming what, if the module or the layout cannot be computed.
        """
        self.module, self.dtype = module, dtype
        self.plan = make_plan(layout, module, dtype)
        self.num_threads = max(1, threads or torch.get_num_threads()) if find_openmp().available else 1
        self.places = _places(self.plan)
        self.fused = self.plan.activation is not None
        self.large = LargeGroups(self.plan, module, dtype)
        self._args = _Args(self.plan, self.num_threads, self.places)

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, addresses: NDArray[np.int64]
    ) -> torch.Tensor:
        """hidden [T, H], index int64 [T, k], weights [T, k], addresses int64 [E, views] -> [T, H] in hidden's dtype.

        Row e of `addresses` holds where each view of expert e lies; it is read only if e is in `index`. Ids outside
        [0, E) contribute nothing, as in Transformers.
        """
        tokens, k = index.shape
        at_once = tokens <= LARGE_GROUP and tokens * k <= self.places and not self.plan.post_norm
        if at_once and self.fused and hidden.is_contiguous() and index.is_contiguous() and weights.is_contiguous():
            # The way of decode, kept short: what is below does the same.
            assert (
                hidden.dtype is self.dtype and index.dtype is torch.int64 and hidden.shape[1] == self.plan.hidden_size
            )
            if weights.dtype in KINDS:
                return self._args.run_fused(hidden, index, weights, addresses, tokens, k)
        job = ExpertsJob(self, hidden, index, weights)
        if at_once:
            return job.run_at_once(addresses)
        job.group()
        job.add(job.active, addresses)
        return job.finish()

    def begin(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> "ExpertsJob":
        """The same in rounds: `add` every chosen expert once, in any order, then `finish`.

        A Python thread has one job at a time: the next one, of any layer, takes over its scratch memory.
        """
        job = ExpertsJob(self, hidden, index, weights)
        job.group()
        return job


class ExpertsJob:
    """One layer's computation in rounds; `active` are the experts that it needs, ascending."""

    def __init__(
        self, compute: ExpertsCompute, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> None:
        plan = compute.plan
        assert hidden.dtype == compute.dtype, f"hidden states are {hidden.dtype}, the experts {compute.dtype}"
        assert index.dtype == torch.int64 and hidden.shape[1] == plan.hidden_size
        if weights.dtype not in KINDS:
            weights = weights.float()
        self.compute, self.tokens, self.k = compute, index.shape[0], index.shape[1]
        self.pairs = self.tokens * self.k
        self.hidden, self.index, self.weights = hidden.contiguous(), index.contiguous(), weights.contiguous()
        self.out = torch.empty_like(self.hidden)
        self.args = compute._args
        self.args.begin(self.pairs, self.k, self.weights.dtype)
        self.active: list[int] = []
        self._prepared = False
        self._left = 0

    def run_at_once(self, addresses: NDArray[np.int64]) -> torch.Tensor:
        """All experts in one call, or two around the module's own gate."""
        if self.compute.fused:
            self.args.run(self, _RUN_ALL, addresses)
        else:
            self.args.run(self, layer.DO_GROUP | layer.DO_PREPARE | layer.DO_RAW, addresses)
            self._down_after_gate(self.pairs, addresses, layer.DO_SUM)
        return self.out

    def group(self) -> None:
        """Find out which experts are needed, and by which tokens."""
        self.args.run(self, layer.DO_GROUP, None)
        self.active = self.args.active[: self.args.num_active].tolist()
        self.starts: list[int] = self.args.starts[: self.compute.plan.num_experts + 1].tolist()
        self._left = self.starts[-1]

    def add(self, experts: Sequence[int], addresses: NDArray[np.int64]) -> None:
        """Compute some of the experts, whose rows of `addresses` are valid until this returns. Not chosen ones are skipped."""
        batch: list[int] = []
        pairs = 0
        for expert in experts:
            count = self.starts[expert + 1] - self.starts[expert]
            if count == 0:
                continue
            self._left -= count
            if self.tokens > LARGE_GROUP and count > LARGE_GROUP:
                self._add_large(expert, addresses)
                continue
            if batch and pairs + count > self.compute.places:
                self._add_small(batch, pairs, addresses)
                batch, pairs = [], 0
            batch.append(expert)
            pairs += count
        if batch:
            self._add_small(batch, pairs, addresses)

    def finish(self) -> torch.Tensor:
        """[T, H]: the weighted sum of each token's experts."""
        assert self._left == 0, f"{self._left} pairs of a token and an expert were not computed, or some twice"
        self.args.run(self, layer.DO_SUM, None)
        return self.out

    def _add_small(self, experts: list[int], pairs: int, addresses: NDArray[np.int64]) -> None:
        self.args.set_active(experts)
        prepare = 0 if self._prepared else layer.DO_PREPARE
        self._prepared = True
        if self.compute.fused:
            self.args.run(self, prepare | layer.DO_UP | layer.DO_DOWN, addresses)
        else:
            self.args.run(self, prepare | layer.DO_RAW, addresses)
            self._down_after_gate(pairs, addresses, 0)
        if self.compute.plan.post_norm:
            rows = torch.cat([self._pairs_of(expert) for expert in experts])
            y = self.args.y(self.pairs)
            y[rows] = self._post_norm(y[rows])

    def _down_after_gate(self, places: int, addresses: NDArray[np.int64], flags: int) -> None:
        """The module's own function on the up-projection's results, then the down-projection."""
        plan = self.compute.plan
        projected = self.args.projected(places)
        # torch computes the last few elements of a tensor, and the ends of its threads' shares, by other instructions
        # than the rest, with other last bits. So an expert's tokens go together, which they are in every mode; a few go
        # one by one, which makes them independent of each other as well.
        counts = self.args.counts()
        parts = projected[: sum(counts)].split(counts) if counts else [projected[:0]]
        rows = [self._gate(row) for part in parts for row in (part.split(1) if len(part) <= FEW_ROWS else [part])]
        gated = torch.cat(rows)
        places = len(gated)
        assert gated.dtype == self.compute.dtype and gated.shape == (places, plan.intermediate_size)
        self.args.run(self, layer.DO_DOWN | layer.DO_DOWN_INPUT | flags, addresses, gated)

    def _post_norm(self, rows: torch.Tensor) -> torch.Tensor:
        module: Any = self.compute.module
        return module.post_expert_norm(rows)

    def _gate(self, projected: torch.Tensor) -> torch.Tensor:
        module: Any = self.compute.module
        return module._apply_gate(projected) if self.compute.plan.gated else module.act_fn(projected)

    def _pairs_of(self, expert: int) -> torch.Tensor:
        return torch.from_numpy(self.args.order[self.starts[expert] : self.starts[expert + 1]])

    def _add_large(self, expert: int, addresses: NDArray[np.int64]) -> None:
        rows = self._pairs_of(expert)
        result = self.compute.large.compute(self.hidden[rows // self.k], addresses[expert])
        if self.compute.plan.post_norm:
            result = self._post_norm(result)
        self.args.y(self.pairs)[rows] = result


def _place_bytes(plan: Plan) -> int:
    """Scratch memory for one pair's rows."""
    own = (_padded(plan.hidden_size) + _padded(plan.intermediate_size)) * 4 + 24
    return own if plan.activation is not None else own + plan.up_size * ITEM_BYTES[plan.kind]


def _places(plan: Plan) -> int:
    return max(LARGE_GROUP, min(_MAX_PLACES, _MAX_SCRATCH_BYTES // _place_bytes(plan)))


def workspace_bytes(plan: Plan, tokens: int, k: int, threads: int) -> int:
    """Memory that computing a layer of `tokens` tokens takes beside weights, input and output, in bytes (an upper bound)."""
    pairs = tokens * k
    places = min(_places(plan), pairs)
    rows = places * _place_bytes(plan) + pairs * (_padded(plan.hidden_size) * ITEM_BYTES[plan.kind] + 24)
    large = LargeGroups.workspace_bytes(plan, tokens) if tokens > LARGE_GROUP else 0
    return rows + large + threads * layer.TMP_BYTES + tokens * (k + BLOCK) * 4


class _Args:
    """The kernels' array of arguments, the tables that lie beside it, and the calls."""

    def __init__(self, plan: Plan, threads: int, places: int) -> None:
        self.plan, self.threads, self.places = plan, threads, places
        run, worker, self._owner = layer.compiled()
        self._run = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(run)  # releases the GIL
        memory = np.zeros(layer.NUM_ARGS + 8, dtype=np.int64)
        skip = -memory.ctypes.data % 64 // 8  # counters must not share cache lines with anything else
        self.values = memory[skip : skip + layer.NUM_ARGS]
        self._address = self.values.ctypes.data
        self.active = np.zeros(plan.num_experts, dtype=np.int64)
        self.starts = np.zeros(plan.num_experts + 1, dtype=np.int64)
        self._local = np.zeros(plan.num_experts + 1, dtype=np.int64)
        self.order = np.zeros(0, dtype=np.int64)
        self._token: object = None
        self._capacity = 0  # pairs
        self._weights_dtype: torch.dtype | None = None
        self._weights_kind = 0
        self._k = 0
        self._table: NDArray[np.int64] | None = None
        self._table_at = 0
        values: Any = self.values  # numpy arrays are buffers, whatever their type hints say
        self._pack = functools.partial(_CALL.pack_into, values, 8 * layer.A_FLAGS)
        self._fill(worker)

    def _fill(self, worker: int) -> None:
        """What never changes."""
        plan, v = self.plan, self.values
        v[layer.A_E], v[layer.A_H], v[layer.A_I] = plan.num_experts, plan.hidden_size, plan.intermediate_size
        v[layer.A_KIND], v[layer.A_WEIGHT_KIND], v[layer.A_NUM_VIEWS] = plan.kind, plan.weight_kind, plan.num_views
        v[layer.A_GATED] = int(plan.up is not None)
        for place, segment in ((layer.A_GATE, plan.gate), (layer.A_UP, plan.up), (layer.A_DOWN, plan.down)):
            v[place : place + layer.SEGMENT_FIELDS] = _segment_values(segment)
        v[layer.A_X_STRIDE], v[layer.A_HB_STRIDE] = _padded(plan.hidden_size) * 4, _padded(plan.intermediate_size) * 4
        v[layer.A_Y_STRIDE] = _padded(plan.hidden_size) * ITEM_BYTES[plan.kind]
        v[layer.A_PROJ_STRIDE] = plan.up_size * ITEM_BYTES[plan.kind]
        v[layer.A_GATED_STRIDE] = plan.intermediate_size * ITEM_BYTES[plan.kind]
        v[layer.A_STARTS], v[layer.A_ACTIVE] = self.starts.ctypes.data, self.active.ctypes.data
        v[layer.A_LOCAL] = self._local.ctypes.data
        v[layer.A_THREADS], v[layer.A_WORKER] = self.threads, worker
        v[layer.A_PARALLEL] = parallel_address(self.threads)
        for place, address in zip(*self._functions(), strict=True):
            v[place] = address

    def _functions(self) -> tuple[list[int], list[int]]:
        plan, weight_kind = self.plan, self.plan.weight_kind
        pair_x = int(weight_kind == BF16 and not plan.gate.transposed)
        pair_h = int(weight_kind == BF16 and not plan.down.transposed)
        wanted: dict[int, loops.Name] = {
            layer.F_PREPARE_X: ("prepare", plan.kind, pair_x),
            layer.F_PREPARE_H: ("prepare", plan.kind, pair_h),
            layer.F_STORE: ("store", plan.kind),
        }
        if not (plan.gate.transposed and plan.down.transposed):
            places = (layer.F_DOT_41, layer.F_DOT_11, layer.F_DOT_22, layer.F_DOT_12, layer.F_DOT_14)
            for place, (rows, tokens) in zip(places, loops.DOT_SHAPES, strict=True):
                wanted[place] = ("dot", weight_kind, rows, tokens)
        if plan.gate.transposed or plan.down.transposed:
            wanted[layer.F_OUTER_8], wanted[layer.F_OUTER_1] = ("outer", weight_kind, 8), ("outer", weight_kind, 1)
            wanted[layer.F_OUTER_TAIL], wanted[layer.F_INTERLEAVE] = ("outer_tail", weight_kind), ("interleave",)
        biases = {s.bias.kind for s in (plan.gate, plan.up, plan.down) if s is not None and s.bias is not None}
        if biases:
            assert len(biases) == 1, "make_plan lets biases of one type through"
            wanted[layer.F_BIAS], wanted[layer.F_PREPARE_BIAS] = ("bias", plan.kind), ("prepare", biases.pop(), 0)
        if plan.activation is not None:
            wanted[layer.F_GATE] = ("gate", plan.kind, plan.activation, int(plan.up is not None))
        return list(wanted), loops.addresses(wanted.values())

    def begin(self, pairs: int, k: int, weights_dtype: torch.dtype) -> None:
        """Make room for a job and note what is the same in all its calls."""
        if weights_dtype is not self._weights_dtype:
            self._weights_dtype = weights_dtype
            self._weights_kind = kind = KINDS[weights_dtype]
            rounds = int(kind == self.plan.kind and kind != F32)
            names: list[loops.Name] = [("weigh", self.plan.kind, rounds), ("prepare", kind, 0)]
            self.values[layer.F_WEIGH], self.values[layer.F_PREPARE_WEIGHTS] = loops.addresses(names)
        if pairs > self._capacity or self._token is not _scratch.token:
            self._reserve(pairs)
        if k != self._k:
            self._k = self.values[layer.A_K] = k

    def run_fused(
        self,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        addresses: NDArray[np.int64],
        tokens: int,
        k: int,
    ) -> torch.Tensor:
        """A whole layer in one call."""
        self.begin(tokens * k, k, weights.dtype)
        if addresses is not self._table:  # a layer's table stays the same array
            interface: Any = addresses.__array_interface__
            self._table, self._table_at = addresses, interface["data"][0]
        out = torch.empty_like(hidden)
        self._pack(
            _RUN_ALL, tokens, hidden.data_ptr(), index.data_ptr(), weights.data_ptr(), self._weights_kind, self._table_at,
            out.data_ptr(),
        )  # fmt: skip
        self._run(self._address)
        return out

    def _reserve(self, pairs: int) -> None:
        plan, v = self.plan, self.values
        pairs = max(pairs, self._capacity if self._token is _scratch.token else 0)
        places = min(self.places, max(pairs, 1))
        sizes = {
            layer.A_ORDER: ("order", pairs * 8),
            layer.A_SPARE: ("spare", pairs * 8),
            layer.A_Y: ("y", pairs * int(v[layer.A_Y_STRIDE])),
            layer.A_WEIGHTS_FLOAT: ("weights", pairs * (BLOCK + 1) * 4),
            layer.A_X: ("x", places * int(v[layer.A_X_STRIDE])),
            layer.A_X_ROWS: ("x_rows", places * 8),
            layer.A_HB: ("hidden", places * int(v[layer.A_HB_STRIDE])),
            layer.A_HB_ROWS: ("hidden_rows", places * 8),
            layer.A_Y_ROWS: ("y_rows", places * 8),
            layer.A_TMP: ("tmp", self.threads * layer.TMP_BYTES),
        }
        if plan.activation is None:
            sizes[layer.A_PROJ] = ("projected", places * plan.up_size * ITEM_BYTES[plan.kind])
        for place, (name, nbytes) in sizes.items():
            v[place] = _scratch.address(name, max(nbytes, 64))
        self.order = _scratch.buffers["order"].numpy().view(np.int64)
        self._token, self._capacity = _scratch.token, pairs

    def run(
        self, job: ExpertsJob, flags: int, addresses: NDArray[np.int64] | None, gated: torch.Tensor | None = None
    ) -> None:
        """One call of the kernels on the calling thread and its helpers."""
        at = 0
        if addresses is not None:
            interface: Any = addresses.__array_interface__
            at = interface["data"][0]
        if gated is not None:
            self.values[layer.A_GATED_ROWS] = gated.data_ptr()
        self._pack(
            flags, job.tokens, job.hidden.data_ptr(), job.index.data_ptr(), job.weights.data_ptr(), self._weights_kind, at,
            job.out.data_ptr(),
        )  # fmt: skip
        self._run(self._address)

    def counts(self) -> list[int]:
        """Pairs of each expert of the last call, in the order of their places."""
        experts = self.active[: self.num_active]
        return (self.starts[experts + 1] - self.starts[experts]).tolist()

    @property
    def num_active(self) -> int:
        return int(self.values[layer.A_NUM_ACTIVE])

    def set_active(self, experts: list[int]) -> None:
        self.active[: len(experts)] = experts
        self.values[layer.A_NUM_ACTIVE] = len(experts)

    def projected(self, places: int) -> torch.Tensor:
        """[places, up_size]: the up-projection's results of the last call."""
        shape = (places, self.plan.up_size)
        dtype = _dtype(self.plan.kind)
        nbytes = places * self.plan.up_size * dtype.itemsize
        return _scratch.buffers["projected"][:nbytes].view(dtype).view(shape)

    def y(self, pairs: int) -> torch.Tensor:
        """[pairs, H]: each pair's result, not yet weighted."""
        dtype, width = _dtype(self.plan.kind), _padded(self.plan.hidden_size)
        buffer = _scratch.buffers["y"][: pairs * width * dtype.itemsize]
        return buffer.view(dtype).view(pairs, width)[:, : self.plan.hidden_size]


def _dtype(kind: int) -> torch.dtype:
    return next(dtype for dtype, k in KINDS.items() if k == kind)


def _segment_values(segment: Segment | None) -> list[int]:
    if segment is None:
        return [0] * layer.SEGMENT_FIELDS
    bias = segment.bias
    where = [bias.view, bias.offset, bias.kind] if bias is not None else [-1, 0, 0]
    return [segment.rows, segment.view, segment.offset, int(segment.transposed), segment.stride, *where]
