"""seqmoe beside llama.cpp (mmap) and Accelerate's disk offload: one checkpoint, one memory limit, the same prompts.

    sudo python bench/peers.py --model demo-xl --work DIR --shares 0.45,0.25 --out peers.json --plot peers.png

Every run is a fresh process in a memory cgroup (page cache included) with cold caches; repeats are interleaved. The
limit is the room for a share of the experts, plus the other weights, plus `--base-mib` for the process itself, and is
the same for everyone. llama.cpp reads a GGUF file of the same weights, Accelerate the stacked tensors that Transformers
itself writes on first use; both are made once, in DIR. Needs `pip install 'seqmoe[peers]'`, and root.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from gguf_write import write_gguf
from limit import MemoryGroup, cached_bytes, drop_caches, loop_device, make_image, mounted, read_ahead_kib
from peer_accelerate import write_offload
from peer_common import PeerJob
from plots import plot_peers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from seqmoe.profiles.cliutil import INTERRUPTED, Command
from seqmoe.profiles.errors import SeqmoeError, UsageError
from seqmoe.runtime.bench import Spread, order
from seqmoe.runtime.bench_cli import DEFAULT_PROMPTS, read_prompts
from seqmoe.runtime.jobs_process import job_error, run_job
from seqmoe.runtime.models import resolve_model
from seqmoe.runtime.safetensors_stream import index_folder, locked

HERE = Path(__file__).resolve().parent
PEERS = ("seqmoe", "llamacpp", "accelerate", "accelerate-map")
PACKAGES = {"llamacpp": ("xllamacpp", "gguf"), "accelerate": ("accelerate",), "accelerate-map": ("accelerate",)}
SCRIPTS = {name: HERE / f"peer_{name.split('-')[0]}.py" for name in PEERS}
FIGURES = ("decode_tokens_per_s", "read_mib_per_token", "ttft_s", "peak_rss_mib", "peak_group_mib")
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Arm:
    """One peer at one limit. `share` None: no limit. `read_ahead` None: as the disk has it; in KiB otherwise."""

    peer: str
    share: float | None
    read_ahead: int | None = None

    @property
    def label(self) -> str:
        parts = [self.peer, "no limit" if self.share is None else f"{self.share:.0%}"]
        return ", ".join(parts + ([] if self.read_ahead is None else [f"read-ahead {self.read_ahead} KiB"]))


@dataclass
class Setup:
    """What all arms have in common."""

    model: Path
    work: Path
    prompts: list[list[int]]
    base_bytes: int
    warmup_tokens: int
    max_new_tokens: int
    threads: int
    context: int
    timeout_s: float
    drop_everything: bool
    seqmoe_options: dict[str, Any]
    expert_bytes: int = 0
    dense_bytes: int = 0
    layers: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors = index_folder(self.model)
        self.expert_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)
        self.dense_bytes = sum(tensor.nbytes for tensor in tensors.values()) - self.expert_bytes
        self.layers = json.loads((self.model / "config.json").read_text())["num_hidden_layers"]

    def limit_bytes(self, share: float | None) -> int | None:
        """The cgroup's limit for an arm."""
        if share is None:
            return None
        return (int(self.expert_bytes * share) + self.dense_bytes + self.base_bytes) // 4096 * 4096

    def artifact(self, suffix: str) -> Path:
        """A file or folder in the work folder, made from this model and no other."""
        digest = hashlib.sha256()
        for path in sorted([*self.model.glob("*.safetensors"), self.model / "config.json"]):
            digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
        return self.work / f"{self.model.name}-{digest.hexdigest()[:8]}{suffix}"


def plan_arms(peers: Sequence[str], shares: Sequence[float | None], read_aheads: Sequence[int | None]) -> list[Arm]:
    """Every peer at every limit; those that read through the page cache at every read-ahead. Raises UsageError."""
    if unknown := [peer for peer in peers if peer not in PEERS]:
        raise UsageError(f"--peers takes {', '.join(PEERS)}, got {unknown[0]!r}")
    arms = []
    for share in shares:
        for peer in peers:
            if peer == "accelerate-map" and share is None:
                continue  # without a limit it is the same as all in RAM
            # O_DIRECT knows no read-ahead; nor does it matter where everything stays in memory.
            once = peer == "seqmoe" or share is None
            arms += [Arm(peer, share, kib) for kib in ((None,) if once else read_aheads)]
    return list(dict.fromkeys(arms))


def missing_packages(peer: str) -> list[str]:
    """What a peer needs and is not installed."""
    return [name for name in PACKAGES.get(peer, ()) if importlib.util.find_spec(name) is None]


def prepare(setup: Setup, arms: Sequence[Arm], console: Console) -> None:
    """Make the files that the peers read, where they are not there yet."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    gguf, offload, image = setup.artifact(".gguf"), setup.artifact("-offload"), setup.artifact("-offload.ext4")
    peers = {arm.peer for arm in arms}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar, locked(setup.artifact("")):
        if "llamacpp" in peers and not gguf.exists():
            task = bar.add_task("writing GGUF")
            write_gguf(setup.model, gguf, lambda done, total: bar.update(task, completed=done, total=total))
        if any(peer.startswith("accelerate") for peer in peers):
            if not (offload / "complete").exists():
                task2 = bar.add_task("writing stacked experts")
                write_offload(setup.model, offload, lambda done, total: bar.update(task2, completed=done, total=total))
            if (
                any(arm.peer.startswith("accelerate") and arm.read_ahead is not None for arm in arms)
                and not image.exists()
            ):
                bar.add_task("writing image", total=None)
                make_image(offload, image)


@contextlib.contextmanager
def inputs(setup: Setup, arm: Arm) -> Iterator[tuple[str, dict[str, Any], list[Path]]]:
    """Path to load, extras of the job, and the files whose pages must be cold."""
    model_files = sorted(setup.model.glob("*.safetensors"))
    with contextlib.ExitStack() as stack:
        if arm.peer == "llamacpp":
            gguf = setup.artifact(".gguf")
            path = gguf if arm.read_ahead is None else stack.enter_context(loop_device(gguf, arm.read_ahead))
            yield str(path), {}, [gguf]
        elif arm.peer.startswith("accelerate"):
            offload = setup.artifact("-offload")
            files = sorted(offload.glob("*.safetensors"))
            if arm.read_ahead is not None:
                device = stack.enter_context(loop_device(setup.artifact("-offload.ext4"), arm.read_ahead))
                offload = stack.enter_context(mounted(device, setup.artifact(f"-mounted-{os.getpid()}")))
                files = [setup.artifact("-offload.ext4"), *sorted(offload.glob("*.safetensors"))]
            resident = 0
            if arm.share is None:
                resident = setup.layers
            elif arm.peer == "accelerate-map":
                resident = max(0, int(arm.share * setup.layers - 0.5))  # half a layer's room for the page cache
            yield str(setup.model), {"offload": str(offload), "resident_layers": resident}, model_files + files
        else:
            mode = {"mode": "full"} if arm.share is None else {}
            yield str(setup.model), setup.seqmoe_options | mode, model_files


def run_arm(setup: Setup, arm: Arm) -> dict[str, Any]:
    """One run of one arm, in a fresh process; its figures, or {"error": ...}."""
    limit = setup.limit_bytes(arm.share)
    try:
        with inputs(setup, arm) as (path, extra, files), contextlib.ExitStack() as stack:
            caches = drop_caches(files, setup.drop_everything)
            warm = sum(cached_bytes(file) for file in files)
            command = [sys.executable, str(SCRIPTS[arm.peer])]
            group = None
            if limit is not None:
                group = stack.enter_context(MemoryGroup(limit))
                command = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group.path), *command]
            job = PeerJob(
                path=path,
                prompts=setup.prompts,
                warmup_tokens=setup.warmup_tokens,
                max_new_tokens=setup.max_new_tokens,
                threads=setup.threads,
                context=setup.context,
                memory_bytes=limit,
                extra=extra,
            )
            result = run_job(asdict(job), setup.timeout_s, command)
            if group:
                result["peak_group_mib"] = group.peak_bytes() / 2**20
                result["out_of_memory_kills"] = group.out_of_memory_kills()
            return result | {"caches": caches, "cached_before_mib": warm / 2**20}
    except (SeqmoeError, OSError) as error:
        return {"error": {"type": type(error).__name__, "message": str(error), "exit_code": 1}}


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> list[int]:
    """For each prompt, how many tokens are the same before the first that differs."""
    return [
        next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        for one, two in zip(ours, theirs, strict=True)
    ]


def summary(
    arm: Arm, runs: list[dict[str, Any]], error: str | None, reference: list[list[int]] | None
) -> dict[str, Any]:
    """An arm as it stands in the JSON."""
    row: dict[str, Any] = {"label": arm.label, **asdict(arm), "error": error, "repeats": len(runs)}
    if runs:
        for name in FIGURES:
            values = tuple(float(run[name]) for run in runs if run.get(name) is not None)
            row[name] = Spread(values).to_dict() if values else None
        same = (
            "hit_rate",
            "slots",
            "residency",
            "link",
            "resident_layers",
            "caches",
            "cached_before_mib",
            "graph",
            "token_ids",
        )
        row |= {name: runs[-1][name] for name in same if name in runs[-1]}
        row["same_tokens_as_reference"] = agreement(reference or runs[0]["token_ids"], runs[0]["token_ids"])
        row["tokens_vary"] = any(run["token_ids"] != runs[0]["token_ids"] for run in runs)
    return row


def measure(setup: Setup, arms: Sequence[Arm], repeats: int, console: Console) -> dict[str, Any]:
    """All arms in turns; the whole report."""
    runs: dict[Arm, list[dict[str, Any]]] = {arm: [] for arm in arms}
    errors: dict[Arm, str] = {}
    interrupted = False
    try:
        for done, index in enumerate(order(len(arms), repeats), 1):
            arm = arms[index]
            if arm in errors:
                continue
            result = run_arm(setup, arm)
            if error := job_error(result):
                at_limit = f"; the kernel ended it at the limit, peak {result.get('peak_group_mib', 0):.0f} MiB"
                errors[arm] = error + (at_limit if result.get("out_of_memory_kills") else "")
                text = errors[arm]
            else:
                runs[arm].append(result)
                text = f"{result['decode_tokens_per_s']:.2f} tokens/s, {result['read_mib_per_token']:.1f} MiB/token"
            console.print(f"[{done}/{len(arms) * repeats}] {arm.label}: {text}", markup=False)
    except KeyboardInterrupt:
        interrupted = True  # what was measured so far is worth keeping
    with_tokens = [arm for arm in arms if runs[arm]]
    first = next((arm for arm in with_tokens if arm.peer == "seqmoe"), with_tokens[0] if with_tokens else None)
    reference = runs[first][0]["token_ids"] if first else None
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "peers",
        "model": setup.model.name,
        "expert_mib": setup.expert_bytes / 2**20,
        "dense_mib": setup.dense_bytes / 2**20,
        "base_mib": setup.base_bytes / 2**20,
        "limits_mib": {f"{s:g}": (setup.limit_bytes(s) or 0) / 2**20 for s in {a.share for a in arms} if s is not None},
        "disk_read_ahead_kib": read_ahead_kib(setup.model),
        "threads": setup.threads,
        "max_new_tokens": setup.max_new_tokens,
        "warmup_tokens": setup.warmup_tokens,
        "prompts": len(setup.prompts),
        "repeats": repeats,
        "interrupted": interrupted,
        "reference": first.label if first else None,
        "versions": _versions(),
        "arms": [summary(arm, runs[arm], errors.get(arm), reference) for arm in arms],
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "linux": platform.release()}
    for package in ("torch", "transformers", "accelerate", "xllamacpp"):
        with contextlib.suppress(ModuleNotFoundError):
            found[package] = version(package)
    return found


def report_table(report: dict[str, Any]) -> Table:
    """One row an arm; how many times as fast as it ours is at the same limit."""
    ours = {
        a["share"]: a["decode_tokens_per_s"]["median"] for a in report["arms"] if a["peer"] == "seqmoe" and a["repeats"]
    }
    caption = f"tokens the same as {report['reference']}'s before the first that differs, of {report['max_new_tokens']}"
    table = Table(title=f"{report['model']}, medians of {report['repeats']}", caption=caption)
    for name in ("room for", "limit", "peer", "read-ahead", "tokens/s", "ours is", "MiB/token", "peak", "same tokens"):
        table.add_column(name, justify="left" if name == "peer" else "right")
    for arm in report["arms"]:
        share = arm["share"]
        limit = "none" if share is None else f"{report['limits_mib'][f'{share:g}']:.0f} MiB"
        ahead = arm["read_ahead"] or ("-" if arm["peer"] == "seqmoe" else report["disk_read_ahead_kib"])
        row = ["all" if share is None else f"{share:.0%}", limit, arm["peer"], "-" if ahead == "-" else f"{ahead} KiB"]
        if not arm["repeats"]:
            # The reason, which may be long, follows the table.
            table.add_row(*row, "failed" if arm["error"] else "not run")
            continue
        speed = arm["decode_tokens_per_s"]
        peak = arm.get("peak_group_mib") or arm["peak_rss_mib"]
        times = f"{ours[share] / speed['median']:.1f}x" if share in ours and speed["median"] else ""
        table.add_row(
            *row,
            f"{speed['median']:.2f}" + (f" ({speed['min']:.2f} - {speed['max']:.2f})" if arm["repeats"] > 1 else ""),
            times,
            f"{arm['read_mib_per_token']['median']:.1f}",
            f"{peak['max']:.0f} MiB",
            " ".join(str(count) for count in arm["same_tokens_as_reference"]),
        )
    return table


def token_ids(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """The prompts as the checkpoint's own tokenizer has them."""
    from tokenizers import Tokenizer

    path = model / "tokenizer.json"
    if not path.is_file():
        raise UsageError(f"{model}: has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    return [tokenizer.encode(text).ids for text in texts]


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _shares(text: str) -> list[float | None]:
    try:
        shares = [None if part == "all" else float(part) for part in _list(text)]
    except ValueError:
        raise UsageError(f"--shares takes numbers and `all`, such as 0.45,0.25,all; got {text!r}") from None
    if not shares or any(share is not None and not 0 < share <= 1 for share in shares):
        raise UsageError(f"--shares must be above 0 and at most 1, got {text!r}")
    return shares


def _object(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise UsageError(f"--knobs takes a JSON object, got {text!r}") from None


def _read_aheads(text: str) -> list[int | None]:
    try:
        return [None if part == "disk" else int(part) for part in _list(text)] or [None]
    except ValueError:
        raise UsageError(f"--read-ahead takes `disk` and KiB, such as disk,128; got {text!r}") from None


@click.command(cls=Command, context_settings={"show_default": True}, help=__doc__)
@click.option("--model", default="demo-xl", help="Name (demo, demo-xl) or folder of a Qwen3-MoE checkpoint.")
@click.option(
    "--work", type=click.Path(path_type=Path), required=True, help="Folder for the peers' files (2-3x the model)."
)
@click.option("--peers", default="seqmoe,llamacpp,accelerate", help=f"Of {', '.join(PEERS)} (some layers kept in RAM).")
@click.option("--shares", default="0.45,0.25", help="Room for these shares of the experts; `all`: no limit.")
@click.option("--read-ahead", default="disk,128", help="Of the peers' files: as the disk has it, or KiB.")
@click.option("--base-mib", type=click.IntRange(0), default=512, help="In the limit, for the process itself.")
@click.option("--repeats", type=click.IntRange(1), default=3)
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="Text file, one prompt a line. [default: three built in]"
)
@click.option("--max-new-tokens", type=click.IntRange(2), default=64)
@click.option("--warmup-tokens", type=click.IntRange(0), default=16)
@click.option("--threads", type=click.IntRange(1), default=len(os.sched_getaffinity(0)))
@click.option("--context", type=click.IntRange(16), default=2048)
@click.option("--timeout", type=float, default=1800.0, help="Seconds for one run.")
@click.option("--knobs", default="{}", help='seqmoe\'s, as JSON: {"mode": "lfu", "knobs": {"read_threads": 2}}.')
@click.option("--only-model-caches", is_flag=True, help="Drop only the model's pages, not all of the machine's.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the report to this JSON file.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a plot to this PNG file.")
def main(
    model: str,
    work: Path,
    peers: str,
    shares: str,
    read_ahead: str,
    base_mib: int,
    repeats: int,
    prompts: Path | None,
    max_new_tokens: int,
    warmup_tokens: int,
    threads: int,
    context: int,
    timeout: float,
    knobs: str,
    only_model_caches: bool,
    out: Path | None,
    plot: Path | None,
) -> int:
    # Devices, mounts and groups are taken down on the way out, whoever ends us.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # for a file or a pipe: a table's rows on one line each
    arms = plan_arms(_list(peers), _shares(shares), _read_aheads(read_ahead))
    for peer in dict.fromkeys(arm.peer for arm in arms):
        if absent := missing_packages(peer):
            console.print(f"{peer}: left out, needs {', '.join(absent)}: pip install 'seqmoe[peers]'", markup=False)
            arms = [arm for arm in arms if arm.peer != peer]
    if not arms:
        return 1
    if any(arm.share is not None for arm in arms):
        MemoryGroup(2**30).close()  # not allowed: said now, not after gigabytes were written
    work.mkdir(parents=True, exist_ok=True)
    folder = resolve_model(model)
    setup = Setup(
        model=folder,
        work=work.absolute(),
        prompts=token_ids(folder, read_prompts(prompts) if prompts else DEFAULT_PROMPTS),
        base_bytes=base_mib << 20,
        warmup_tokens=warmup_tokens,
        max_new_tokens=max_new_tokens,
        threads=threads,
        context=context,
        timeout_s=timeout,
        drop_everything=not only_model_caches,
        seqmoe_options=_object(knobs),
    )
    prepare(setup, arms, console)
    report = measure(setup, arms, repeats, console)
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n")
    if plot:
        plot_peers(report, plot)
    console.print(report_table(report))
    for arm in report["arms"]:
        if arm["error"]:
            console.print(f"error: {arm['label']}: {arm['error']}", markup=False)
    return INTERRUPTED if report["interrupted"] else int(any(arm["error"] for arm in report["arms"]))


if __name__ == "__main__":
    main()
