"""Puts a policy to work on an open checkpoint: its tables, its predictor, and the fetch worker where it fetches ahead."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seqmoe.predictors.protocol import LayerPredictor, Predictor
from seqmoe.predictors.registry import NAMES, make_predictor
from seqmoe.predictors.routers import SpecPrefetch
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_forecasts import TraceForecasts, perfect_forecasts
from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.spec import ModelSpec
from seqmoe.runtime.eviction_fallback import FallbackEviction, FastFallbackEviction
from seqmoe.runtime.eviction_fast import FastForecastEviction
from seqmoe.runtime.eviction_forecast import ForecastEviction
from seqmoe.runtime.fetching import Fetching
from seqmoe.runtime.forecaster import Forecaster, OnlineForecaster, TraceForecaster, load_calibrations
from seqmoe.runtime.kernels.experts_cpu import ExpertsCompute
from seqmoe.runtime.policy import GIVEN, LAYERS, PERFECT, Plan, Policy, find_policy, plan_for
from seqmoe.runtime.prefetch import Prefetcher, plan_eviction
from seqmoe.runtime.prefetch_fast import FastPrefetcher
from seqmoe.runtime.report import Totals
from seqmoe.runtime.residency import Residency
from seqmoe.runtime.restraint import SelfRestraint
from seqmoe.runtime.runner import CachedRunner
from seqmoe.runtime.schedule import Scheduler
from seqmoe.runtime.schedule_fast import FastScheduler
from seqmoe.runtime.store import Store

ADAPTERS = "adapters.safetensors"  # in a predictor's folder


class Oracles:
    """What a policy knows beside the model: predictors, opened and fitted before memory is planned."""

    def __init__(
        self,
        mode: str,
        spec: ModelSpec,
        *,
        plan: Plan | None = None,
        predictor: str | Path | Predictor | LayerPredictor | None = None,
        forecasts: TraceForecasts | None = None,
        fit: Trace | None = None,
        replay: Trace | None = None,
    ) -> None:
        """`plan`: in place of the policy's own. `predictor`: name, folder, or the thing itself; `fit`: what rivals are
        fitted to; `forecasts`: made beforehand for the rows of `replay`. UsageError for what is missing."""
        policy: Policy = find_policy(mode)
        assert policy.plan is not None, mode
        self.mode = mode
        self.plan = plan or plan_for(policy, spec.top_k, spec.num_experts)
        self.forecaster: Forecaster | None = None
        self.layer_predictor: LayerPredictor | None = None
        shape = (spec.num_layers, spec.num_experts, spec.top_k)
        rows = max(self.plan.horizon + 1, self.plan.job_steps)
        if policy.predictor == LAYERS:
            self.layer_predictor = _layer_predictor(predictor, spec, fit)
        elif not self.plan.uses_forecast:
            pass
        elif forecasts is not None:
            self.forecaster = TraceForecaster(forecasts)
        elif policy.predictor == PERFECT:
            if replay is None:
                raise UsageError(f"mode {mode} needs the trace that is replayed: it looks into the future")
            self.forecaster = TraceForecaster(perfect_forecasts(replay, rows))
        else:
            self.forecaster = _online(mode, policy, predictor, fit, shape, rows)
        if isinstance(self.forecaster, OnlineForecaster):
            _check_fits(self.forecaster.predictor, spec)


def _online(
    mode: str,
    policy: Policy,
    predictor: str | Path | Predictor | LayerPredictor | None,
    fit: Trace | None,
    shape: tuple[int, int, int],
    rows: int,
) -> OnlineForecaster:
    name = predictor if policy.predictor == GIVEN else policy.predictor
    if name is None:
        raise UsageError(
            f"mode {mode} needs a predictor: the folder of `seqmoe train`, or one of {', '.join(NAMES)} with a trace to fit"
        )
    if isinstance(name, (str, Path)):
        made = make_predictor(str(name), fit, rows)
        return OnlineForecaster(made, shape, rows, load_calibrations(Path(name), shape[2]))
    assert isinstance(name, Predictor), name
    return OnlineForecaster(name, shape, rows)


def _layer_predictor(
    given: str | Path | Predictor | LayerPredictor | None, spec: ModelSpec, fit: Trace | None
) -> LayerPredictor:
    if isinstance(given, LayerPredictor):
        return given
    if isinstance(given, (str, Path)) and (path := Path(given)).exists():
        return SpecPrefetch.load(path / ADAPTERS if path.is_dir() else path, spec.num_layers, spec.num_experts)
    if fit is not None and fit.router_inputs is not None:
        return SpecPrefetch.fit(fit)
    raise UsageError(
        "mode specprefetch needs adapters: a folder of `seqmoe train` that has them, or a trace with router inputs to fit"
    )


def _check_fits(predictor: Predictor, spec: ModelSpec) -> None:
    config = getattr(predictor, "config", None)
    for field in ("num_layers", "num_experts", "top_k"):
        have, want = getattr(config, field, None), getattr(spec, field)
        if have is not None and have != want:
            raise UsageError(
                f"the predictor was made for {field} {have}, the model has {want}: train one for this model"
            )
    digest = getattr(getattr(predictor, "info", None), "model_digest", None)
    if digest and spec.digest and digest != spec.digest:
        raise UsageError(
            f"the predictor was trained on traces of another model (digest {digest[:12]}, this is {spec.digest[:12]})"
        )


def build_prefetcher(
    oracles: Oracles,
    spec: ModelSpec,
    num_slots: int,
    batch: int,
    *,
    replay: Trace | None,
    popularity: ArrayLike | None,
    fast: bool = True,
) -> Prefetcher:
    """The tables of a policy and what decides over them. `fast`: compiled decisions, equal to the plain ones."""
    plan = oracles.plan
    by_forecast: type[ForecastEviction] = FallbackEviction if plan.restraint else ForecastEviction
    if fast:
        by_forecast = FastFallbackEviction if plan.restraint else FastForecastEviction
    eviction = plan_eviction(
        plan, spec.num_layers, spec.num_experts, spec.top_k, trace=replay, popularity=popularity,
        forecast_eviction=by_forecast,
    )  # fmt: skip
    reserve = min(spec.num_experts, spec.top_k * batch)
    residency = Residency(num_slots, spec.num_layers, spec.num_experts, eviction, reserve=reserve)
    scheduler: Scheduler | None = None
    if plan.order is not None:
        scheduler = (FastScheduler if fast else Scheduler)(
            spec.num_layers, order=plan.order, ema_alpha=plan.ema_alpha, lead=plan.lead, m_max=plan.m_max,
            printed_form=plan.printed_form,
        )  # fmt: skip
    if not fast:
        return Prefetcher(plan, residency, scheduler)
    assert scheduler is None or isinstance(scheduler, FastScheduler)
    return FastPrefetcher(plan, residency, scheduler)


def warm_up(prefetcher: Prefetcher, forecaster: Forecaster | None, restraint: bool = True) -> None:
    """Runs every decision once, on tables that are thrown away: compiled code is loaded before the clock starts."""
    residency = prefetcher.residency
    layers, experts = residency.num_layers, residency.num_experts
    scores = np.full((max(2, prefetcher.plan.horizon + 1), layers, experts), 0.5, dtype=np.float32)
    if forecaster is not None:
        forecaster.start(1)
        made = forecaster.at_start(0, np.zeros(1, dtype=np.int64))
        scores = scores if made is None else made
    limits = SelfRestraint(prefetcher) if prefetcher.plan.restraint and restraint else None
    needed = np.full((layers, experts), -1, dtype=np.int32)
    for step in range(2):
        residency.begin_step(step)
        for layer in range(layers):
            prefetcher.reach(step * layers + layer)
            if layer == 0 and prefetcher.scheduler is not None:
                prefetcher.offer_block(prefetcher.forecast_block(scores, step, step * layers))
                if limits is not None:
                    limits.forecast()
            for flat in prefetcher.lookup(layer, [0]).missing:
                prefetcher.load(flat)
            fetch = prefetcher.next()
            prefetcher.release(layer)
            if fetch is not None:
                residency.land(fetch.tag)
            needed[layer, 0] = layer * experts
        if limits is not None:
            limits.end_step(needed, compute=1.0, stall=0.0, forecast=0.0, prefetch=0.0, load=1.0)


def build_runner(
    oracles: Oracles,
    computes: Sequence[ExpertsCompute],
    prefetcher: Prefetcher,
    store: Store,
    totals: Totals,
    popularity: NDArray[np.floating] | None = None,
    *,
    threaded: bool = True,
) -> CachedRunner:
    """The runner of a policy. `popularity` [L, E]: chance that a token uses an expert."""
    runner = CachedRunner(computes, prefetcher, store, totals)
    if prefetcher.scheduler is None and oracles.forecaster is None:
        return runner
    runner.fetch_ahead(
        Fetching(
            prefetcher,
            lambda fetch: store.load([fetch], background=True),
            runner.place,
            forecaster=oracles.forecaster,
            layer_predictor=oracles.layer_predictor,
            popularity=popularity,
            threaded=threaded and prefetcher.scheduler is not None,
        )
    )
    return runner
