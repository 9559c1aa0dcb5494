"""Stands in for the processes that the tuner starts: answers a job at once, with speeds from a formula.

    python fake_tune_worker.py KIND

KIND: `better` (8 read threads and lfu are much faster), `flat` (nothing matters), `fragile` (queue depths over 16 die of
memory), `failing` (every run is an error), `differing` (tokens depend on the policy), `hog` (lfu takes more memory than it was
given), `swelling` (better, but too large at full context), `slow` (a run sleeps), `liar` (better on the search's prompts only).
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

MIB = 1 << 20
SPEC = {
    "name": "fake", "model_type": "qwen3_moe", "digest": "f" * 64, "num_layers": 4, "num_experts": 16, "top_k": 2,
    "hidden_size": 64, "record_bytes": 4 * MIB, "slot_bytes": 4 * MIB, "dense_bytes": 8 * MIB, "kv_bytes_per_token": 1024,
    "state_bytes": 0, "dtype": "bfloat16", "max_context": 512, "vocab_size": 1000,
}  # fmt: skip


def seconds_per_token(kind: str, knobs: dict, noise: float, searching: bool = True) -> float:
    """The formula: 20 ms, less with more reading threads and for lfu; `noise` multiplies it."""
    base = 0.020
    if kind in ("better", "fragile", "hog", "differing", "slow", "swelling") or (kind == "liar" and searching):
        base *= 1.0 - 0.06 * min(8, knobs["read_threads"])
        base *= 0.8 if knobs["policy"] == "lfu" else 1.0
        base *= 1.0 + 0.5 * (1.0 - (knobs["slots"] or 64) / 64)
    return base * noise


def probe(job: dict) -> dict:
    """What the probing worker answers."""
    link = {
        "kind": "disk", "record_bytes": 4 * MIB, "bytes_per_s_p10": 1e9, "bytes_per_s_p50": 1.2e9,
        "bytes_per_s_together": 1.5e9, "latency_us": 90.0, "samples": 20,
    }  # fmt: skip
    return {
        "spec": SPEC,
        "process_bytes": 100 * MIB,
        "packages": {"torch": "9"},
        "link": link if job["link_seconds"] else None,
    }


def answer(kind: str, job: dict) -> dict:
    """What the measuring worker answers."""
    knobs = job["knobs"]
    if kind == "failing":
        return {"error": {"type": "LinkError", "message": "the disk is gone", "exit_code": 7}}
    noise = random.Random(json.dumps([knobs, job["prompts"], time.time_ns()])).gauss(1.0, 0.01)
    first = job["prompts"][0] if isinstance(job["prompts"][0], str) else ""
    per_token = seconds_per_token(kind, knobs, noise, first.startswith("The old lighthouse"))
    salt = knobs["policy"] if kind == "differing" else ""
    tokens = [[hash_of(f"{prompt}{i}{salt}") for i in range(job["max_new_tokens"])] for prompt in job["prompts"]]
    steps = len(tokens) * job["max_new_tokens"]
    peak = job["memory_bytes"] + (MIB if kind == "hog" and knobs["policy"] == "lfu" else -MIB)
    if kind == "swelling" and not first:  # the run at full context, on token ids
        peak += 9 * MIB
    return {
        "decode_tokens_per_s": 1 / per_token, "ttft_s": 0.1, "hit_rate": 0.8, "bytes_read": steps * 1000, "peak_rss_bytes": peak,
        "token_ids": tokens, "slots": knobs["slots"] or 64, "residency": (knobs["slots"] or 64) / 64, "stall_s": 0.0, "steps": steps,
        "per_step_s": [per_token] * steps, "mode": job["mode"], "knobs": knobs, "memory_plan": {"slots": knobs["slots"] or 64},
    }  # fmt: skip


def main() -> int:
    kind, job = sys.argv[1], json.loads(sys.stdin.read())
    if kind == "fragile" and job["knobs"]["queue_depth"] > 16:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "slow":
        Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
        time.sleep(60)
    found = answer(kind, job)
    print("a line that is no answer")
    print(json.dumps(found))
    return found.get("error", {}).get("exit_code", 0)


def hash_of(text: str) -> int:
    """A token that depends on the text alone, in every process."""
    return sum(ord(c) * 31**i for i, c in enumerate(text[-8:])) % 997


if __name__ == "__main__":
    sys.exit(main())
