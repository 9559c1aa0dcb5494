"""Write a synthetic Qwen3-MoE checkpoint of any geometry: random weights, real bytes, for routing replay and benchmarks.

    python bench/make_checkpoint.py OUT --like-trace routing.npz --expert-mib 9
    python bench/make_checkpoint.py OUT --layers 8 --experts 64 --top-k 4 --hidden 1024 --expert-mib 4

It streams: RAM holds one tensor at a time. Nothing is left when it fails or is interrupted.
"""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from seqmoe.profiles.errors import SeqmoeError, UsageError
from seqmoe.runtime.safetensors_stream import (
    ITEM_BYTES,
    TensorSpec,
    building,
    locked,
    ones,
    random_values,
    shard_sizes,
    write_shards,
)
from seqmoe.runtime.safetensors_stream import Progress as ProgressCallback

TORCH_DTYPE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
HEAD_DIM = 64
WIDTH_STEP = 64  # neurons
MIN_VOCAB = 256
DEFAULT_TOKENIZER = Path(__file__).resolve().parent.parent / "examples" / "demo_model" / "checkpoint"


@dataclass(frozen=True)
class Geometry:
    """The sizes of a synthetic model. Widths are in elements; `dtype` as safetensors names it."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    expert_mib: float
    dtype: str = "BF16"
    vocab: int = MIN_VOCAB

    def __post_init__(self) -> None:
        if min(self.layers, self.experts, self.top_k) < 1 or self.top_k > self.experts:
            raise UsageError(f"need layers >= 1 and 1 <= top-k <= experts, got {self}")
        if self.hidden % (2 * HEAD_DIM):
            raise UsageError(f"--hidden must be a multiple of {2 * HEAD_DIM}, got {self.hidden}")
        if self.width < WIDTH_STEP:
            raise UsageError(
                f"--expert-mib {self.expert_mib:g} is less than {WIDTH_STEP} neurons of hidden {self.hidden}"
            )

    @property
    def width(self) -> int:
        """Neurons of an expert, the nearest multiple of 64 to the wanted size."""
        neuron_bytes = 3 * self.hidden * ITEM_BYTES[self.dtype]
        return round(self.expert_mib * 2**20 / neuron_bytes / WIDTH_STEP) * WIDTH_STEP

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_DIM

    @property
    def kv_heads(self) -> int:
        return max(1, self.heads // 4)

    def config(self) -> dict[str, object]:
        """The contents of config.json."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "torch_dtype": TORCH_DTYPE[self.dtype],
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.width,
            "moe_intermediate_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": HEAD_DIM,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }

    def tensors(self) -> Iterator[list[TensorSpec]]:
        """One list of tensors per file, in the order in which they lie there."""
        hidden, width, dtype = self.hidden, self.width, self.dtype
        yield [
            TensorSpec("model.embed_tokens.weight", dtype, (self.vocab, hidden)),
            TensorSpec("model.norm.weight", dtype, (hidden,)),
        ]
        for layer in range(self.layers):
            shapes: dict[str, tuple[int, ...]] = {
                "input_layernorm": (hidden,),
                "mlp.gate": (self.experts, hidden),
                "post_attention_layernorm": (hidden,),
                "self_attn.k_norm": (HEAD_DIM,),
                "self_attn.k_proj": (self.kv_heads * HEAD_DIM, hidden),
                "self_attn.o_proj": (hidden, self.heads * HEAD_DIM),
                "self_attn.q_norm": (HEAD_DIM,),
                "self_attn.q_proj": (self.heads * HEAD_DIM, hidden),
                "self_attn.v_proj": (self.kv_heads * HEAD_DIM, hidden),
            }
            for expert in range(self.experts):
                shapes |= {f"mlp.experts.{expert}.{part}_proj": (width, hidden) for part in ("gate", "up")}
                shapes[f"mlp.experts.{expert}.down_proj"] = (hidden, width)
            names = {f"model.layers.{layer}.{part}.weight": shape for part, shape in shapes.items()}
            yield [TensorSpec(name, dtype, names[name]) for name in sorted(names)]


def produce(tensor: TensorSpec) -> NDArray[np.generic]:
    """The weights of a tensor: a function of its name and shape alone, sized so that activations neither grow nor die."""
    if "norm" in tensor.name:
        return ones(tensor.shape, tensor.dtype)
    seed = int.from_bytes(hashlib.sha256(tensor.name.encode()).digest()[:8], "little")
    # Magnitudes up to 2 / sqrt(inputs) have a root mean square near 0.6 / sqrt(inputs).
    return random_values(np.random.default_rng(seed), tensor.shape, tensor.dtype, 2 * tensor.shape[-1] ** -0.5)


def make_checkpoint(
    folder: Path, geometry: Geometry, tokenizer_from: Path | None = None, progress: ProgressCallback | None = None
) -> Path:
    """Write the checkpoint to `folder`, which must not exist yet, with the tokenizer of `tokenizer_from`."""
    if folder.exists():
        raise UsageError(f"{folder}: exists already")
    shards = list(geometry.tensors())
    with locked(folder), building(folder, sum(shard_sizes(shards))) as partial:
        write_shards(partial, shards, produce, progress)
        (partial / "config.json").write_text(json.dumps(geometry.config(), indent=2) + "\n")
        ids = {name: 0 for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (partial / "generation_config.json").write_text(json.dumps(ids) + "\n")
        for path in sorted(tokenizer_from.glob("*token*")) if tokenizer_from else []:
            shutil.copyfile(path, partial / path.name)
    return folder


def trace_shape(trace: Path) -> tuple[int, int, int]:
    """(layers, experts, top-k) of a routing trace; the number of experts is one more than the largest id."""
    try:
        with np.load(trace, allow_pickle=False) as arrays:
            experts = arrays["expert_ids"]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UsageError(f"{trace}: not a routing trace with an array expert_ids ({error})") from None
    return experts.shape[1], int(experts.max()) + 1, experts.shape[2]


def vocabulary(tokenizer_from: Path | None) -> int:
    """How many tokens a tokenizer folder's tokenizer.json has, rounded up to a multiple of 64."""
    if tokenizer_from is None:
        return MIN_VOCAB
    data = json.loads((tokenizer_from / "tokenizer.json").read_text())
    ids = [*data["model"]["vocab"].values(), *(token["id"] for token in data.get("added_tokens", []))]
    return max(MIN_VOCAB, -(-(max(ids) + 1) // 64) * 64)


@click.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--like-trace", type=click.Path(exists=True, path_type=Path), help="Take layers, experts and top-k from it."
)
@click.option("--layers", default=8)
@click.option("--experts", default=64)
@click.option("--top-k", default=4)
@click.option("--hidden", default=1024)
@click.option("--expert-mib", default=9.0)
@click.option("--dtype", type=click.Choice(sorted(ITEM_BYTES)), default="BF16")
@click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), help="Checkpoint folder to copy one from.")
def main(
    out: Path,
    like_trace: Path | None,
    layers: int,
    experts: int,
    top_k: int,
    hidden: int,
    expert_mib: float,
    dtype: str,
    tokenizer: Path | None,
) -> None:
    """Write a synthetic Qwen3-MoE checkpoint into the new folder OUT (the tokenizer is the demo model's by default)."""
    if tokenizer is None and (DEFAULT_TOKENIZER / "tokenizer.json").is_file():
        tokenizer = DEFAULT_TOKENIZER
    try:
        if like_trace:
            layers, experts, top_k = trace_shape(like_trace)
        geometry = Geometry(layers, experts, top_k, hidden, expert_mib, dtype, vocabulary(tokenizer))
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns) as bar:
            task = bar.add_task("writing", total=None)
            make_checkpoint(out, geometry, tokenizer, lambda done, total: bar.update(task, completed=done, total=total))
    except SeqmoeError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_code) from None
    click.echo(f"{out}: {layers} layers x {experts} experts of {geometry.expert_mib:g} MiB, top-{top_k}")


if __name__ == "__main__":
    main()
