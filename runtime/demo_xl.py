"""demo-xl: the demo model with experts of N MiB that compute the same function, so that real bytes have to move.

The added neurons have random gate and up rows and zero columns in the down projection: they contribute exactly 0.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seqmoe.profiles.errors import CheckpointError, UsageError
from seqmoe.runtime.safetensors_stream import (
    ITEM_BYTES,
    Progress,
    StoredTensor,
    TensorSpec,
    building,
    index_folder,
    locked,
    random_values,
    shard_sizes,
    write_shards,
)

log = logging.getLogger("seqmoe")

EXPERT_TENSOR = re.compile(r"\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
LAYER = re.compile(r"\.layers\.(\d+)\.")
MARKER = "seqmoe-demo-xl.json"
FORMAT = 1  # raised whenever the same source and size would give other bytes
WIDTH_STEP = 64  # neurons; keeps every row a whole number of cache lines
FILLER_SCALE = 2**-7  # as large as trained weights are, so that nothing overflows and nothing is denormal


def default_cache_dir() -> Path:
    """Where made checkpoints are kept: `seqmoe` in the user's cache folder (XDG)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seqmoe"


def ensure_demo_xl(
    source: Path,
    cache_dir: Path | None = None,
    expert_mib: float = 9,
    progress: Progress | None = None,
    notice: Callable[[str], None] = log.warning,
) -> Path:
    """The folder of `source`'s checkpoint grown to experts of `expert_mib` MiB each; written on first use.

    Streams: a few experts' worth of RAM. A second process that asks for the same folder meanwhile says so through
    `notice`, waits and uses it. Raises CheckpointError (a source without per-expert tensors), UsageError (a size
    below the source's own) and DiskSpaceError (nothing half-written is left).
    """
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source}: no config.json there, so it is not a checkpoint")
    tensors = index_folder(source)
    old_width, new_width = _widths(source, tensors, expert_mib)
    digest = _digest(source)
    folder = (cache_dir or default_cache_dir()).absolute() / f"demo-xl-{expert_mib:g}MiB-{digest[:12]}"
    marker = {"format": FORMAT, "source": digest, "moe_intermediate_size": new_width}
    if _is_complete(folder, marker):
        return folder
    with locked(folder, notice):
        if not _is_complete(folder, marker):  # another process may have written it while we waited
            _write(source, tensors, folder, old_width, new_width, marker, progress)
    return folder


def _widths(source: Path, tensors: dict[str, StoredTensor], expert_mib: float) -> tuple[int, int]:
    """The experts' number of neurons in the source, and the one that makes an expert of `expert_mib` MiB."""
    gates = [t for name, t in tensors.items() if name.endswith("gate_proj.weight") and EXPERT_TENSOR.search(name)]
    if not gates or len({(gate.shape, gate.dtype) for gate in gates}) != 1:
        raise CheckpointError(
            f"{source}: needs tensors named ...experts.N.gate_proj.weight (and up, down) of one shape"
        )
    if odd := next((name for name, tensor in tensors.items() if tensor.dtype not in ITEM_BYTES), None):
        raise CheckpointError(f"{source}: {odd} is {tensors[odd].dtype}; needs {', '.join(ITEM_BYTES)}")
    width, hidden = gates[0].shape
    neuron_bytes = 3 * hidden * ITEM_BYTES[gates[0].dtype]
    wanted = round(expert_mib * 2**20 / neuron_bytes / WIDTH_STEP) * WIDTH_STEP
    if wanted < width:
        own = width * neuron_bytes / 2**20
        raise UsageError(f"expert size: {source} has experts of {own:.3g} MiB, so {expert_mib:g} MiB is too small")
    return width, wanted


def _digest(source: Path) -> str:
    """SHA-256 of the files that a copy is made of."""
    digest = hashlib.sha256()
    for path in [*sorted(source.glob("*.safetensors")), *_companions(source), source / "config.json"]:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _companions(source: Path) -> list[Path]:
    """The tokenizer's files and the generation config."""
    patterns = ("*token*", "vocab.*", "merges.txt", "generation_config.json", "chat_template*")
    return sorted({path for pattern in patterns for path in source.glob(pattern) if path.is_file()})


def _is_complete(folder: Path, marker: dict[str, object]) -> bool:
    """Whether `folder` was made from the same source at the same size, and its files are as long as they were."""
    try:
        found = json.loads((folder / MARKER).read_text())
        sizes = found.pop("files")
        return found == marker and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _write(
    source: Path,
    tensors: dict[str, StoredTensor],
    folder: Path,
    old_width: int,
    new_width: int,
    marker: dict[str, object],
    progress: Progress | None,
) -> None:
    shards = [
        [_grown(name, tensors[name], new_width) for name in names] for names in _by_layer(sorted(tensors)).values()
    ]

    def produce(tensor: TensorSpec) -> NDArray[np.generic]:
        stored = tensors[tensor.name]
        if tensor.shape == stored.shape:
            return stored.read()
        return grow_expert(stored, tensor, old_width, new_width)

    with building(folder, sum(shard_sizes(shards))) as partial:
        write_shards(partial, shards, produce, progress)
        config = json.loads((source / "config.json").read_text())
        config["moe_intermediate_size"] = new_width
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for path in _companions(source):
            shutil.copyfile(path, partial / path.name)
        sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
        (partial / MARKER).write_text(json.dumps({**marker, "files": sizes}, indent=1) + "\n")


def _by_layer(names: list[str]) -> dict[int, list[str]]:
    """Names grouped into one shard per decoder layer, and one (key -1, the first) for all the rest."""
    shards: dict[int, list[str]] = {}
    for name in names:
        layer = LAYER.search(name)
        shards.setdefault(int(layer.group(1)) if layer else -1, []).append(name)
    return dict(sorted(shards.items()))


def _grown(name: str, stored: StoredTensor, new_width: int) -> TensorSpec:
    match = EXPERT_TENSOR.search(name)
    if match is None:
        return TensorSpec(name, stored.dtype, stored.shape)
    rows, columns = stored.shape
    return TensorSpec(name, stored.dtype, (rows, new_width) if match.group(2) == "down" else (new_width, columns))


def grow_expert(stored: StoredTensor, tensor: TensorSpec, old_width: int, new_width: int) -> NDArray[np.generic]:
    """One expert's gate, up or down matrix with neurons added, as the bits of its dtype.

    The old neurons are spread evenly over the new width: a record of which any larger part was not read, or was read
    to the wrong place, then computes something else, which tests notice.
    """
    bits = np.uint16 if ITEM_BYTES[stored.dtype] == 2 else np.uint32
    old = stored.read().view(bits).reshape(stored.shape)
    places = np.arange(old_width) * new_width // old_width
    if tensor.name.endswith(".down_proj.weight"):
        down = np.zeros(tensor.shape, bits)
        down[:, places] = old
        return down
    seed = int.from_bytes(hashlib.sha256(tensor.name.encode()).digest()[:8], "little")
    rows = random_values(np.random.default_rng(seed), tensor.shape, stored.dtype, FILLER_SCALE)
    rows[places] = old
    return rows
