"""demo-xl: the same function, written by streaming, all or nothing, once for all processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from seqmoe.profiles.errors import CheckpointError, DiskSpaceError, UsageError
from seqmoe.runtime import safetensors_stream
from seqmoe.runtime.demo_xl import MARKER, ensure_demo_xl
from seqmoe.runtime.safetensors_stream import DATA_ALIGNMENT, building, index_folder, random_values, read_header

LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 12, 32, 16


def save_tiny_source(folder: Path, dtype: torch.dtype) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, num_experts=EXPERTS, num_experts_per_tok=4, moe_intermediate_size=WIDTH, norm_topk_prob=True,
        initializer_range=0.2, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "training.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_source(tmp_path_factory.mktemp("model") / "source", torch.float32)


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_function_in_larger_experts(tmp_path: Path, dtype: torch.dtype) -> None:
    source = save_tiny_source(tmp_path / "source", dtype)
    folder = ensure_demo_xl(source, tmp_path / "cache", expert_mib=0.125)
    expert = next(t for name, t in index_folder(folder).items() if name.endswith("experts.0.gate_proj.weight"))
    assert expert.nbytes * 3 == pytest.approx(0.125 * 2**20, rel=0.1)
    assert json.loads((folder / "config.json").read_text())["moe_intermediate_size"] == expert.shape[0]
    torch.testing.assert_close(logits(folder), logits(source), rtol=0, atol=2e-6)
    for copied in ("tokenizer.json", "generation_config.json"):
        assert (folder / copied).read_bytes() == (source / copied).read_bytes()
    assert not (folder / "training.json").exists()


def test_every_quarter_of_a_record_matters(source: Path, tmp_path: Path) -> None:
    """Were a part of a record not read, the result would differ: real neurons lie all over it."""
    folder = ensure_demo_xl(source, tmp_path, expert_mib=0.25)
    for name, tensor in index_folder(folder).items():
        if "experts.3.down" in name:
            used = tensor.read().view(np.uint32).reshape(tensor.shape).any(axis=0)
            assert used.sum() == WIDTH and all(quarter.any() for quarter in np.split(used, 4))


def test_layout_is_what_a_hub_repository_has(source: Path, tmp_path: Path) -> None:
    folder = ensure_demo_xl(source, tmp_path, expert_mib=0.125)
    shards = sorted(folder.glob("*.safetensors"))
    assert [s.name for s in shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == set(index_folder(source))
    for shard in shards:
        header = read_header(shard)
        assert list(header) == sorted(header) and {weight_map[name] for name in header} == {shard.name}
        assert min(t.offset for t in header.values()) % DATA_ALIGNMENT == 0
        ends = [t.offset + t.nbytes for t in header.values()]
        assert [t.offset for t in header.values()][1:] == ends[:-1] and ends[-1] == shard.stat().st_size
        with safe_open(shard, "pt") as reader:  # the format's own reader accepts it
            assert set(reader.keys()) == set(header)
            assert all(torch.isfinite(reader.get_tensor(name)).all() for name in header)


def test_made_once_and_made_again_when_it_cannot_be_trusted(source: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    ensure = lambda mib=0.125: ensure_demo_xl(source, tmp_path, mib, lambda done, total: calls.append((done, total)))
    folder = ensure()
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] == sum(
        shard.stat().st_size for shard in folder.glob("*.safetensors")
    )
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    calls.clear()
    assert ensure() == folder and not calls
    assert ensure(0.25) != folder and calls

    for spoil in (
        lambda: os.truncate(folder / "model-00002-of-00003.safetensors", 5000),
        lambda: (folder / "tokenizer.json").unlink(),
        lambda: (folder / MARKER).unlink(),
        lambda: (folder / MARKER).write_text((folder / MARKER).read_text().replace('"source": "', '"source": "x')),
    ):
        spoil()
        calls.clear()
        assert ensure() == folder and calls
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["d", "d"]  # no lock, no partial folder


def test_another_source_is_another_folder(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(source, other)
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert ensure_demo_xl(source, tmp_path, 0.125) != ensure_demo_xl(other, tmp_path, 0.125)


def test_bad_sources_and_sizes(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too small"):
        ensure_demo_xl(source, tmp_path, 0.001)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        ensure_demo_xl(tmp_path / "nothing", tmp_path)
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no safetensors"):
        ensure_demo_xl(dense, tmp_path)
    (dense / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        ensure_demo_xl(dense, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        ensure_demo_xl(source, tmp_path / "file" / "cache", 0.125)


def test_too_large_for_the_disk_is_found_before_writing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DiskSpaceError, match=r"needs [\d.]+ GiB and [\d.]+ GiB are free"):
        ensure_demo_xl(source, tmp_path, expert_mib=2**24)
    assert not list(tmp_path.iterdir())


FILL_UP = """
import resource, sys
from pathlib import Path
from seqmoe.runtime.demo_xl import ensure_demo_xl
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))  # a real write that fails half-way
try:
    ensure_demo_xl(Path(sys.argv[1]), Path(sys.argv[2]), 0.125)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_disk_full_while_writing_leaves_nothing(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", FILL_UP, str(source), str(cache)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("DiskSpaceError") and "filled up" in said and str(cache) in said
    assert not list(cache.iterdir())


REAL_ENOSPC = """
import os, shutil, sys
from pathlib import Path
from seqmoe.profiles.errors import SeqmoeError
from seqmoe.runtime.demo_xl import ensure_demo_xl
real = shutil.disk_usage
shutil.disk_usage = lambda path: real(path)._replace(free=1 << 40)  # somebody else takes the room in the meantime
try:
    ensure_demo_xl(Path(sys.argv[1]), Path(sys.argv[2]), 0.125)
except SeqmoeError as error:
    print(type(error).__name__, error.exit_code, os.listdir(sys.argv[2]), error)
"""


def test_a_really_full_disk(source: Path, tmp_path: Path) -> None:
    """A tmpfs of 1 MiB in a mount namespace of its own, where that is allowed."""
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"', str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*mount, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    command = [*mount, sys.executable, "-c", REAL_ENOSPC, str(source), str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("DiskSpaceError 8 []") and "(No space left on device)" in said


SLOW_WRITER = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
import sys, time
from pathlib import Path
from seqmoe.runtime.demo_xl import ensure_demo_xl
writes = []
def progress(done, total):
    writes.append(done)
    if len(writes) == 5:
        Path(sys.argv[3]).touch()
        time.sleep(float(sys.argv[4]))
notices = []
folder = ensure_demo_xl(Path(sys.argv[1]), Path(sys.argv[2]), 0.125, progress, notices.append)
print(len(writes) > 0, len(notices), folder.name)
"""


def start(source: Path, cache: Path, started: Path, pause_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW_WRITER, str(source), str(cache), str(started), str(pause_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_two_processes_at_once_write_once(source: Path, tmp_path: Path) -> None:
    cache, started = tmp_path / "cache", tmp_path / "started"
    first = start(source, cache, started, 3)
    wait_for(started)
    second = start(source, cache, tmp_path / "never", 0)
    out = [process.communicate(timeout=60)[0].split() for process in (first, second)]
    assert out[0][:2] == ["True", "0"] and out[1][:2] == ["False", "1"] and out[0][2] == out[1][2]
    assert [path.name for path in cache.iterdir()] == [out[0][2]]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_run_leaves_nothing_to_trip_over(source: Path, tmp_path: Path, how: signal.Signals) -> None:
    cache, started = tmp_path / "cache", tmp_path / "started"
    process = start(source, cache, started, 30)
    wait_for(started)
    process.send_signal(how)
    process.communicate(timeout=30)
    assert process.returncode != 0
    left = [path.name for path in cache.iterdir()]
    assert not left if how == signal.SIGINT else all(name.startswith(".") for name in left)
    folder = ensure_demo_xl(source, cache, 0.125)
    assert list(cache.iterdir()) == [folder]


def test_failed_rebuild_keeps_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    with building(folder, 0) as partial:
        (partial / "x.json").write_text("1")
    with pytest.raises(RuntimeError), building(folder, 0) as partial:
        (partial / "x.json").write_text("2")
        raise RuntimeError
    assert (folder / "x.json").read_text() == "1" and list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32")])
def test_random_values_are_normal_numbers_of_the_asked_size(dtype: str, torch_dtype: str) -> None:
    bits = random_values(np.random.default_rng(0), (300, 35), dtype, 0.25)
    values = torch.from_numpy(bits.copy()).view(getattr(torch, torch_dtype)).double()
    assert values.shape == (300, 35) and values.abs().max() < 0.25 and values.abs().min() >= 0.25 / 16
    assert abs(float((values > 0).double().mean()) - 0.5) < 0.03


def test_memory_does_not_grow_with_the_checkpoint(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = []
    written = safetensors_stream._write_all
    monkeypatch.setattr(safetensors_stream, "_write_all", lambda fd, data: alive.append(len(data)) or written(fd, data))
    folder = ensure_demo_xl(source, tmp_path, expert_mib=0.5)
    assert sum(alive) == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert max(alive) <= 2**20  # one tensor at a time
