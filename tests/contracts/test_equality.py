"""Design section 7: logits are bit-identical between `full` and every other mode and residency, and greedy tokens are
those of Transformers' own `eager` experts: identical in float32; in bf16 they may first differ only where Transformers'
implementations, too, disagree by more than the margin between the top two tokens.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.families import FAMILIES, make_checkpoint
from support.toy_traces import random_trace
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from seqmoe.predictors.routers import SpecPrefetch
from seqmoe.predictors.trace import Trace
from seqmoe.runtime.checkpoint import Checkpoint
from seqmoe.runtime.engine import Engine
from seqmoe.runtime.policy import GIVEN, LAYERS, PERFECT, POLICIES

PROMPTS = [[5, 17, 33, 2, 71], [90, 8, 8, 41, 3, 12, 64, 1, 77, 20], [44, 45]]
NEW_TOKENS = 64
QUICK = ("qwen3_moe", "gpt_oss")  # the rest takes minutes: each engine captures and checks a decode step of its own
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
CASES = [
    pytest.param(name, layout, marks=() if (name, layout) == ("qwen3_moe", "hub") else pytest.mark.slow)
    for name in FAMILIES
    for layout in ("saved", "hub")
]
# modes whose decisions depend on more than what was used: forecasts, the future, a prompt's counts
AHEAD = [
    name
    for name, policy in POLICIES.items()
    if policy.plan is not None
    and (policy.predictor is not None or policy.plan.eviction in ("prefill-hot", "belady", "belady-8"))
]
QUICK_AHEAD = ("seqmoe-no-restraint", "seqmoe-early-binding", "moe-infinity", "specprefetch", "foresight")


class Capture(LogitsProcessor):
    """Keeps a copy of each step's logits."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logits.append(scores.clone())
        return scores


class Force(LogitsProcessor):
    """Makes `token` the next one."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token] = 0.0
        return forced


def engine_run(
    folder: Path, prompts: list[list[int]], new_tokens: int, **options: Any
) -> tuple[list[list[int]], torch.Tensor]:
    capture = Capture()
    with Engine.open(folder, context=128, batch=len(prompts), **options) as engine:
        report = engine.generate(prompts, new_tokens, ignore_eos=True, logits_processor=LogitsProcessorList([capture]))
        if engine.residency is not None:
            engine.residency.check_integrity()
    return report.token_ids, torch.stack(capture.logits)


def reference(
    folder: Path, prompts: list[list[int]], new_tokens: int, implementation: str = "eager"
) -> tuple[list[list[int]], torch.Tensor]:
    """Transformers alone: tokens and logits [steps, batch, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", experts_implementation=implementation).eval()
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    capture = Capture()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None,
            logits_processor=LogitsProcessorList([capture]),
        )  # fmt: skip
    return out[:, longest:].tolist(), torch.stack(capture.logits)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[str, str, torch.dtype], Path] = {}

    def get(name: str, layout: str, dtype: torch.dtype = torch.float32) -> Path:
        key = (name, layout, dtype)
        if key not in made:
            made[key] = make_checkpoint(name, layout, tmp_path_factory.mktemp(f"{name}-{layout}"), dtype=dtype)
        return made[key]

    return get


def test_modes_agree_bit_for_bit_at_the_smallest_pool(folders: Any) -> None:
    folder = folders("gpt_oss", "saved")
    tokens, logits = engine_run(folder, PROMPTS, 12, mode="full")
    for options in ({"mode": "lru", "slots": 2}, {"mode": "static", "residency": 0.25, "popularity": np.arange(24)}):
        got_tokens, got = engine_run(folder, PROMPTS, 12, **options)
        assert got_tokens == tokens, options
        assert torch.equal(got, logits), options


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_float32_tokens_equal_transformers_eager(folders: Any, name: str, layout: str) -> None:
    folder = folders(name, layout)
    for prompts in ([PROMPTS[0]], [PROMPTS[1]], [PROMPTS[2]], PROMPTS):
        want, want_logits = reference(folder, prompts, NEW_TOKENS)
        got, got_logits = engine_run(folder, prompts, NEW_TOKENS, mode="lru", residency=0.25)
        assert got == want
        torch.testing.assert_close(got_logits, want_logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_mode_and_residency_gives_bit_identical_logits(folders: Any, name: str) -> None:
    folder = folders(name, "saved")
    for prompts in ([PROMPTS[1]], PROMPTS):
        tokens, logits = engine_run(folder, prompts, 16, mode="full")
        runs = [("eager", None)] + [(mode, share) for mode in ("lru", "lfu", "static") for share in (None, 0.25, 1.0)]
        for mode, share in runs:
            options: dict[str, Any] = {"mode": mode}
            if share is not None:
                options["residency"] = share
            elif mode != "eager":
                options["slots"] = (
                    4
                    if name in ("qwen3_moe", "olmoe", "deepseek_v3")
                    else 3
                    if "qwen" in name and name != "qwen3_5_moe"
                    else 2
                )
            if mode == "static":
                options["popularity"] = torch.arange(_experts(folder)).numpy()
            got_tokens, got = engine_run(folder, prompts, 16, **options)
            assert got_tokens == tokens, (mode, share)
            assert torch.equal(got, logits), (mode, share, float((got - logits).abs().max()))


def trace_of(folder: Path) -> Trace:
    """Random routing for the checkpoint's shape, with tokens."""
    checkpoint = Checkpoint.open(folder)
    return random_trace([31, 29], checkpoint.num_layers, checkpoint.num_experts, _top_k(folder), seed=7)


def adapters(folder: Path) -> SpecPrefetch:
    """SpecPrefetch's, untrained."""
    checkpoint, rng = Checkpoint.open(folder), np.random.default_rng(3)
    pairs, experts, hidden = checkpoint.num_layers - 1, checkpoint.num_experts, checkpoint.facts.hidden_size
    shapes = ((pairs, 1, 4, hidden), (pairs, 1, experts, 4), (pairs, 1, experts))
    return SpecPrefetch(*(rng.standard_normal(shape).astype(np.float32) for shape in shapes))


def oracle_options(folder: Path, mode: str) -> dict[str, Any]:
    """What a mode has to know: a rival fitted to routing out of nothing, adapters out of nothing, or the future."""
    policy, trace = POLICIES[mode], trace_of(folder)
    if policy.predictor == LAYERS:
        return {"predictor": adapters(folder), "popularity": trace.popularity()}
    if policy.predictor == PERFECT or mode in ("belady", "belady-8"):
        return {"replay": trace}
    given = {"predictor": "nearest-token"} if policy.predictor == GIVEN else {}
    return {"fit": trace, **given}


def check_mode(
    folder: Path, mode: str, prompts: list[list[int]], new_tokens: int, shares: tuple[float | None, ...]
) -> None:
    """Tokens and logits of a mode at some residencies (None: as few slots as one layer of one token needs) are those of
    `full`, which routes as the mode does."""
    options = oracle_options(folder, mode)
    same_routing = {"replay": options["replay"]} if "replay" in options else {}
    tokens, logits = engine_run(folder, prompts, new_tokens, mode="full", **same_routing)
    for share in shares:
        size = {"slots": _top_k(folder)} if share is None else {"residency": share}
        got_tokens, got = engine_run(folder, prompts, new_tokens, mode=mode, **options, **size)
        assert got_tokens == tokens, (mode, share)
        assert torch.equal(got, logits), (mode, share, float((got - logits).abs().max()))


@pytest.mark.parametrize("mode", QUICK_AHEAD)
def test_fetching_ahead_changes_no_bit(folders: Any, mode: str) -> None:
    check_mode(folders("gpt_oss", "saved"), mode, [PROMPTS[0]], 10, (0.5,))


@pytest.mark.slow
@pytest.mark.parametrize("mode", AHEAD)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_mode_that_looks_ahead_gives_bit_identical_logits(folders: Any, name: str, mode: str) -> None:
    """Each family and each mode at one of the residencies, alone or as a batch; over all of them, everything meets."""
    number = list(FAMILIES).index(name) + AHEAD.index(mode)
    share = (None, 0.25, 0.5, 0.75)[number % 4]
    check_mode(folders(name, "saved"), mode, PROMPTS if number % 3 == 0 else [PROMPTS[1]], 12, (share,))


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_differs_from_eager_only_within_transformers_own_spread(folders: Any, name: str) -> None:
    folder = folders(name, "saved", torch.bfloat16)
    prompts = [PROMPTS[1]]
    want, logits = reference(folder, prompts, 32)
    got, _ = engine_run(folder, prompts, 32, mode="lru", residency=0.5)
    if got == want:
        return
    step = next(i for i, (a, b) in enumerate(zip(got[0], want[0], strict=True)) if a != b)
    top = logits[step, 0].topk(2).values
    spread = _spread(folder, prompts[0] + want[0][:step])
    assert float(top[0] - top[1]) <= spread, f"step {step}: margin {float(top[0] - top[1])} > spread {spread}"


def _spread(folder: Path, ids: list[int]) -> float:
    """Largest difference between the last logits of Transformers' own implementations (of experts and of attention) on
    the same tokens, in one go and with the last token fed by itself."""
    last = []
    for experts in ("eager", "batched_mm", "grouped_mm"):
        for attention in ("eager", "sdpa"):
            try:
                model = AutoModelForCausalLM.from_pretrained(
                    folder, dtype="auto", experts_implementation=experts, attn_implementation=attention
                ).eval()
            except ValueError:  # this family has only one of them
                continue
            with torch.inference_mode():
                last.append(model(torch.tensor([ids])).logits[0, -1].float())
                step = model.generate(
                    torch.tensor([ids[:-1]]), max_new_tokens=2, do_sample=False, output_logits=True,
                    return_dict_in_generate=True, pad_token_id=0, eos_token_id=None, logits_processor=[Force(ids[-1])],
                )  # fmt: skip
                last.append(step.logits[1][0].float())
    return max(float((a - b).abs().max()) for a in last for b in last)


def _top_k(folder: Path) -> int:
    return Checkpoint.open(folder).facts.top_k


def _experts(folder: Path) -> int:
    checkpoint = Checkpoint.open(folder)
    return checkpoint.num_layers * checkpoint.num_experts
