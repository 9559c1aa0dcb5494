"""Write a Qwen3-MoE checkpoint as a GGUF file for llama.cpp, by streaming (needs the `gguf` package).

    python bench/gguf_write.py CHECKPOINT OUT.gguf

Matrices keep the checkpoint's own precision (bfloat16 stays bfloat16); norms and routers become float32, as llama.cpp
asks. The file's size is a multiple of 4096 bytes, so that it can also be put behind a loop device.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click
import numpy as np
from numpy.typing import NDArray
from peer_common import model_config

from seqmoe.profiles.errors import CheckpointError, DiskSpaceError, SeqmoeError
from seqmoe.runtime.safetensors_stream import StoredTensor, index_folder

PAD_BYTES = 4096
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
FLOAT32_NAMES = ("norm", "gate_inp")  # llama.cpp takes these in float32 only


@dataclass(frozen=True)
class Entry:
    """A tensor of the GGUF file: one or more stored tensors, one after the other (the experts of a layer)."""

    name: str
    parts: tuple[StoredTensor, ...]
    float32: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first, as numpy has it; `gguf` turns it round."""
        return ((len(self.parts),) if self.name.endswith("_exps.weight") else ()) + self.parts[0].shape

    @property
    def nbytes(self) -> int:
        return 4 * int(np.prod(self.shape)) if self.float32 else sum(part.nbytes for part in self.parts)


def entries(config: dict[str, Any], tensors: dict[str, StoredTensor]) -> list[Entry]:
    """All tensors of the file, in order. Raises CheckpointError for one that is missing."""

    def entry(name: str, *sources: str) -> Entry:
        if missing := [source for source in sources if source not in tensors]:
            raise CheckpointError(
                f"{missing[0]}: not in the checkpoint; only Qwen3-MoE with per-expert tensors is known"
            )
        return Entry(f"{name}.weight", tuple(tensors[s] for s in sources), any(part in name for part in FLOAT32_NAMES))

    found = [entry("token_embd", "model.embed_tokens.weight"), entry("output_norm", "model.norm.weight")]
    if not config.get("tie_word_embeddings"):
        found.append(entry("output", "lm_head.weight"))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        found += [entry(f"blk.{layer}.{to}", f"{prefix}.{source}.weight") for to, source in LAYER_NAMES.items()]
        for part in ("gate", "up", "down"):
            names = [f"{prefix}.mlp.experts.{e}.{part}_proj.weight" for e in range(config["num_experts"])]
            found.append(entry(f"blk.{layer}.ffn_{part}_exps", *names))
    return found


def values(stored: StoredTensor, float32: bool) -> NDArray[Any]:
    """A tensor's bytes, or its values in float32."""
    data = stored.read()
    if not float32 or stored.dtype == "F32":
        return data
    if stored.dtype == "F16":
        return data.view(np.float16).astype(np.float32)
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def write_gguf(checkpoint: Path, out: Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write `checkpoint` to `out`; there is nothing under that name before it is complete."""
    import gguf

    config = model_config(checkpoint)
    if config.get("model_type") != "qwen3_moe" or not config.get("norm_topk_prob"):
        raise CheckpointError(f"{checkpoint}: only qwen3_moe with norm_topk_prob can be written as GGUF here")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise CheckpointError(f"{checkpoint}: has dense layers, which are not known here")
    todo = entries(config, index_folder(checkpoint))
    total = sum(entry.nbytes for entry in todo)
    free = shutil.disk_usage(out.absolute().parent).free
    if total + 2**26 > free:
        raise DiskSpaceError(f"{out}: needs {total / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free there")
    types = {
        "BF16": gguf.GGMLQuantizationType.BF16,
        "F16": gguf.GGMLQuantizationType.F16,
        "F32": gguf.GGMLQuantizationType.F32,
    }
    partial = out.with_name(f".{out.name}.partial")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    add_settings(writer, config)
    add_tokenizer(writer, checkpoint, config)
    for entry in todo:
        kind = types["F32" if entry.float32 else entry.parts[0].dtype]
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.uint16), entry.nbytes, kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        file: IO[bytes] = writer.fout[0]
        _pad(file, writer.data_alignment)
        done = 0
        for entry in todo:
            for part in entry.parts:
                values(part, entry.float32).tofile(file)
            _pad(file, writer.data_alignment)
            done += entry.nbytes
            if progress:
                progress(done, total)
        _pad(file, PAD_BYTES)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        partial.rename(out)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)
    return out


def add_settings(writer: Any, config: dict[str, Any]) -> None:
    """The model's sizes, under llama.cpp's names."""
    rope = config.get("rope_parameters") or {}
    writer.add_name(config.get("_name_or_path") or "seqmoe bench")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))


def add_tokenizer(writer: Any, checkpoint: Path, config: dict[str, Any]) -> None:
    """The vocabulary, as byte-level BPE. Prompts are fed as token ids, so how text is split does not matter."""
    tokens, merges = [f"<unused{i}>" for i in range(config["vocab_size"])], []
    special: set[int] = set()
    path = checkpoint / "tokenizer.json"
    if path.is_file():
        data = json.loads(path.read_text())
        for token, number in data["model"]["vocab"].items():
            tokens[number] = token
        for added in data.get("added_tokens", []):
            tokens[added["id"]] = added["content"]
            special.add(added["id"])
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 5 if t.startswith("<unused") else 1 for i, t in enumerate(tokens)])
    writer.add_token_merges(merges or ["a b"])
    for name in ("bos", "eos"):
        if isinstance(number := config.get(f"{name}_token_id"), int):
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(False)


def _pad(file: IO[bytes], alignment: int) -> None:
    file.write(b"\0" * (-file.tell() % alignment))


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def main(checkpoint: Path, out: Path) -> None:
    """Write CHECKPOINT (a Qwen3-MoE folder) to the file OUT."""
    try:
        write_gguf(checkpoint, out)
    except SeqmoeError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_code) from None
    except ModuleNotFoundError as error:
        click.echo(f"error: needs the package {error.name}: pip install 'seqmoe[peers]'", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
