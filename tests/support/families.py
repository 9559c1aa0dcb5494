"""Small random checkpoints of many Mixture-of-Experts families on disk, in each layout that is found in the wild.

Layouts: "hub" is what the family's hub repositories hold (several files and an index, their tensor names, tensors
that no model wants), "saved" is what `save_pretrained` writes, "stacked" is the model's own state dict (experts
already stacked) in one file.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

LAYOUTS = ("hub", "saved", "stacked")

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_LINEAR_ATTENTION = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


@dataclass(frozen=True)
class Family:
    """One model family: how to make a tiny config, and what its hub repositories' tensor names look like."""

    name: str
    config: str
    sizes: dict[str, Any]
    hub_names: tuple[str, ...]
    """Some names that a hub checkpoint must hold; `make` asserts them."""
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Tensors that hub repositories hold and the model does not want."""
    wrap: str | None = None
    """Composite config class that the hub uses, with this family as its text_config."""
    rename: Callable[[str], str] | None = None
    """From `save_pretrained` names to the hub's, where they differ."""

    hub_from_stacked: bool = False
    """The hub's names are those of the model's own state dict, not those of `save_pretrained`, before `rename`."""

    def make_config(self, **changes: Any) -> Any:
        """A tiny config; `changes` override its fields."""
        return getattr(transformers, self.config)(**{**_COMMON, **self.sizes, **changes})


_W = ("w1", "w2", "w3")


def _per_expert(block: str = "mlp", names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> tuple[str, ...]:
    return tuple(f"model.layers.1.{block}.experts.7.{name}.weight" for name in names)


def _language_model(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def _deepseek_v4_name(name: str) -> str:
    name = name.removeprefix("model.")
    for ours, theirs in (
        ("embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
        ("hc_head.hc_", "hc_head_"),
        (".attn.norm.", ".attn.kv_norm."),
    ):
        name = name.replace(ours, theirs)
    return name


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "qwen2_moe",
            "Qwen2MoeConfig",
            {
                "intermediate_size": 48,
                "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 40,
                "num_experts": 8,
                "num_experts_per_tok": 3,
            },
            (*_per_expert(), "model.layers.0.mlp.shared_expert_gate.weight"),
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeConfig",
            {
                "head_dim": 8,
                "intermediate_size": 48,
                "moe_intermediate_size": 24,
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "mlp_only_layers": [0],
                "tie_word_embeddings": True,
            },
            _per_expert(),
        ),
        Family(
            "qwen3_next",
            "Qwen3NextConfig",
            {
                **_LINEAR_ATTENTION,
                "head_dim": 8,
                "intermediate_size": 48,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 24,
                "num_experts": 12,
                "num_experts_per_tok": 3,
            },
            (*_per_expert(), "model.layers.0.linear_attn.in_proj_qkvz.weight"),
            extra={"mtp.layers.0.mlp.experts.0.gate_proj.weight": (16, 32), "mtp.fc.weight": (32, 64)},
        ),
        Family(
            "qwen3_5_moe",
            "Qwen3_5MoeTextConfig",
            {
                **_LINEAR_ATTENTION,
                "head_dim": 8,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 24,
                "num_experts": 8,
                "num_experts_per_tok": 2,
            },
            (
                "model.language_model.layers.1.mlp.experts.gate_up_proj",
                "model.language_model.layers.1.mlp.experts.down_proj",
            ),
            extra={"mtp.fc.weight": (32, 64), "model.visual.blocks.0.attn.proj.weight": (8, 8)},
            wrap="Qwen3_5MoeConfig",
            rename=_language_model,
            hub_from_stacked=True,
        ),
        Family(
            "mixtral",
            "MixtralConfig",
            {"intermediate_size": 40, "num_local_experts": 8, "num_experts_per_tok": 2},
            (*_per_expert("block_sparse_moe", _W), "model.layers.0.block_sparse_moe.gate.weight"),
        ),
        Family(
            "olmoe",
            "OlmoeConfig",
            {"num_key_value_heads": 4, "intermediate_size": 24, "num_experts": 16, "num_experts_per_tok": 4},
            _per_expert(),
        ),
        Family(
            "gpt_oss",
            "GptOssConfig",
            {
                "head_dim": 8,
                "intermediate_size": 24,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "sliding_window": 16,
            },
            tuple(
                f"model.layers.0.mlp.experts.{name}"
                for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
            ),
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2Config",
            {
                **_MLA,
                "intermediate_size": 48,
                "moe_intermediate_size": 16,
                "n_routed_experts": 8,
                "n_shared_experts": 2,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
            },
            (*_per_expert(), "model.layers.1.mlp.shared_experts.gate_proj.weight"),
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3Config",
            {
                **_MLA,
                "intermediate_size": 48,
                "moe_intermediate_size": 16,
                "n_routed_experts": 16,
                "n_group": 4,
                "topk_group": 2,
                "num_experts_per_tok": 4,
                "first_k_dense_replace": 1,
            },
            (*_per_expert(), "model.layers.1.mlp.gate.e_score_correction_bias"),
            extra={
                "model.layers.61.mlp.experts.0.gate_proj.weight": (16, 32),
                "model.layers.0.self_attn.rotary_emb.inv_freq": (2,),
            },
        ),
        Family(
            "deepseek_v4",
            "DeepseekV4Config",
            {
                "num_key_value_heads": 1,
                "head_dim": 16,
                "moe_intermediate_size": 16,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "q_lora_rank": 16,
                "o_groups": 2,
                "o_lora_rank": 8,
                "index_n_heads": 2,
                "index_head_dim": 8,
                "index_topk": 8,
                "sliding_window": 16,
                "hc_mult": 2,
                "layer_types": [
                    "sliding_attention",
                    "compressed_sparse_attention",
                    "heavily_compressed_attention",
                ],
                "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
                "mlp_layer_types": ["hash_moe", "moe", "moe"],
            },
            ("layers.1.ffn.experts.7.w1.weight", "layers.1.ffn.experts.7.w2.weight", "embed.weight", "head.weight"),
            extra={"mtp.0.ffn.experts.0.w1.weight": (16, 32)},
            rename=_deepseek_v4_name,
        ),
        Family(
            "glm4_moe",
            "Glm4MoeConfig",
            {
                "head_dim": 8,
                "intermediate_size": 48,
                "moe_intermediate_size": 16,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
            },
            (*_per_expert(), "model.layers.1.mlp.gate.e_score_correction_bias"),
            extra={"model.layers.46.mlp.experts.0.gate_proj.weight": (16, 32)},
        ),
        Family(
            "granitemoe",
            "GraniteMoeConfig",
            {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True},
            (
                "model.layers.1.block_sparse_moe.input_linear.weight",
                "model.layers.1.block_sparse_moe.output_linear.weight",
                "model.layers.1.block_sparse_moe.router.layer.weight",
            ),
        ),
        Family(
            "phimoe",
            "PhimoeConfig",
            {
                "intermediate_size": 40,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "attention_bias": True,
                "lm_head_bias": True,
            },
            (*_per_expert("block_sparse_moe", _W), "model.layers.0.block_sparse_moe.gate.weight"),
        ),
    )
}


def make_checkpoint(
    name: str,
    layout: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config_changes: Any,
) -> Path:
    """Write a small random checkpoint of family `name` into `folder` (made if needed) and return `folder`.

    Weights are large enough that routing varies and greedy tokens have clear margins.
    """
    family = FAMILIES[name]
    model = make_model(family, dtype=dtype, seed=seed, **config_changes)
    folder.mkdir(parents=True, exist_ok=True)
    if layout == "saved":
        model.save_pretrained(folder)
        return folder
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.generation_config.save_pretrained(folder)
    tensors = _untied(model)
    if layout == "stacked":
        model.config.save_pretrained(folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    assert layout == "hub", layout
    _hub_config(family, model.config).save_pretrained(folder)
    if not family.hub_from_stacked:
        tensors = {key: value.contiguous() for key, value in revert_weight_conversion(model, tensors).items()}
    if family.rename is not None:
        tensors = {family.rename(key): value for key, value in tensors.items()}
    absent = [key for key in family.hub_names if key not in tensors]
    assert not absent, f"{name}: the hub has {absent}, this checkpoint has {sorted(tensors)}"
    extra = {key: torch.randn(shape).to(dtype) for key, shape in family.extra.items()}
    write_shards({**tensors, **extra}, folder, num_files=3)
    return folder


def make_model(family: Family, *, dtype: torch.dtype = torch.float32, seed: int = 0, **config_changes: Any) -> Any:
    """The family's model with seeded random weights, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(family.make_config(**config_changes), dtype=torch.float32)
        with torch.no_grad():
            for key, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
                _randomise(key, tensor, model.config)
    return model.to(dtype).eval()


def _randomise(key: str, tensor: torch.Tensor, config: Any) -> None:
    if key.endswith("tid2eid"):  # deepseek_v4: expert ids per token id in layers routed by a hash
        rows, top_k = tensor.shape
        tensor.copy_(torch.stack([torch.randperm(config.n_routed_experts)[:top_k] for _ in range(rows)]))
    elif "inv_freq" in key or not tensor.is_floating_point():
        return
    elif "embed_tokens" in key or "lm_head" in key:
        tensor.normal_(0.0, 1.0)
    elif tensor.ndim >= 2:
        tensor.normal_(0.0, 0.3)
    else:  # norms, biases, decay rates: around what the family starts from
        tensor.add_(0.1 * torch.randn_like(tensor))


def _untied(model: Any) -> dict[str, torch.Tensor]:
    tied = set(model.all_tied_weights_keys)
    return {key: value.contiguous() for key, value in model.state_dict().items() if key not in tied}


def _hub_config(family: Family, config: Any) -> Any:
    if family.wrap is None:
        return config
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 32}
    whole = getattr(transformers, family.wrap)(text_config=config.to_dict(), vision_config=vision)
    whole.architectures = [family.wrap.replace("Config", "ForConditionalGeneration")]
    return whole


def write_shards(tensors: dict[str, torch.Tensor], folder: Path, num_files: int) -> None:
    """Spread the tensors over files with an index, alternating, so that one expert's tensors lie in several files."""
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        file_name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = dict(list(tensors.items())[number::num_files])
        save_file(part, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
