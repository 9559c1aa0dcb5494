"""Opening checkpoints: what is read, what is refused and in which words."""

import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, make_checkpoint
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Interleave

from seqmoe.profiles.errors import CheckpointError
from seqmoe.runtime.checkpoint import Checkpoint
from seqmoe.runtime.facts import ModelFacts
from seqmoe.runtime.headers import read_headers
from seqmoe.runtime.kernels.experts_cpu import workspace_bytes
from seqmoe.runtime.kernels.plan import make_plan
from seqmoe.runtime.layout import InexpressibleError, Part, SymbolicTensor, View, split_by_expert
from seqmoe.runtime.skeleton import load_skeleton

TINY = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", "hub", tmp_path_factory.mktemp("original"), dtype=torch.bfloat16)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "copy")


def refusal(action: Callable[[], Any]) -> str:
    """The one line that the user sees."""
    with pytest.raises(CheckpointError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message and message
    return message


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def file_of(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


def edit_tensors(folder: Path, tensor: str, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the file that holds `tensor` after `edit`, and the index with it."""
    path = file_of(folder, tensor)
    tensors = load_file(path)
    before = set(tensors)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    for name in before - set(tensors):
        del index["weight_map"][name]
    index["weight_map"] |= dict.fromkeys(tensors, path.name)
    index_path.write_text(json.dumps(index))


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


# What is read


def test_layout_and_facts(original: Path) -> None:
    checkpoint = Checkpoint.open(original)
    assert checkpoint.moe_modules == ("model.layers.1.mlp.experts", "model.layers.2.mlp.experts")
    assert checkpoint.layout.views == (
        View("gate_up_proj", 0, 0, (24, 32), (32, 1), "BF16"),
        View("gate_up_proj", 0, 24, (24, 32), (32, 1), "BF16"),
        View("down_proj", 0, 0, (32, 24), (24, 1), "BF16"),
    )
    assert checkpoint.layout.nbytes == 3 * 24 * 32 * 2
    assert checkpoint.sources.shape == (2, 16, 3, 2)
    assert checkpoint.facts == ModelFacts(top_k=4, hidden_size=32, kv_bytes_per_token=3 * 2 * 2 * 8 * 2, state_bytes=0)
    spec = checkpoint.spec(slot_bytes=8192)
    assert (spec.model_type, spec.dtype, spec.max_context, spec.vocab_size) == ("qwen3_moe", "bfloat16", 256, 96)
    assert (spec.total_experts, spec.top_k, spec.record_bytes) == (32, 4, 4608)


def test_transposed_experts_are_read_by_strides(tmp_path: Path) -> None:
    """gpt_oss has [E, H, 2I]; a mapping that transposes on load (as for qwen3_vl_moe) swaps the strides, no bytes."""
    whole = SymbolicTensor((4, 6, 10), "F32", [Part((0, 0, 0), (4, 6, 10), (60, 10, 1), 0, 1000)])
    (piece,), *_, last = split_by_expert("down_proj", torch.transpose(whole, 1, 2))  # type: ignore[arg-type]
    assert piece == (View("down_proj", 0, 0, (10, 6), (1, 10), "F32"), 0, 1000)
    assert last[0][2] == 1000 + 3 * 240


@pytest.mark.parametrize("name", ["qwen3_5_moe", "gpt_oss", "deepseek_v2", "deepseek_v4"])
def test_cache_facts_bound_the_real_cache(name: str, tmp_path: Path) -> None:
    """In a short context the sum is at least what the model really holds; in the long run the growth is right."""
    checkpoint = Checkpoint.open(make_checkpoint(name, "hub", tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")

    def cache_bytes(tokens: int) -> int:
        with torch.inference_mode():
            output = model(torch.zeros((1, tokens), dtype=torch.int64), use_cache=True)
        cache = next(value for value in output.values() if hasattr(value, "layers"))
        states = (value for layer in cache.layers for value in vars(layer).values())
        flat = (v for value in states for v in (value.values() if isinstance(value, dict) else (value,)))
        return sum(value.nbytes for value in flat if isinstance(value, torch.Tensor))

    facts = checkpoint.facts
    assert facts.top_k == FAMILIES[name].sizes["num_experts_per_tok"]
    short, long = cache_bytes(40), cache_bytes(200)
    assert short <= facts.kv_bytes_per_token * 40 + facts.state_bytes
    assert long <= facts.kv_bytes_per_token * 200 + facts.state_bytes <= 1.25 * long
    assert facts.kv_bytes_per_token == -(-(long - short) // 160)


def test_sliding_window_layers_and_kernels_are_in_the_spec(tmp_path: Path) -> None:
    """What a token takes in the layers whose whole context the captured step keeps: every second of gpt_oss' three."""
    checkpoint = Checkpoint.open(make_checkpoint("gpt_oss", "hub", tmp_path))
    spec = checkpoint.spec(4096)
    assert spec.whole_prefill and spec.window_bytes_per_token == 2 * spec.kv_bytes_per_token
    graph_bytes = sum(2 * 2 * 8 * 4 for _ in range(3))  # keys and values of 2 heads of 8 float32 in 3 layers
    assert spec.kv_bytes_per_token + spec.window_bytes_per_token == graph_bytes
    plan = make_plan(checkpoint.layout, checkpoint.meta_model.get_submodule(checkpoint.moe_modules[0]), checkpoint.dtype)
    for tokens in (1, 64, 65, 257, 600, 10_000):
        assert spec.kernel_bytes + tokens * spec.kernel_bytes_per_token >= workspace_bytes(plan, tokens, spec.top_k, 1)


def test_experts_that_the_kernels_cannot_compute_are_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint("qwen3_moe", "hub", tmp_path, dtype=torch.float64))
    assert "float32, bfloat16 and float16 are supported" in refusal(lambda: checkpoint.spec(4096))


def test_digest_covers_config_and_headers_and_full_digest_the_weights(folder: Path) -> None:
    first = Checkpoint.open(folder)
    path = file_of(folder, "model.layers.1.mlp.experts.3.up_proj.weight")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    second = Checkpoint.open(folder)
    assert second.digest == first.digest
    damaged = second.full_digest()
    data[-1] ^= 1
    path.write_bytes(data)
    assert first.full_digest() == Checkpoint.open(folder).full_digest() != damaged
    edit_config(folder, rope_theta=5.0)
    assert Checkpoint.open(folder).digest != first.digest


def test_headers_agree_with_the_safetensors_library(original: Path) -> None:
    headers = read_headers(original)
    for number, path in enumerate(headers.files):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                entry = headers.tensors[name]
                raw = path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
                expected = file.get_tensor(name)
                assert (entry.file, entry.shape) == (number, tuple(expected.shape))
                assert raw == expected.contiguous().view(torch.uint8).numpy().tobytes()


# Symbols against torch itself


def apply_random_steps(rng: random.Random, tensors: list[Any]) -> Any:
    """The same random conversion on real tensors and on symbols; the first calls decide for both."""
    while len(tensors) > 1:
        tensors = [torch.stack(tensors, dim=rng.choice((0, 1, -1)))]
    value = tensors[0]
    for _ in range(4):
        step, dim = rng.choice("tcnsp"), rng.randrange(value.ndim)
        if step == "t":
            value = torch.transpose(value, dim0=dim, dim1=rng.randrange(value.ndim))
        elif step == "c":
            value = torch.cat([value, value.narrow(dim, 0, 1)], dim=dim)
        elif step == "n" and value.shape[dim] > 1:
            value = torch.split(value, [1, value.shape[dim] - 1], dim=dim)[1].contiguous()
        elif step == "s":
            value = torch.chunk(value, 2, dim=dim)[0]
        elif step == "p":
            value = torch.unsqueeze(torch.squeeze(torch.narrow(value, 0, 0, 1), 0), 0)
    return value


@pytest.mark.parametrize("seed", range(60))
def test_symbols_follow_torch(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(2, 5) for _ in range(rng.choice((2, 3))))
    count = math.prod(shape)
    memory = torch.arange(3 * count, dtype=torch.int64)  # each element's value is its place
    real = [memory[i * count : (i + 1) * count].reshape(shape) for i in range(3)]
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    zero = (0,) * len(shape)
    symbols = [SymbolicTensor(shape, "I64", [Part(zero, shape, strides, 0, i * count * 8)]) for i in range(3)]
    expected = apply_random_steps(random.Random(seed), real)
    found = apply_random_steps(random.Random(seed), symbols)
    assert found.shape == expected.shape
    filled = torch.full(expected.shape, -1)
    for part in found.parts:
        box = tuple(slice(start, start + size) for start, size in zip(part.start, part.shape, strict=True))
        filled[box] = memory.as_strided(part.shape, part.strides, part.offset // 8)
    assert torch.equal(filled, expected)


def test_interleaved_gate_and_up_are_refused_by_name() -> None:
    symbol = SymbolicTensor((2, 8, 4), "BF16", [Part((0, 0, 0), (2, 8, 4), (32, 4, 1), 0, 0)])
    with pytest.raises(InexpressibleError, match="reshape"):
        Interleave(dim=1).convert({"w13": [symbol]}, ["w13"], ["gate_up_proj"])


def test_expert_that_is_not_contiguous_is_refused() -> None:
    """Experts stored along the last dimension."""
    symbol = SymbolicTensor((8, 4, 2), "F32", [Part((0, 0, 0), (8, 4, 2), (8, 2, 1), 0, 0)])
    with pytest.raises(InexpressibleError, match="not contiguous"):
        split_by_expert("down_proj", torch.permute(symbol, (2, 0, 1)))  # type: ignore[arg-type]


# What is refused


def test_folder_refusals(tmp_path: Path, folder: Path) -> None:
    assert "no such folder" in refusal(lambda: Checkpoint.open(tmp_path / "nowhere"))
    (folder / "config.json").rename(folder / "x.json")
    assert "no config.json" in refusal(lambda: Checkpoint.open(folder))
    (folder / "config.json").write_text('{"model_type": "no_such_model"}')
    assert "no_such_model" in refusal(lambda: Checkpoint.open(folder))
    (folder / "config.json").write_text("{")
    assert "config.json" in refusal(lambda: Checkpoint.open(folder))


def test_weight_file_refusals(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    message = refusal(lambda: Checkpoint.open(folder))
    assert f"{path.name}: truncated: {len(whole) - 100} bytes found, {len(whole)} expected" in message
    path.write_bytes(whole + b"\0")
    assert "too long" in refusal(lambda: Checkpoint.open(folder))
    path.write_bytes(whole[:50])
    assert f"{path.name}: not a whole safetensors file: 50 bytes found" in refusal(lambda: Checkpoint.open(folder))
    path.write_bytes(b"")
    assert f"{path.name}: not a safetensors file (0 bytes)" in refusal(lambda: Checkpoint.open(folder))
    path.write_bytes(whole[:8] + b"[" + whole[9:])
    assert "header is damaged" in refusal(lambda: Checkpoint.open(folder))
    path.unlink()
    assert f"{path.name}: missing" in refusal(lambda: Checkpoint.open(folder))


def test_index_refusals(folder: Path) -> None:
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["no.such.weight"] = min(folder.glob("*.safetensors")).name
    index_path.write_text(json.dumps(index))
    assert "says that no.such.weight is in" in refusal(lambda: Checkpoint.open(folder))
    index_path.write_text('{"weight_map": {"a": "../a.safetensors"}}')
    assert "not a file of this folder" in refusal(lambda: Checkpoint.open(folder))
    index_path.write_text("[]")
    assert "not a safetensors index" in refusal(lambda: Checkpoint.open(folder))
    index_path.unlink()
    assert "no weights" in refusal(lambda: Checkpoint.open(folder))
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "pickle files (pytorch_model.bin)" in refusal(lambda: Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("config", "sizes", "reason"),
    [
        ("LlamaConfig", {"intermediate_size": 16}, "'llama' is a dense model"),
        ("Qwen3Config", {"intermediate_size": 16}, "'qwen3' is a dense model"),
        ("Llama4TextConfig", {"num_local_experts": 4}, "'llama4_text' is not supported: it does not compute"),
        (
            "DbrxConfig",
            {"d_model": 16, "n_layers": 1, "attn_config": {"rope_theta": 1e4}},
            "'dbrx' is not supported: it does not compute",
        ),
        ("JetMoeConfig", {"num_local_experts": 4}, "'jetmoe' is not supported: it does not compute"),
        ("LongcatFlashConfig", {"n_routed_experts": 4}, "'longcat_flash' is not supported: it does not compute"),
        ("BertConfig", {"intermediate_size": 16}, "'bert' is a dense model"),
        ("ViTConfig", {"intermediate_size": 16}, "'vit'"),
    ],
)
def test_model_types_that_cannot_be_run(tmp_path: Path, config: str, sizes: dict[str, Any], reason: str) -> None:
    common = {} if "d_model" in sizes else TINY
    getattr(transformers, config)(**common, **sizes).save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert reason in refusal(lambda: Checkpoint.open(tmp_path))


def test_quantised_weights(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    assert "quantised (fp8)" in refusal(lambda: Checkpoint.open(folder))


def test_experts_that_are_not_there(folder: Path) -> None:
    names = [f"model.layers.2.mlp.experts.5.{name}_proj.weight" for name in ("gate", "up", "down")]
    original = {name: load_file(file_of(folder, name))[name] for name in names}
    edit_tensors(folder, names[2], drop(names[2]))
    message = refusal(lambda: Checkpoint.open(folder))
    assert (
        "model.layers.2.mlp.experts.down_proj has shape [15, 32, 24] on disk, the config says [16, 32, 24]" in message
    )
    edit_tensors(folder, names[0], lambda tensors: tensors.update({names[2]: original[names[2]]}))
    Checkpoint.open(folder)
    edit_tensors(folder, names[0], drop(names[0]))
    message = refusal(lambda: Checkpoint.open(folder))
    assert "model.layers.2.mlp.experts.gate_up_proj" in message and "Concatenate(dim=1)" in message


def test_all_experts_of_a_layer_are_missing(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = {name: value for name, value in load_file(path).items() if "layers.2.mlp.experts" not in name}
        save_file(tensors, path, metadata={"format": "pt"})
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if "layers.2.mlp.experts" not in n}
    index_path.write_text(json.dumps(index))
    message = refusal(lambda: Checkpoint.open(folder))
    assert "no tensors on disk for model.layers.2.mlp.experts.gate_up_proj" in message


def test_experts_of_another_size_than_the_config(folder: Path) -> None:
    edit_config(folder, moe_intermediate_size=20)
    assert "has shape [16, 48, 32] on disk, the config says [16, 40, 32]" in refusal(lambda: Checkpoint.open(folder))


def test_layers_of_several_layouts(folder: Path) -> None:
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    edit_tensors(folder, name, lambda tensors: tensors.update({name: tensors[name].float()}))
    message = refusal(lambda: Checkpoint.open(folder))
    assert "model.layers.2.mlp.experts.down_proj" in message and "different shapes or types" in message
    for expert in range(16):
        name = f"model.layers.2.mlp.experts.{expert}.down_proj.weight"
        edit_tensors(folder, name, lambda tensors, name=name: tensors.update({name: tensors[name].float()}))  # type: ignore[misc]
    assert "experts of several layouts" in refusal(lambda: Checkpoint.open(folder))


# The skeleton


def test_missing_and_wrong_dense_weights_are_named(folder: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    weight = load_file(file_of(folder, name))[name]
    edit_tensors(folder, name, drop(name))
    assert f"weights are missing: {name}" in refusal(lambda: load_skeleton(Checkpoint.open(folder)))
    other = "model.layers.1.self_attn.k_proj.weight"
    edit_tensors(folder, other, lambda tensors: tensors.update({name: weight[:4]}))
    message = refusal(lambda: load_skeleton(Checkpoint.open(folder)))
    assert f"{name} has shape [4, 32] on disk, the config says [32, 32]" in message


def test_tied_weights_need_one_of_the_two(folder: Path) -> None:
    name, tied = "model.embed_tokens.weight", "lm_head.weight"
    edit_tensors(folder, name, lambda tensors: tensors.update({tied: tensors.pop(name)}))
    skeleton = load_skeleton(Checkpoint.open(folder))
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight
    edit_tensors(folder, tied, drop(tied))
    assert "missing: lm_head.weight, model.embed_tokens.weight" in refusal(
        lambda: load_skeleton(Checkpoint.open(folder))
    )


def test_file_that_shrinks_after_it_was_opened(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    path = file_of(folder, "model.norm.weight")
    path.write_bytes(path.read_bytes()[:-1000])
    assert f"{path}: ends at byte" in refusal(lambda: load_skeleton(checkpoint))


def test_skeleton_in_another_dtype_and_attention(original: Path) -> None:
    skeleton = load_skeleton(Checkpoint.open(original), torch.float32, attn_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32, attn_implementation="eager")
    assert skeleton.config._attn_implementation == "eager"
    ours = dict(skeleton.named_parameters())
    for name, tensor in model.named_parameters():
        if not ours[name].is_meta:
            assert torch.equal(ours[name], tensor) and ours[name].dtype == torch.float32, name


PEAK = """
import sys
from seqmoe.runtime.checkpoint import Checkpoint
from seqmoe.runtime.skeleton import load_skeleton
def status(field):
    text = open("/proc/self/status").read()
    return int(text.split(field + ":")[1].split()[0]) * 1024
checkpoint = Checkpoint.open(sys.argv[1])
load_skeleton(Checkpoint.open(sys.argv[2]))  # what first use costs once: lazy imports, threads
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again from here
before = status("VmRSS")
model = load_skeleton(checkpoint)
print(status("VmHWM") - before, checkpoint.dense_bytes, checkpoint.layout.nbytes * 4 * 64)
"""


def write_sparse_checkpoint(folder: Path) -> None:
    """400 MB of experts and 65 MB of other weights, all zeros, as holes: the disk holds the header alone."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=64,
        moe_intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=64,
        num_experts_per_tok=4,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header, at = {}, 0
    for name, tensor in model.state_dict().items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    raw = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)


@pytest.fixture
def sparse(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "sparse"
    folder.mkdir()
    write_sparse_checkpoint(folder)
    yield folder
    shutil.rmtree(folder)


def test_peak_memory_is_that_of_the_dense_weights(sparse: Path, original: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PEAK, str(sparse), str(original)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    peak, dense, experts = (int(value) for value in result.stdout.split())
    assert experts > 400e6 and dense > 60e6
    assert dense <= peak <= dense + 24 * 2**20, f"peak {peak}, dense weights {dense}"
