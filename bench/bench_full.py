"""Everything in memory: our `full` and a pool of 100% against each of Transformers' experts implementations, one process,
rounds in turns, medians. Needs three times the model's size in RAM.

    python bench/bench_full.py --model demo-xl [--tokens 24] [--rounds 5] [--threads 2]
"""

import json
import time
from statistics import median

import click
import torch
from transformers import AutoModelForCausalLM

from seqmoe.profiles.knobs import Knobs
from seqmoe.runtime.engine import Engine
from seqmoe.runtime.models import resolve_model

PROMPT = "Question: Tom has 12 apples. He gives 5 to Anna and buys 8 more. How many apples does Tom have now?\nAnswer:"
THEIRS = ("eager", "batched_mm", "grouped_mm")


@click.command()
@click.option("--model", default="demo-xl", show_default=True)
@click.option("--tokens", default=24, show_default=True, help="Tokens decoded in each run.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", type=int, help="Threads for all. [default: one per core]")
def main(model: str, tokens: int, rounds: int, threads: int | None) -> None:
    """Print tokens/s of each, the ratios, and JSON as the last line."""
    folder, knobs = resolve_model(model), Knobs(compute_threads=threads)
    with (
        Engine.open(folder, mode="full", knobs=knobs, context=512) as full,
        Engine.open(folder, mode="lru", residency=1.0, knobs=knobs, context=512) as pool,
    ):
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        inputs = full.tokenizer(PROMPT, return_tensors="pt")

        def ours(engine: Engine) -> float:
            report = engine.generate([PROMPT], tokens + 1, ignore_eos=True)
            return report.decode_tokens_per_s

        @torch.inference_mode()
        def transformers(implementation: str) -> float:
            theirs.set_experts_implementation(implementation)
            times: list[float] = []

            class Clock:
                def put(self, _: torch.Tensor) -> None:
                    times.append(time.perf_counter())

                def end(self) -> None: ...

            theirs.generate(
                **inputs,
                max_new_tokens=tokens + 1,
                do_sample=False,
                streamer=Clock(),
                eos_token_id=None,
                pad_token_id=0,
            )
            # times[0] is the prompt, times[1] the first token: what follows is decode.
            return (len(times) - 2) / (times[-1] - times[1])

        arms = {"seqmoe full": lambda: ours(full), "seqmoe pool 100%": lambda: ours(pool)}
        arms |= {f"transformers {name}": (lambda name=name: transformers(name)) for name in THEIRS}
        runs: dict[str, list[float]] = {name: [] for name in arms}
        for run in arms.values():
            run()  # fills the pool, compiles, touches the weights
        for number in range(rounds):
            for name in list(arms)[:: -1 if number % 2 else 1]:
                runs[name].append(arms[name]())
    speeds = {name: median(values) for name, values in runs.items()}
    for name, values in runs.items():
        click.echo(f"{name:26} {speeds[name]:7.2f} tokens/s  [{min(values):.2f} - {max(values):.2f}]")
    best = max(speeds[f"transformers {name}"] for name in THEIRS)
    pairs = [b / a for a, b in zip(runs["seqmoe full"], runs["seqmoe pool 100%"], strict=True)]
    result = {
        "model": model,
        "tokens": tokens,
        "rounds": rounds,
        "decode_tokens_per_s": speeds,
        "values": runs,
        "full_over_best_transformers": speeds["seqmoe full"] / best,
        "pool_over_full": median(pairs),
    }
    click.echo(
        f"full / best of Transformers: {result['full_over_best_transformers']:.2f}; pool 100% / full: {result['pool_over_full']:.3f}"
    )
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
