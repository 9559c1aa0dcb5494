"""Train the demo model: a small Qwen3-MoE on one CPU core, and save it as an ordinary Hugging Face checkpoint.

    python examples/demo_model/train.py --text TEXT_DIR --state STATE_DIR --minutes 95

Starting it again goes on from the last save, with the options then given. Minutes are of this process's CPU time, so a
process that was stopped for a while loses nothing.
"""

import copy
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from corpus import EOS, encode, held_out_windows, load_corpus, train_batch
from fast_experts import register
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).resolve().parent
FIRST_SAVE_MINUTES = 8.0
SAVE_EVERY_MINUTES = 10.0
VAL_WINDOWS = 8  # per source


def build_tokenizer(documents: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE, so that any text can be encoded and no unknown token is needed."""
    tokenizer = Tokenizer(models.BPE())
    # Digits one by one: sums are learnt digit by digit, and the vocabulary is not spent on numbers.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def build_config(vocab: int, aux: float) -> Qwen3MoeConfig:
    """About 13.6M parameters, of which about 1.8M are used per token."""
    return Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        intermediate_size=256,  # of dense layers, of which there are none
        decoder_sparse_step=1,
        norm_topk_prob=True,
        router_aux_loss_coef=aux,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


class RouterLoss:
    """Collects every layer's router logits in a forward pass, and gives the losses on them.

    Transformers' own balancing loss averages over the layers before it multiplies, so that one layer's dead expert
    can hide behind another's busy one. This one is per layer.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.logits: list[Tensor] = []
        self.rows = rows
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(lambda _m, _i, out: self.logits.append(out[0]))

    def take(self, top_k: int) -> tuple[Tensor, Tensor]:
        """Balance (1 when even) and switching (chance that two neighbouring tokens disagree), means over layers."""
        balance, switching = [], []
        for logits in self.logits:  # (T, E)
            probs = logits.softmax(-1)
            chosen = torch.zeros_like(probs).scatter_(1, probs.topk(top_k).indices, 1.0 / top_k)
            balance.append(probs.size(1) * (chosen.mean(0) * probs.mean(0)).sum())
            by_row = probs.view(self.rows, -1, probs.size(1))
            switching.append(0.5 * (by_row[:, 1:] - by_row[:, :-1]).abs().sum(-1).mean())
        self.logits.clear()
        return torch.stack(balance).mean(), torch.stack(switching).mean()


@torch.no_grad()
def val_losses(model: Any, windows: dict[str, NDArray[np.int32]]) -> dict[str, float]:
    """Mean loss in nats per token for each source's held-out windows, and `mean` over the sources."""
    losses = {}
    for name, batch in windows.items():
        ids = torch.from_numpy(batch).long()
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        losses[name] = float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
    return losses | {"mean": sum(losses.values()) / len(losses)}


def save_checkpoint(model: Any, tokenizer: Tokenizer, record: dict[str, Any], folder: Path) -> None:
    """Write bf16 weights, tokenizer and record to `folder`; a reader sees the old one or the new one, never a part."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, bos_token=EOS, pad_token=EOS, model_max_length=8192
    )
    fast.save_pretrained(fresh)
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    half.save_pretrained(fresh)
    (fresh / "training.json").write_text(json.dumps(record) + "\n")
    for path in fresh.iterdir():
        path.chmod(0o644)  # safetensors makes them private
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def save_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, record: dict[str, Any]) -> None:
    """Write what a restart needs. Randomness is a function of seed and step, so no generator state is kept."""
    fresh = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "record": record}, fresh)
    os.replace(fresh, path)


def learning_rate(progress: float, step: int, peak: float) -> float:
    """Warm-up over 100 steps, then a cosine over the CPU budget (progress 0..1) down to a fiftieth of the peak."""
    return min(1.0, (step + 1) / 100) * peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@click.command(context_settings={"show_default": True})
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True, help="Folder with the text.")
@click.option("--state", type=click.Path(path_type=Path), required=True, help="Folder for the optimizer's state.")
@click.option("--out", type=click.Path(path_type=Path), default=HERE / "checkpoint", help="Checkpoint folder.")
@click.option("--minutes", default=95.0, help="CPU minutes in all, restarts included.")
@click.option("--seed", default=0)
@click.option("--vocab", default=4096)
@click.option("--rows", default=8, help="Sequences per step.")
@click.option("--length", default=256, help="Tokens per sequence.")
@click.option("--lr", default=2e-3, help="Peak learning rate.")
@click.option("--aux", default=0.005, help="Weight of the load-balancing loss.")
@click.option("--locality", default=0.0, help="Weight of the loss on switching experts between tokens.")
@torch.enable_grad()
def main(
    text: Path, state: Path, out: Path, minutes: float, seed: int, vocab: int, rows: int, length: int, lr: float,
    aux: float, locality: float,
) -> None:  # fmt: skip
    """Train the demo model."""
    torch.manual_seed(seed)
    state.mkdir(parents=True, exist_ok=True)
    splits = load_corpus(text, seed)
    tokenizer_path, state_path = state / "tokenizer.json", state / "state.pt"
    if not tokenizer_path.exists():
        build_tokenizer([doc for split in splits.values() for doc in split.train], vocab).save(str(tokenizer_path))
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    streams = {name: encode(split.train, tokenizer) for name, split in splits.items()}
    held_out = {name: encode(split.held_out, tokenizer) for name, split in splits.items()}
    windows = {name: held_out_windows(ids, VAL_WINDOWS, length) for name, ids in held_out.items() if len(ids) > length}
    sizes = {name: len(ids) for name, ids in streams.items()}
    click.echo(f"tokens: train {sizes}, held out {sum(map(len, held_out.values()))}")

    model: Any = Qwen3MoeForCausalLM._from_config(
        build_config(tokenizer.get_vocab_size(), aux), experts_implementation=register(), attn_implementation="sdpa"
    )
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=lr, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    record: dict[str, Any] = {
        "seed": seed, "parameters": sum(p.numel() for p in model.parameters()), "step": 0, "tokens": 0,
        "cpu_minutes": 0.0, "next_save": FIRST_SAVE_MINUTES, "settings": [], "curve": [], "val": {},
    }  # fmt: skip
    if state_path.exists():
        saved = torch.load(state_path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        record = saved["record"]
    settings = {"minutes": minutes, "rows": rows, "length": length, "lr": lr, "aux": aux, "locality": locality}
    record["settings"].append({"from_step": record["step"], **settings})
    click.echo(f"parameters {record['parameters']:,}, start at step {record['step']}")

    router = RouterLoss(model, rows)
    offset = record["cpu_minutes"] - time.process_time() / 60  # set-up is not training time
    totals, summed = np.zeros(3), 0  # loss, balance, switching of the steps since the last line
    model.train()
    while record["cpu_minutes"] < minutes:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(record["cpu_minutes"] / minutes, record["step"], lr)
        ids = torch.from_numpy(train_batch(streams, rows, length, seed, record["step"])).long()
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        balance, switching = router.take(model.config.num_experts_per_tok)
        objective = loss + aux * balance + locality * switching
        objective.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        record["step"] += 1
        record["tokens"] += rows * length
        record["cpu_minutes"] = offset + time.process_time() / 60
        totals += [loss.item(), balance.item(), switching.item()]
        summed += 1
        if record["step"] % 50 == 0:
            mean = (totals / summed).tolist()  # Python's own numbers: a state file may hold no others
            totals[:], summed = 0, 0
            record["curve"].append([record["step"], round(record["cpu_minutes"], 2), round(mean[0], 4)])
            click.echo(
                f"step {record['step']} cpu_min {record['cpu_minutes']:.2f} tokens {record['tokens']:,} "
                f"loss {mean[0]:.4f} balance {mean[1]:.3f} switching {mean[2]:.3f}"
            )
        done = record["cpu_minutes"] >= minutes
        if done or record["cpu_minutes"] >= record["next_save"]:
            record["next_save"] = record["cpu_minutes"] + SAVE_EVERY_MINUTES
            rounded = copy.deepcopy(model).to(torch.bfloat16)
            record["val"] = val_losses(rounded if done else rounded.float(), windows)
            router.logits.clear()  # the copy's hooks append to the same list
            record["final"] = done
            save_state(state_path, model, optimizer, record)
            save_checkpoint(model, tokenizer, record, out)
            click.echo("saved; val " + ", ".join(f"{name} {loss:.4f}" for name, loss in record["val"].items()))
            offset = record["cpu_minutes"] - time.process_time() / 60  # saving is not training time


if __name__ == "__main__":
    main()
