"""The engine: opens a checkpoint under a memory budget, hooks its experts, generates, reports.

    with Engine.open("demo", mode="lru", memory_bytes=parse_bytes("800MiB")) as engine:
        report = engine.generate(["Once upon a time"], max_new_tokens=64)

`engine.model` is the ordinary Transformers model: `engine.model.generate(...)` works unchanged.
"""

import copy
import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from seqmoe.predictors.protocol import LayerPredictor, Predictor
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_file import read_trace
from seqmoe.predictors.trace_forecasts import TraceForecasts
from seqmoe.profiles.budget import PREFILL_TOKENS, MemoryPlan, effective_budget, plan_memory
from seqmoe.profiles.cgroup import affinity_count, cpu_quota, usable_cores
from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.machine import memory_facts, peak_rss_bytes, rss_bytes
from seqmoe.profiles.spec import LinkSpec, ModelSpec
from seqmoe.runtime.assemble import Oracles, build_prefetcher, build_runner, warm_up
from seqmoe.runtime.belady_gap import BeladyGap
from seqmoe.runtime.checkpoint import Checkpoint
from seqmoe.runtime.eviction import PrefillHot
from seqmoe.runtime.experts import bind, unbind
from seqmoe.runtime.extents import plan_records
from seqmoe.runtime.fetching import Fetching
from seqmoe.runtime.generate import Recording, StepGraph, decode_loop
from seqmoe.runtime.graph import DecodeGraph
from seqmoe.runtime.graph_tape import GraphUnsupported
from seqmoe.runtime.kernels.experts_cpu import ExpertsCompute
from seqmoe.runtime.link import open_link
from seqmoe.runtime.models import model_id, resolve_model
from seqmoe.runtime.policy import POLICIES, Plan
from seqmoe.runtime.pool import Pool
from seqmoe.runtime.popularity import measured_popularity
from seqmoe.runtime.replay import Replay
from seqmoe.runtime.report import RunReport, Totals
from seqmoe.runtime.residency import Residency
from seqmoe.runtime.runner import CachedRunner, ResidentRunner
from seqmoe.runtime.skeleton import load_skeleton
from seqmoe.runtime.store import Progress, Store

log = logging.getLogger("seqmoe")

MODES = tuple(POLICIES)


class Engine:
    """One open model. Not safe for two requests at once: a second `generate` meanwhile is refused. See `open`."""

    def __init__(
        self,
        *,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        plan: MemoryPlan,
        mode: str,
        knobs: Knobs,
        store: Store,
        model: Any,
        context: int,
        batch: int,
    ) -> None:
        """Use `Engine.open`."""
        self.checkpoint = checkpoint
        self.spec = spec
        self.plan = plan
        self.mode = mode
        self.knobs = knobs
        self.store = store
        self.model = model
        self.context = context
        self.batch = batch
        self.totals = Totals()
        self.residency: Residency | None = None
        self.fetching: Fetching | None = None
        self.runner: ResidentRunner | CachedRunner
        self.replay: Replay | None = None
        self.graph_notice: str | None = None
        self._modules = [model.get_submodule(name) for name in checkpoint.moe_modules]
        self._graph_wanted = True
        self._graphs: dict[int, DecodeGraph | None] = {}  # by batch; None where it cannot be captured
        self._tokenizer: Any = None
        self.gap: BeladyGap | None = None  # live: how far the cache is from the optimum
        self._decoding = False  # the pass that runs, or ran last
        self._hits = 0  # residency's, when it began
        self._prompt: torch.Tensor | None = None  # until its first decode step
        self._mask: torch.Tensor | None = None  # of the prompt
        self._busy = False
        self._closed = False

    @classmethod
    def open(
        cls,
        model: str | Path | Checkpoint,
        *,
        mode: str | None = None,
        knobs: Knobs | None = None,
        memory_bytes: int | None = None,
        slots: int | None = None,
        residency: float | None = None,
        context: int = 2048,
        batch: int = 1,
        link: str | LinkSpec = "disk",
        replay: Path | Trace | None = None,
        popularity: ArrayLike | None = None,
        policy: Plan | None = None,
        predictor: str | Path | Predictor | LayerPredictor | None = None,
        forecasts: TraceForecasts | None = None,
        fit: Path | Trace | None = None,
        graph: bool = True,
        progress: Progress | None = None,
    ) -> "Engine":
        """Opens `model` (a folder, a name that `resolve_model` knows, or a checkpoint that is open already).

        `mode` (default: the knobs' policy) is one of `policy.POLICIES`: `full` keeps every expert in memory; `eager` keeps
        none between layers; all others keep as many as `slots` says, else `residency` (a share of all experts), else as many
        as `memory_bytes` holds with the KV cache of `context` tokens x `batch`. `policy` replaces the mode's plan.

        Modes that forecast need a `predictor` (a folder of `seqmoe train`, a rival's name, or the thing itself), rivals a
        trace to `fit` it to; `forecasts` are made beforehand for the rows of `replay`. Modes that know the future need
        `replay`. `popularity` [L * E] are counts; without them, and without `fit`, a short text is run once to count.
        `graph=False` leaves the decode step to the model's own Python.

        Raises UsageError, BudgetError, CheckpointError, LinkError: one line each.
        """
        knobs = knobs or Knobs()
        mode = mode or knobs.policy
        if mode not in MODES:
            raise UsageError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if residency is not None and not 0 < residency <= 1:
            raise UsageError(f"residency must be above 0 and at most 1, got {residency}")
        if batch < 1 or context < 1:
            raise UsageError(f"batch and context must be at least 1, got batch {batch}, context {context}")
        threads = knobs.compute_threads or usable_cores(affinity_count(), cpu_quota())
        torch.set_num_threads(threads)

        checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(resolve_model(str(model)))
        records = plan_records(checkpoint.layout, checkpoint.sources, [path.stat().st_size for path in checkpoint.files])
        name = model_id(checkpoint.folder if isinstance(model, Checkpoint) else model)
        spec = dataclasses.replace(checkpoint.spec(records.slot_bytes), name=name)
        total = spec.total_experts
        if mode == "full":
            slots = total
        elif mode == "eager":
            slots = slots or min(total, spec.top_k * batch)
        elif slots is None and residency is not None:
            slots = max(1, math.floor(residency * total + 0.5))
        if slots is not None:
            knobs = knobs.replace(slots=min(slots, total))
        trace = read_trace(replay) if isinstance(replay, Path) else replay
        fitted = read_trace(fit) if isinstance(fit, Path) else fit
        oracles = None
        if mode != "full":  # before memory is planned: a predictor takes some
            if mode.startswith("belady") and mode != "belady-f8" and trace is None:
                raise UsageError(f"mode {mode} needs the trace that is replayed: it looks into the future")
            oracles = Oracles(mode, spec, plan=policy, predictor=predictor, forecasts=forecasts, fit=fitted, replay=trace)
        plan = cls._plan_memory(memory_bytes, spec, context, batch, knobs)
        pool = Pool(plan.slots, records.slot_bytes)
        store = Store(records, pool, open_link(checkpoint.files, LinkSpec.parse(link), knobs), progress=progress)
        try:
            disable_progress_bar()  # Transformers' own, for the few weights that are not experts
            skeleton = load_skeleton(checkpoint)
            engine = cls(
                checkpoint=checkpoint,
                spec=spec,
                plan=plan,
                mode=mode,
                knobs=knobs,
                store=store,
                model=skeleton,
                context=context,
                batch=batch,
            )
            computes = [
                ExpertsCompute(checkpoint.layout, module, checkpoint.dtype, threads) for module in engine._modules
            ]
            if oracles is None:
                engine.runner = ResidentRunner(computes, store.load_all(progress), engine.totals)
            else:
                if popularity is None and fitted is not None:
                    popularity = fitted.popularity()
                engine._start_cached(oracles, computes, popularity, trace)
            bind(skeleton, engine._modules, engine.runner)
            engine._graph_wanted = graph
            if trace is not None:
                engine.replay = Replay(trace, batch)
                engine.replay.check(spec.num_layers, spec.num_experts, spec.top_k)
                engine.runner.replay = engine.replay
            if oracles is not None and popularity is None and trace is None and engine._wants_popularity(oracles.plan):
                engine._start_cached(oracles, computes, measured_popularity(engine), trace)
                bind(skeleton, engine._modules, engine.runner)
            return engine
        except BaseException:
            store.close()
            raise

    @staticmethod
    def _plan_memory(memory_bytes: int | None, spec: ModelSpec, context: int, batch: int, knobs: Knobs) -> MemoryPlan:
        budget = effective_budget(memory_bytes, memory_facts())
        if memory_bytes is not None and budget.budget_bytes < memory_bytes:
            log.warning("memory budget is %s", budget.explanation)
        return plan_memory(budget.budget_bytes, spec, context, batch, knobs, rss_bytes())

    def _start_cached(
        self, oracles: Oracles, computes: Sequence[ExpertsCompute], popularity: ArrayLike | None, trace: Trace | None
    ) -> None:
        """Tables, predictor and worker of a policy that keeps a part of the experts. Again when popularity is known."""
        spec = self.spec
        if self.fetching is not None:
            self.fetching.close()
        counts = None if popularity is None else np.asarray(popularity)
        by_popularity = oracles.plan.eviction in ("static", "prefill-hot")
        if by_popularity and counts is None:  # until it is measured, all are alike
            counts = np.ones(spec.total_experts) if trace is None else trace.popularity()
        build = partial(build_prefetcher, oracles, spec, self.plan.slots, self.batch, replay=trace, popularity=counts)
        if oracles.plan.uses_forecast:
            warm_up(build(), oracles.forecaster)
        prefetcher = build()
        chance = None
        if popularity is not None and counts is not None and not by_popularity:
            by_layer = counts.reshape(spec.num_layers, spec.num_experts).astype(np.float64)
            chance = spec.top_k * by_layer / np.maximum(by_layer.sum(axis=1, keepdims=True), 1.0)
        runner = build_runner(oracles, computes, prefetcher, self.store, self.totals, chance)
        self.residency, self.runner, self.fetching = prefetcher.residency, runner, runner.fetching
        self.gap = BeladyGap(self.plan.slots, spec.num_layers, spec.num_experts)
        if by_popularity and counts is not None and (popularity is not None or trace is not None):
            runner.preload(counts)
        if isinstance(prefetcher.eviction, PrefillHot):
            runner.prompt_counts = np.zeros(spec.total_experts, dtype=np.int64)

    @staticmethod
    def _wants_popularity(plan: Plan) -> bool:
        return plan.eviction in ("static", "prefill-hot") or (plan.order is not None and plan.uses_forecast)

    # -- generating -----------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, padding on the left. UsageError where the folder has none."""
        if self._tokenizer is None:
            try:
                tokenizer = AutoTokenizer.from_pretrained(self.checkpoint.folder)
                known = len(tokenizer.get_vocab()) - len(tokenizer.get_added_vocab())
            except Exception as error:  # noqa: BLE001 (the tokenizers library raises plain Exception for a damaged file)
                raise UsageError(f"{self.checkpoint.folder}: no tokenizer could be loaded: {_first_line(error)}") from None
            if known <= 0:  # without any file Transformers makes an empty one
                raise UsageError(f"{self.checkpoint.folder}: there is no tokenizer; give prompts as token ids")
            tokenizer.padding_side = "left"
            if tokenizer.pad_token_id is None:
                tokenizer.pad_token = tokenizer.eos_token
            self._tokenizer = tokenizer
        return self._tokenizer

    def encode(self, prompts: Sequence[str | Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask, int64 [batch, longest], padded on the left; token ids pass as they are."""
        ids = [self._token_ids(prompt) for prompt in prompts]
        if not ids or min(len(row) for row in ids) == 0:
            raise UsageError("a prompt must have at least one token")
        longest = max(len(row) for row in ids)
        pad = self.model.generation_config.pad_token_id or 0
        rows = torch.tensor([[pad] * (longest - len(row)) + row for row in ids], dtype=torch.long)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], dtype=torch.long)
        return rows, mask

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise UsageError("a prompt must be text in UTF-8") from None
            return list(self.tokenizer(prompt)["input_ids"])
        ids = list(prompt)
        size = self.model.get_input_embeddings().weight.shape[0]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < size:
                raise UsageError(f"token ids must be whole numbers from 0 to {size - 1}, got {token!r}")
        return ids

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_new_tokens: int = 128,
        *,
        streamer: Any = None,
        ignore_eos: bool = False,
        seed: int | None = None,
        **sampling: Any,
    ) -> RunReport:
        """Continues each prompt (text or token ids) by up to `max_new_tokens`, all of them as one batch.

        `sampling` takes Transformers' generation options (do_sample, temperature, top_p, ...); `streamer` is one of
        Transformers' streamers (one prompt). `ignore_eos` goes on past the end of sequence, for measurements.

        Raises UsageError for options that cannot be right, LinkError when an expert could not be read; then no token
        that depended on it was returned, and the engine can go on with the next request.
        """
        if self._closed:
            raise UsageError("the engine is closed")
        if self._busy:
            raise UsageError("the engine is at work on another request: one at a time")
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        if len(prompts) > self.batch:
            raise UsageError(
                f"{len(prompts)} prompts at once, but memory was planned for {self.batch}: open with batch={len(prompts)}"
            )
        _check_sampling(sampling, seed)
        ids, mask = self.encode(prompts)
        if ids.shape[1] + max_new_tokens > self.context:
            raise UsageError(
                f"a prompt of {ids.shape[1]} tokens and {max_new_tokens} new ones do not fit the context of {self.context} "
                "tokens that memory was planned for: ask for fewer, or open with a larger context"
            )
        if seed is not None:
            torch.manual_seed(seed)
        config = copy.deepcopy(self.model.generation_config)
        config.do_sample = False
        others = config.update(**sampling)  # what is no generation option goes to Transformers' generate as it is
        config.max_new_tokens = max_new_tokens
        if not config.do_sample:  # sampling options of the checkpoint's own config mean nothing to greedy search
            config.temperature = config.top_k = config.top_p = config.min_p = None
        if ids.shape[1] > PREFILL_TOKENS and not self.spec.whole_prefill:
            config.prefill_chunk_size = PREFILL_TOKENS
        if config.pad_token_id is None and ids.shape[0] > 1:
            config.pad_token_id = 0
        recording = Recording()
        loop = partial(
            decode_loop,
            totals=self.totals,
            recording=recording,
            before_pass=self._before_pass,
            graph=self._graph_for,
            ignore_eos=ignore_eos,
            streamer=streamer,  # Transformers itself hands it the prompt only: it gives none to a loop that is not its own
        )
        self._busy, self._mask = True, mask
        if self.replay is not None:
            self.replay.next_request()
        try:
            out = self.model.generate(
                ids, attention_mask=mask, generation_config=config, custom_generate=loop, streamer=streamer, **others
            )
        finally:
            self._busy = False
        assert recording.prefill is not None
        return RunReport(
            token_ids=self._new_tokens(out[:, ids.shape[1] :].tolist(), ignore_eos),
            prompt_tokens=mask.sum(dim=1).tolist(),
            prefill=recording.prefill,
            decode=recording.decode,
        )

    def _before_pass(self, tokens: torch.Tensor, decoding: bool) -> None:
        """Before each forward pass, fed `tokens` [batch, n]."""
        if self.replay is not None:
            self.replay.begin(tokens.numel())
        residency, fetching = self.residency, self.fetching
        if residency is None:
            return
        # Belady's clock is the trace's row; nobody else's order depends on the number.
        residency.begin_step(self.replay.position if self.replay is not None else None)
        assert isinstance(self.runner, CachedRunner)
        step = self._step_ended(self.runner, residency, decoding)
        counts = self.runner.prompt_counts
        if counts is not None and isinstance(residency.eviction, PrefillHot) and decoding and counts.any():
            residency.eviction.prefill(counts)
            counts[:] = 0
        if fetching is None:
            return
        started, forecast = time.perf_counter(), fetching.predictor_s
        if not decoding:
            fetching.begin_request(tokens.shape[0])
            fetching.begin_prefill(residency.step, tokens.numel())
            self._prompt = tokens
        else:
            if self._prompt is not None:
                self._prompt_over(fetching)
            fed = tokens[:, 0].numpy() if self.replay is None else self.replay.tokens()
            reserve = min(self.spec.num_experts, self.spec.top_k * tokens.shape[0])
            fetching.begin_step(residency.step, fed, reserve, needed=step, stall_s=self.totals.stall_s)
        self.totals.predictor_s = fetching.predictor_s
        self.totals.worker_s = fetching.worker.busy_s
        self.totals.management_s += time.perf_counter() - started - (fetching.predictor_s - forecast)

    def _step_ended(self, runner: CachedRunner, residency: Residency, decoding: bool) -> np.ndarray | None:
        """What each layer of the pass before needed, if that was a decode step of this request; it is counted."""
        was_step, self._decoding = self._decoding and decoding, decoding
        needed = runner.take_needed()
        if was_step and self.gap is not None:
            self.gap.step(needed, residency.counts.hits - self._hits)
        self._hits = residency.counts.hits
        return needed if was_step else None

    def _prompt_over(self, fetching: Fetching) -> None:
        """What the prompt routed is shown to the predictor."""
        prompt, self._prompt = self._prompt, None
        assert prompt is not None and self._mask is not None
        known = prompt.numpy() if self.replay is None else self.replay.prompt_tokens(prompt.shape[1])
        fetching.prompt_over(known, self._mask.sum(dim=1).numpy())

    def _graph_for(self, batch: int, cache: Any, attention_mask: torch.Tensor | None) -> StepGraph | None:
        """The captured decode step for this batch, fed with what prefill left; None where there is none."""
        if not self._graph_wanted:
            return None
        if batch not in self._graphs:
            try:
                self._graphs[batch] = DecodeGraph.build(
                    self.model, self.runner, max_context=self.context, batch=batch
                )
            except GraphUnsupported as unsupported:
                self._graphs[batch] = None
                self.graph_notice = f"the model's own forward: {unsupported}"
                log.warning("decode runs through Transformers' own forward: %s", unsupported)
        graph = self._graphs[batch]
        if graph is not None:
            graph.load_cache(cache, attention_mask)
        return graph

    def _new_tokens(self, rows: list[list[int]], ignore_eos: bool) -> list[list[int]]:
        """Cuts each row after its end-of-sequence token: what follows is padding."""
        ends = self.model.generation_config.eos_token_id
        stops = set() if ends is None or ignore_eos else {ends} if isinstance(ends, int) else set(ends)
        cut = []
        for row in rows:
            end = next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
            cut.append(row[:end])
        return cut

    # -- facts ----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What is open, and what it has read and held so far, under the names that `--json` prints."""
        return {
            "model": self.spec.name,
            "model_digest": self.spec.digest,
            "mode": self.mode,
            "slots": self.plan.slots,
            "residency": self.plan.residency,
            "link": self.store.link.describe(),
            "bytes_read": self.store.bytes_read,
            "peak_rss_bytes": peak_rss_bytes(),
            "memory_plan": self.plan.to_dict(),
            "optimal_hit_rate": None if self.gap is None else self.gap.optimal_hit_rate,
            **({} if self.fetching is None else {"prefetch": self.fetching.describe()}),
            "decode_step": self.graph_notice or ("captured" if any(self._graphs.values()) else "the model's own forward"),
        }

    def close(self) -> None:
        """Frees the pool and stops the link's threads. Idempotent; the model cannot run afterwards.

        UsageError while a request is at work, which reads what would be freed.
        """
        if self._busy:
            raise UsageError("the engine is at work: it can be closed when the request is over")
        if not self._closed:
            self._closed = True
            unbind(self._modules)
            self._graphs.clear()
            if self.fetching is not None:
                self.fetching.close()
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_sampling(sampling: dict[str, Any], seed: int | None) -> None:
    """What Transformers and torch would answer with a traceback, or with nonsense. Raises UsageError."""
    temperature, top_p = sampling.get("temperature"), sampling.get("top_p")
    if temperature is not None and not 1e-4 <= temperature <= 1e4:  # beyond, logits are infinite, or all the same
        raise UsageError(f"temperature must be from 0.0001 to 10000, got {temperature}; without it, decoding is greedy")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"top_p must be above 0 and at most 1, got {top_p}")
    if seed is not None and not 0 <= seed < 1 << 64:
        raise UsageError(f"seed must be from 0 to 2**64 - 1, got {seed}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
