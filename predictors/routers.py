"""Within the step: the coming layers' own routers applied early, and SpecPrefetch's adapters. Both need router inputs.

Loads without torch; training imports it. Shapes: L layers, E experts, H hidden, b batch, d layers ahead, r rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.psi import psi_numpy, softmax
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import CheckpointError, UsageError
from seqmoe.profiles.files import replacing

Floats = NDArray[np.float32]
FORMAT, VERSION = "seqmoe-adapters", 1


@dataclass(frozen=True, eq=False)
class Routers:
    """A model's routers: logits = weight[l] @ x + bias[l], where x is what the layer's norm, with scale norm[l], gives."""

    weight: Floats  # [L, E, H]
    bias: Floats | None = None  # [L, E]
    norm: Floats | None = None  # [L, H]: to read one layer's input as another's

    def __post_init__(self) -> None:
        shape = self.weight.shape
        if len(shape) != 3 or 0 in shape:
            raise UsageError(f"router weight has shape {list(shape)}, expected [layers, experts, hidden]")
        for name, array, expected in (("bias", self.bias, shape[:2]), ("norm", self.norm, (shape[0], shape[2]))):
            if array is not None and array.shape != expected:
                raise UsageError(f"router {name} has shape {list(array.shape)}, expected {list(expected)}")
        for name, array in (("weight", self.weight), ("bias", self.bias), ("norm", self.norm)):
            if array is not None and not np.isfinite(array).all():
                raise UsageError(f"router {name} holds values that are not finite")

    def logits(self, layer: int, inputs: Floats, of: int | None = None) -> Floats:
        """[b, E] of one layer's router, for inputs [b, H] of layer `of` (default: its own)."""
        if self.norm is not None and of is not None and of != layer:
            inputs = inputs * (self.norm[layer] / np.where(self.norm[of] == 0, 1, self.norm[of]))
        out = inputs @ self.weight[layer].T
        return out if self.bias is None else out + self.bias[layer]

    def check_trace(self, trace: Trace) -> None:
        """UsageError unless the trace has these layers, experts and hidden size."""
        if trace.router_inputs is None:
            raise UsageError("router_inputs are not in this trace; collect it with router inputs")
        got = (trace.num_layers, trace.num_experts, trace.router_inputs.shape[2])
        if got != self.weight.shape:
            expected = list(self.weight.shape)
            raise UsageError(f"trace has [layers, experts, hidden] = {list(got)}, expected {expected} as the routers")


class NextRouters:
    """The next layers' own routers on this layer's router input (MoE-APEX, moe-stream): no training at all."""

    name = "next-router"

    def __init__(self, routers: Routers, depth: int = 3) -> None:
        self.depth = depth
        self._routers = routers

    @property
    def nbytes(self) -> int:
        """Bytes of the routers that one forecast reads."""
        return self._routers.weight[0].nbytes * self.depth

    def refine(self, layer: int, router_input: NDArray[np.floating]) -> Floats:
        """See LayerPredictor."""
        inputs = np.asarray(router_input, dtype=np.float32)
        layers, experts, _ = self._routers.weight.shape
        reached = range(layer + 1, min(layer + 1 + self.depth, layers))
        rows = [softmax(self._routers.logits(target, inputs, of=layer)).sum(axis=0) for target in reached]
        return np.stack(rows) if rows else np.zeros((0, experts), dtype=np.float32)


class SpecPrefetch:
    """SpecPrefetch (Kong et al. 2026): softmax(B A x) per pair of layers, summed over the batch, orders the next layer's
    experts. Trained by KL against the frozen next router (or, without routers, against the weights it gave).

    `depth` 1 is the paper's adjacent pairs; more gives each layer adapters for the layers after the next, too.
    """

    name = "specprefetch"

    def __init__(self, down: Floats, up: Floats, bias: Floats) -> None:
        if down.ndim != 4 or up.shape[:2] != down.shape[:2] or up.shape[3] != down.shape[2]:
            raise UsageError(
                f"adapters have shapes {list(down.shape)}, {list(up.shape)}: no [L-1, d, r, H], [L-1, d, E, r]"
            )
        if bias.shape != up.shape[:3]:
            raise UsageError(f"adapters' bias has shape {list(bias.shape)}, expected {list(up.shape[:3])}")
        self._down, self._up, self._bias = down, up, bias  # [L-1, d, r, H], [L-1, d, E, r], [L-1, d, E]
        self.depth = down.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that one forecast reads: the adapters of one layer."""
        return self._down[0].nbytes + self._up[0].nbytes + self._bias[0].nbytes

    def refine(self, layer: int, router_input: NDArray[np.floating]) -> Floats:
        """See LayerPredictor."""
        depth = min(self.depth, len(self._down) - layer)
        if depth <= 0:
            return np.zeros((0, self._up.shape[2]), dtype=np.float32)
        inputs = np.asarray(router_input, dtype=np.float32)
        low = np.einsum("drh,bh->dbr", self._down[layer, :depth], inputs, optimize=True)
        logits = low @ self._up[layer, :depth].transpose(0, 2, 1) + self._bias[layer, :depth, None]
        return softmax(logits).sum(axis=1)

    @classmethod
    def fit(
        cls,
        trace: Trace,
        routers: Routers | None = None,
        *,
        rank: int = 32,
        depth: int = 1,
        epochs: int = 6,
        rows: int = 256,
        learning_rate: float = 3e-3,
        seed: int = 0,
        progress: Callable[[int, int, float], None] | None = None,
    ) -> Self:
        """Trains the adapters on a trace with router inputs, one layer after the other. `rows`: steps of a batch.

        With `routers` they start as the best approximation of rank r of the next router, without as nothing.
        """
        import torch  # only training needs it
        import torch.nn.functional as F

        if trace.router_inputs is None:
            raise UsageError("router_inputs are not in this trace; collect it with router inputs")
        if routers is not None:
            routers.check_trace(trace)
        layers, experts, hidden = trace.num_layers, trace.num_experts, trace.router_inputs.shape[2]
        if layers < 2:
            raise UsageError("SpecPrefetch needs at least 2 MoE layers, this trace has 1")
        depth, rank = min(depth, layers - 1), min(rank, hidden)
        rng = np.random.default_rng(seed)
        shape = (layers - 1, depth)
        down = (rng.standard_normal((*shape, rank, hidden)) / np.sqrt(hidden)).astype(np.float32)
        up = np.zeros((*shape, experts, rank), dtype=np.float32)
        bias = np.zeros((*shape, experts), dtype=np.float32)
        targets: list[Floats] = [np.empty(0, dtype=np.float32)] * layers
        for layer in range(layers - 1):
            reached = min(depth, layers - 1 - layer)
            for target in range(layer + 1, layer + 1 + reached):
                if not targets[target].size:
                    targets[target] = _target(trace, routers, target)
            targets[layer] = np.empty(0, dtype=np.float32)  # behind us; one layer's is as large as the trace
            for d in range(reached if routers is not None else 0):
                assert routers is not None
                _start_as_router(routers, layer, layer + 1 + d, down[layer, d], up[layer, d], bias[layer, d])
            a, b, c = (torch.from_numpy(part[layer, :reached].copy()).requires_grad_() for part in (down, up, bias))
            inputs = torch.from_numpy(trace.router_input(layer))
            truth = torch.from_numpy(np.stack(targets[layer + 1 : layer + 1 + reached]))  # [d, S, E]
            optimizer = torch.optim.AdamW([a, b, c], lr=learning_rate, weight_decay=0.01)
            steps = epochs * -(-len(inputs) // rows)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            loss_value = 0.0
            for _ in range(epochs):
                order = rng.permutation(len(inputs))
                for first in range(0, len(order), rows):
                    part = torch.from_numpy(order[first : first + rows])
                    logits = torch.einsum("bh,drh->dbr", inputs[part], a) @ b.transpose(1, 2) + c[:, None]
                    loss = F.kl_div(logits.log_softmax(-1), truth[:, part], reduction="none").sum(-1).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    schedule.step()
                    loss_value = float(loss.detach())
            for array, trained in ((down, a), (up, b), (bias, c)):
                array[layer, :reached] = trained.detach().numpy()
            if progress:
                progress(layer + 1, layers - 1, loss_value)
        return cls(down, up, bias)

    def save(self, path: Path) -> None:
        """Writes one safetensors file."""
        from safetensors.numpy import save_file

        meta = {"format": FORMAT, "version": str(VERSION)}
        with replacing(path) as temporary:
            save_file({"down": self._down, "up": self._up, "bias": self._bias}, temporary, metadata=meta)

    @classmethod
    def load(cls, path: Path, num_layers: int, num_experts: int) -> Self:
        """Reads what `save` wrote. CheckpointError, naming file and field, for another model's or a damaged file."""
        arrays, meta = _read_safetensors(path)
        if meta.get("format") != FORMAT or meta.get("version") != str(VERSION):
            raise CheckpointError(f"{path}: format is {meta.get('format')!r}, expected '{FORMAT}' version {VERSION}")
        if missing := {"down", "up", "bias"} - set(arrays):
            raise CheckpointError(f"{path}: tensor {min(missing)} is missing")
        got = (arrays["up"].shape[0] + 1, arrays["up"].shape[2]) if arrays["up"].ndim == 4 else ()
        if got != (num_layers, num_experts):
            raise CheckpointError(
                f"{path}: up is for [layers, experts] = {list(got)}, expected {[num_layers, num_experts]}"
            )
        try:
            return cls(arrays["down"], arrays["up"], arrays["bias"])
        except UsageError as error:
            raise CheckpointError(f"{path}: {error}") from None


def load_routers(path: Path) -> Routers:
    """Routers from a safetensors file: `weight` [L, E, H], and where they are there `bias` [L, E] and `norm` [L, H]."""
    arrays, _ = _read_safetensors(path)
    if "weight" not in arrays:
        raise CheckpointError(f"{path}: tensor weight is missing, [layers, experts, hidden] of all routers")
    try:
        return Routers(arrays["weight"], arrays.get("bias"), arrays.get("norm"))
    except UsageError as error:
        raise CheckpointError(f"{path}: {error}") from None


def save_routers(path: Path, routers: Routers) -> None:
    """Writes what `load_routers` reads."""
    from safetensors.numpy import save_file

    named = {"weight": routers.weight, "bias": routers.bias, "norm": routers.norm}
    there = {name: np.ascontiguousarray(array) for name, array in named.items() if array is not None}
    with replacing(path) as temporary:
        save_file(there, temporary)


def _read_safetensors(path: Path) -> tuple[dict[str, Floats], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
            return arrays, dict(file.metadata() or {})
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({' '.join(str(error).split())})") from None


def _target(trace: Trace, routers: Routers | None, layer: int) -> Floats:
    """What a layer's router says, [S, E]: its whole distribution, or without it the weights of those that it chose."""
    if routers is not None:
        return softmax(routers.logits(layer, trace.router_input(layer)))
    one = trace.layer(layer)
    return psi_numpy(one.expert_ids, one.expert_weights, one.num_experts)[:, 0]


def _start_as_router(routers: Routers, of: int, target: int, down: Floats, up: Floats, bias: Floats) -> None:
    """The best approximation of rank r of layer `target`'s router, read through layer `of`'s norm."""
    weight = routers.weight[target]
    if routers.norm is not None:
        weight = weight * (routers.norm[target] / np.where(routers.norm[of] == 0, 1, routers.norm[of]))
    left, sizes, right = np.linalg.svd(weight, full_matrices=False)
    rank = min(len(down), len(sizes))
    root = np.sqrt(sizes[:rank])
    down[:rank] = root[:, None] * right[:rank]
    up[:, :rank] = left[:, :rank] * root
    up[:, rank:] = 0
    if routers.bias is not None:
        bias[:] = routers.bias[target]
