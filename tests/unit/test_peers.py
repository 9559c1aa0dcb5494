"""The comparison with other programs: what it plans, what files it makes for them, what it reports."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from seqmoe.profiles.errors import CheckpointError, UsageError
from seqmoe.runtime.safetensors_stream import index_folder

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # its scripts import one another by name

import gguf_write
import limit
import make_checkpoint
import peer_accelerate
import peers
import plots

GEOMETRY = make_checkpoint.Geometry(layers=2, experts=6, top_k=2, hidden=128, expert_mib=0.05, dtype="BF16")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint.make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", GEOMETRY)
    AutoConfig.from_pretrained(folder).save_pretrained(folder)  # with the names that Transformers gives the sizes
    return folder


# --- planning --------------------------------------------------------------------------------------------------------


def test_every_peer_under_every_limit_and_read_ahead() -> None:
    arms = peers.plan_arms(["seqmoe", "llamacpp", "accelerate-map"], [0.45, None], [None, 128])
    assert [arm.label for arm in arms] == [
        "seqmoe, 45%",
        "llamacpp, 45%",
        "llamacpp, 45%, read-ahead 128 KiB",
        "accelerate-map, 45%",
        "accelerate-map, 45%, read-ahead 128 KiB",
        "seqmoe, no limit",
        "llamacpp, no limit",
    ]
    with pytest.raises(UsageError, match="--peers takes"):
        peers.plan_arms(["vllm"], [0.5], [None])


@pytest.mark.parametrize("text", ["", "2", "0", "x"])
def test_shares_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match="--shares"):
        peers._shares(text)


def test_agreement_is_the_length_of_the_common_start() -> None:
    assert peers.agreement([[1, 2, 3], [4, 5], [6]], [[1, 2, 9], [4, 5], [7]]) == [2, 2, 0]


def test_the_limit_is_room_for_a_share_and_the_rest(checkpoint: Path, tmp_path: Path) -> None:
    setup = make_setup(checkpoint, tmp_path)
    assert setup.expert_bytes == 2 * 6 * 3 * 64 * 128 * 2 and setup.layers == 2
    total = sum(tensor.nbytes for tensor in index_folder(checkpoint).values())
    wanted = setup.expert_bytes / 2 + (total - setup.expert_bytes) + setup.base_bytes
    limit_bytes = setup.limit_bytes(0.5)
    assert limit_bytes is not None and 0 <= wanted - limit_bytes < 4096
    assert setup.limit_bytes(None) is None


def make_setup(checkpoint: Path, work: Path) -> Any:
    return peers.Setup(
        model=checkpoint, work=work, prompts=[[1, 2, 3], [7, 8]], base_bytes=2**20, warmup_tokens=1, max_new_tokens=5,
        threads=1, context=64, timeout_s=60, drop_everything=False, seqmoe_options={},
    )  # fmt: skip


# --- files for the peers ---------------------------------------------------------------------------------------------


def test_gguf_has_the_same_weights(checkpoint: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    out = gguf_write.write_gguf(checkpoint, tmp_path / "tiny.gguf")
    assert out.stat().st_size % 4096 == 0 and list(tmp_path.iterdir()) == [out]
    reader = gguf.GGUFReader(out)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 2 + 2 * 12
    source = index_folder(checkpoint)
    experts = tensors["blk.1.ffn_down_exps.weight"]
    assert list(experts.shape) == [64, 128, 6] and experts.tensor_type == gguf.GGMLQuantizationType.BF16
    stacked = [source[f"model.layers.1.mlp.experts.{e}.down_proj.weight"].read() for e in range(6)]
    assert np.array_equal(np.asarray(experts.data).view(np.uint8).reshape(6, -1), np.stack(stacked))
    router = tensors["blk.0.ffn_gate_inp.weight"]
    stored = torch.from_numpy(source["model.layers.0.mlp.gate.weight"].read()).view(torch.bfloat16).float()
    assert np.array_equal(np.asarray(router.data).ravel(), stored.numpy())
    assert reader.get_field("qwen3moe.expert_used_count").contents() == 2


def test_gguf_refuses_what_it_does_not_know(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    with pytest.raises(CheckpointError, match="only qwen3_moe"):
        gguf_write.write_gguf(other, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_offload_files_are_those_that_transformers_writes(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ours = peer_accelerate.write_offload(checkpoint, tmp_path / "ours")
    meta = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    on_disk = {f"model.layers.{layer}.mlp.experts" for layer in range(2)}
    device_map = peer_accelerate.device_map_of(meta, on_disk)
    assert set(device_map.values()) == {"cpu", "disk"} and {k for k, v in device_map.items() if v == "disk"} == on_disk
    AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, device_map=device_map, offload_folder=str(tmp_path / "theirs")
    )
    theirs = index_folder(tmp_path / "theirs")
    assert len(theirs) == 4
    for name, tensor in theirs.items():
        mine = index_folder(ours)[name]
        assert (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype) and np.array_equal(mine.read(), tensor.read())


@pytest.mark.slow  # two processes that import torch or llama.cpp
def test_peers_give_the_tokens_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    """Accelerate exactly; llama.cpp rounds elsewhere, so only its first token is asked for."""
    pytest.importorskip("accelerate")
    setup = make_setup(checkpoint, tmp_path)
    console = peers.Console(quiet=True)
    arms = [peers.Arm("accelerate", None)] + (
        [] if peers.missing_packages("llamacpp") else [peers.Arm("llamacpp", None)]
    )
    peers.prepare(setup, arms, console)
    report = peers.measure(setup, arms, 1, console)
    assert [arm["error"] for arm in report["arms"]] == [None] * len(arms)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    for prompt, ids in zip(setup.prompts, report["arms"][0]["token_ids"], strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert expected[0, len(prompt) :].tolist() == ids
    assert all(count >= 1 for arm in report["arms"] for count in arm["same_tokens_as_reference"])
    plots.plot_peers(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
    peers.report_table(report)
    json.dumps(report, allow_nan=False)


def test_a_peer_that_fails_is_reported(checkpoint: Path, tmp_path: Path) -> None:
    setup = make_setup(checkpoint, tmp_path)  # without its files
    report = peers.measure(setup, [peers.Arm("accelerate", 1.0)], 2, peers.Console(quiet=True))
    assert report["arms"][0]["error"] and report["arms"][0]["repeats"] == 0
    peers.report_table(report)
    plots.plot_peers(report, tmp_path / "plot.png")


# --- limits ----------------------------------------------------------------------------------------------------------


def test_dropped_files_are_no_longer_cached(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2**20))
    with path.open("rb") as file:
        file.read()
    if limit.cached_bytes(path) == 0:
        pytest.skip("this file system keeps nothing in the page cache")
    assert limit.cached_bytes(path) == 2**20
    assert "model's files" in limit.drop_caches([path], everything=False)
    if limit.read_ahead_kib(path) is not None:  # a real disk; tmpfs pages cannot be dropped
        assert limit.cached_bytes(path) < 2**20


EATER = "import sys; data = bytearray(int(sys.argv[1]) << 20); data[::4096] = b'x' * len(data[::4096]); print('ate')"


def test_a_process_over_the_limit_is_ended_and_one_within_it_is_not() -> None:
    try:
        limit.MemoryGroup(2**30, "seqmoe-test-probe").close()
    except limit.SeqmoeError as error:
        pytest.skip(f"no memory cgroups for this user: {error}")

    def eat(mib: int) -> tuple[int, float]:
        with limit.MemoryGroup(96 << 20, "seqmoe-test") as group:
            command = [sys.executable, "-S", "-c", EATER, str(mib)]
            code = subprocess.run(command, preexec_fn=group.join, capture_output=True, check=False).returncode
            return code, group.peak_bytes() / 2**20

    code, peak = eat(30)
    assert code == 0 and 30 < peak <= 96
    code, peak = eat(300)
    assert code != 0
    assert not (limit._parent_group()[0] / "seqmoe-test").exists()
