"""Fetching ahead, as the decoding thread sees it: forecasts become jobs, the worker's transfers become residents.

Between `Prefetcher` (what to do, pure), `FetchWorker` (who moves bytes) and the layers that call in. One lock guards the
tables; this thread holds it while it looks up, binds and releases, never while it computes, waits or forecasts.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from seqmoe.predictors.protocol import LayerPredictor
from seqmoe.profiles.errors import LinkError
from seqmoe.runtime.control import LANDED, NO_JOBS, ControlRegion, pack_jobs
from seqmoe.runtime.forecaster import Forecaster
from seqmoe.runtime.prefetch import Prefetcher
from seqmoe.runtime.residency import Fetch, Lookup
from seqmoe.runtime.restraint import Level, SelfRestraint
from seqmoe.runtime.worker import FetchWorker, Transfer

log = logging.getLogger("seqmoe")

LATE_S = 5.0  # a needed expert that is on its way is awaited so long, then loaded elsewhere
_WARNED_FORECASTS = 3  # bad forecasts in a row after which prefetch stays off for the request


@dataclass(slots=True)
class StepCosts:
    """Running totals at a step's start, in seconds: what the step before it took is the difference."""

    clock: float = 0.0
    stall: float = 0.0
    predictor: float = 0.0
    worker: float = 0.0
    waited: float = 0.0  # for on-demand loads alone
    loads: int = 0


class Fetching:
    """See the module's head. Only the decoding thread calls it."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        send: Callable[[Fetch], Transfer],
        place: Callable[[Fetch], None],
        *,
        forecaster: Forecaster | None = None,
        layer_predictor: LayerPredictor | None = None,
        popularity: NDArray[np.floating] | None = None,
        threaded: bool = True,
    ) -> None:
        """`send` begins a read in the background; `place` notes where a landed expert lies. `popularity` [L, E]: chance
        that a token uses an expert, for prefill. Not `threaded`: `worker.poll` is called by whoever owns the clock."""
        residency = prefetcher.residency
        self.prefetcher = prefetcher
        self.forecaster = forecaster
        self.layer_predictor = layer_predictor
        self.popularity = popularity
        self.place = place
        self.lock = threading.Lock()
        room = residency.num_layers * residency.num_experts * prefetcher.plan.job_steps
        self.region = ControlRegion(2 * room, residency.num_slots + 1)
        self.region.set_position(-1)  # no layer has been reached yet
        self.worker = FetchWorker(prefetcher, self.region, self.lock, send)
        self.threaded = threaded
        self.asleep = False  # the worker is not woken: to measure what it costs
        # self-restraint: what the steps cost, and whether forecasts and prefetch are worth it
        plan = prefetcher.plan
        self.restraint = SelfRestraint(prefetcher) if plan.restraint and prefetcher.scheduler is not None else None
        self._costs = StepCosts()
        self._last_costs = StepCosts()
        self._load_s = 0.0  # of one on-demand load, running mean
        self.predictor_s = 0.0  # time of forecasts so far
        self.notices: list[str] = []  # what a user should know, each once
        self._row = -1  # of the pass that runs
        self._layer = -1  # looked up last in it
        self._decoding = False
        self._bad_forecasts = 0
        self._died = False  # the worker, in this request
        self._paused = False
        self._awaited = 0  # late fetches that are all that the layer at work still needs; less than 0: it needs more

    # -- a request and its passes -------------------------------------------------------------------------------

    def begin_request(self, batch: int) -> None:
        """New sequences: what was known of others is forgotten, what is resident stays."""
        self._bad_forecasts = 0
        self._tell(lambda forecaster: forecaster.start(batch))
        if self.threaded:
            self.worker.start()
        if self._died:
            self._died = False
            self.prefetcher.enabled = self.restraint is None or self.restraint.level == Level.PREFETCH
        with self.lock:
            self.region.post(NO_JOBS)
            self.prefetcher.start_sequence()

    def begin_prefill(self, row: int, tokens: int) -> None:
        """A pass over `tokens` tokens of a prompt: they touch most experts, so that popularity counts (paper section 8).
        E slots are left to the layer at work, the others may be in FETCH."""
        residency = self.prefetcher.residency
        experts, position = residency.num_experts, row * residency.num_layers
        if residency.reserve < experts:  # no layer is at work: what has landed in vain need not wait for its own
            self.worker.quiesce(LATE_S)
            with self.lock:
                self._take_in()
                residency.settle()
                hung = len(residency.in_flight)  # a read that does not end keeps its slot
                residency.reserve = max(residency.reserve, min(experts, residency.num_slots - hung))
                self.region.set_pause(False)
        with self.lock:
            self._take_in()
            self._begin(row, position)
            if self.popularity is not None and self.prefetcher.by_forecast:
                needed = 1.0 - (1.0 - np.minimum(self.popularity, 1.0)) ** tokens
                scores = np.stack([needed, self.popularity]).astype(np.float32)
                jobs = self.prefetcher.forecast_block(scores, row, position - 1, k_prime=experts, steps=1)
                self.region.post(jobs)
        self._decoding = False
        self._ring()

    def prompt_over(self, tokens: NDArray[np.int64] | None, lengths: NDArray[np.int64]) -> None:
        """A prompt has run: its tokens [b, n], padded on the left, None where they are not known, and their `lengths` [b]."""
        self._tell(lambda forecaster: forecaster.prompt_over(tokens, lengths))

    def begin_step(
        self,
        row: int,
        tokens: NDArray[np.int64] | None,
        reserve: int,
        *,
        needed: NDArray[np.int32] | None = None,
        stall_s: float = 0.0,
    ) -> None:
        """A decode step: its layers' positions begin at row * L. `tokens` [b] are about to be fed, None: not known.
        `reserve`: slots that a layer of it may need at once. Of the decode step before, if there was one: what each layer
        `needed` [L, width] (flat ids, -1 where fewer); `stall_s`: time that compute has stood still, so far."""
        self._watch()
        position = row * self.prefetcher.residency.num_layers
        scores = None
        wanted = self.restraint is None or self._end_step(needed, stall_s)
        if wanted and (self.prefetcher.enabled or self.prefetcher.by_forecast is not None):
            scores = self._forecast(lambda forecaster: forecaster.at_start(row, tokens))
        with self.lock:
            self._take_in()
            self.prefetcher.residency.reserve = min(self.prefetcher.residency.reserve, reserve)
            self._begin(row, position)
            if self.prefetcher.plan.early_binding:
                self.worker.follow(busy=False)  # who binds slots gives back first what has become pointless
            if scores is not None:
                self.region.post(self.prefetcher.forecast_block(scores, row, position))
                if self.restraint is not None:
                    self.restraint.forecast()
        self._decoding = True
        self._ring()

    def _end_step(self, needed: NDArray[np.int32] | None, stall_s: float) -> bool:
        """The decode step that has ended, if one has, goes to the accounts. Whether a forecast of the next is of use."""
        assert self.restraint is not None
        last, worker = self._last_costs, self.worker
        now = StepCosts(
            time.perf_counter(), stall_s, self.predictor_s, worker.busy_s, self._costs.waited, self._costs.loads
        )
        self._last_costs = now
        if needed is not None:
            stall, forecast = now.stall - last.stall, now.predictor - last.predictor
            loads = now.loads - last.loads
            if loads:
                self._load_s += 0.1 * ((now.waited - last.waited) / loads - self._load_s) if self._load_s else (
                    (now.waited - last.waited) / loads
                )  # fmt: skip
            with self.lock:
                self.restraint.end_step(
                    needed,
                    compute=max(0.0, now.clock - last.clock - stall - forecast),
                    stall=stall,
                    forecast=forecast,
                    prefetch=now.worker - last.worker,
                    load=self._load_s,
                )
        return self.restraint.wants_forecast

    def loaded(self, records: int, waited_s: float) -> None:
        """So many records were loaded on demand, and compute stood still for them so long."""
        self._costs.loads += records
        self._costs.waited += waited_s

    def _begin(self, row: int, position: int) -> None:
        if row != self._row + 1:
            self.prefetcher.start_sequence(position)
            self.worker.jump(position)
        self._row, self._layer = row, -1
        self.region.set_position(position)

    # -- the layer at work --------------------------------------------------------------------------------------

    def lookup(self, layer: int, experts: Sequence[int]) -> Lookup:
        """What of the layer's experts is there; from here on the link is the layer's own if something is missing."""
        with self.lock:
            self._take_in()
            position = self._row * self.prefetcher.residency.num_layers + layer
            if layer <= self._layer:  # another part of a long prompt, or a pass that nobody announced
                self.prefetcher.start_sequence(position)
                self.worker.jump(position)
            self._layer = layer
            self.region.set_position(position)
            if self.prefetcher.plan.early_binding:
                self.worker.follow(busy=False)
            found = self.prefetcher.lookup(layer, experts)
            if self.restraint is not None:
                self.restraint.reach()
            self._paused = bool(found.missing or found.in_flight)
            self._awaited = -1 if found.missing else len(found.in_flight)
            if self._paused:
                self.region.set_pause(True)
        return found

    def routed(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        """The layer has been looked up: what forecasts can be made of it. hidden [tokens, H], index and weights
        [tokens, k]."""
        self._tell(lambda forecaster: forecaster.routed(layer, index, weights))
        if not self._decoding or not self.prefetcher.enabled:
            return
        plan, residency = self.prefetcher.plan, self.prefetcher.residency
        last = layer == residency.num_layers - 1
        if last and plan.after:
            row = self._row + 1
            scores = self._forecast(lambda forecaster: forecaster.after_last(row))
            if scores is not None:
                with self.lock:
                    last_position = row * residency.num_layers - 1
                    self.region.post(self.prefetcher.forecast_block(scores, row, last_position))
        elif not last and (predictor := self.layer_predictor) is not None:
            rows = max(1, hidden.shape[0])
            made = self._checked(
                lambda: predictor.refine(layer, hidden.float().numpy())[0] / rows, (residency.num_experts,)
            )
            if made is not None:
                with self.lock:
                    position = self._row * residency.num_layers + layer
                    jobs = self.prefetcher.forecast_layer(made, layer + 1, self._row, position)
                    self.region.post(pack_jobs(jobs))
        self._ring()

    def _ring(self) -> None:
        if self.prefetcher.enabled and self.prefetcher.scheduler is not None and not self.asleep:
            self.worker.ring()

    def resume(self) -> None:
        """The layer has all that it needs: the link is free for what comes."""
        if self._paused:
            self._paused = False
            self.region.set_pause(False)
            self._ring()

    def await_late(self, fetch: Fetch) -> bool:
        """Waits for a needed expert that is on its way. False if it has to be loaded after all; then its slot may still be
        written to and comes back later."""
        with self.lock:
            sent = self.worker.sent.get(fetch.tag)
            if sent is None:  # nobody has begun to read it, nobody will
                self.prefetcher.residency.fail(fetch)
                self.prefetcher.lost(fetch)
        if sent is None:
            self._awaited = -1
            return False
        try:
            sent.transfer.wait(LATE_S)
        except LinkError as error:
            log.warning("a fetch failed, its expert is loaded anew: %s", error)
            with self.lock:
                if sent.transfer.done():
                    self._give_up(fetch)
                elif self.prefetcher.residency.orphan(fetch.tag):
                    self.prefetcher.lost(fetch)
            self._awaited = -1
            return False
        with self.lock:
            self.worker.sent.pop(fetch.tag, None)
            landed = self.prefetcher.residency.land(fetch.tag)
        assert landed, fetch
        self.place(fetch)
        self._awaited -= 1
        if not self._awaited:
            self.resume()
        return True

    def _take_in(self) -> None:
        """Under the lock: transfers that have ended since the last time."""
        residency = self.prefetcher.residency
        for tag, status in self.region.completed():
            sent = self.worker.sent.pop(tag, None)
            if sent is None:
                continue  # was awaited
            if status == LANDED:
                if residency.land(tag):
                    self.place(sent.fetch)
                continue
            log.warning("a fetch failed and will be repeated when needed")
            self._give_up(sent.fetch)

    def _give_up(self, fetch: Fetch) -> None:
        self.worker.sent.pop(fetch.tag, None)
        self.prefetcher.residency.fail(fetch)
        self.prefetcher.lost(fetch)

    # -- when something goes wrong ------------------------------------------------------------------------------

    def _tell(self, tell: Callable[[Forecaster], None]) -> None:
        """Something that the forecaster should know. If it cannot take it, it is not asked in this request either."""
        if self.forecaster is None or self._bad_forecasts >= _WARNED_FORECASTS:
            return
        started = time.perf_counter()
        try:
            tell(self.forecaster)
        except Exception as error:  # noqa: BLE001 (any predictor's)
            self._bad_forecasts = _WARNED_FORECASTS
            self._no_forecast(f"{type(error).__name__}: {error}")
        self.predictor_s += time.perf_counter() - started

    def _forecast(self, ask: Callable[[Forecaster], NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
        """A forecast of whole steps, or None."""
        forecaster, residency = self.forecaster, self.prefetcher.residency
        if forecaster is None or not self.prefetcher.plan.uses_forecast:
            return None
        return self._checked(lambda: ask(forecaster), (-1, residency.num_layers, residency.num_experts))

    def _checked(
        self, ask: Callable[[], NDArray[np.float32] | None], shape: tuple[int, ...]
    ) -> NDArray[np.float32] | None:
        """What a predictor says, scores of this shape (the last two sizes count), if it can be used, or None. A predictor
        that fails or gives nonsense costs speed, nothing else."""
        if self._bad_forecasts >= _WARNED_FORECASTS:
            return None
        started = time.perf_counter()
        try:
            scores = ask()
            # one sum instead of three looks at every element: not finite if one of them is not
            good = scores is None or (
                len(scores.shape) == len(shape)
                and scores.shape[-2:] == shape[-2:]
                and bool(np.isfinite(scores.sum()) and scores.min() >= 0.0)
            )
            why = "it is not made of probabilities for all experts"
        except Exception as error:  # noqa: BLE001 (any predictor's)
            scores, good, why = None, False, f"{type(error).__name__}: {error}"
        self.predictor_s += time.perf_counter() - started
        if good:
            self._bad_forecasts = 0
            return scores
        self._bad_forecasts += 1
        self._no_forecast(why)
        return None

    def _no_forecast(self, why: str) -> None:
        """What an earlier forecast asked for is void as well."""
        off = self._bad_forecasts >= _WARNED_FORECASTS
        self.notice(f"a forecast cannot be used ({why})" + ("; prefetch is off for this request" if off else ""))
        with self.lock:
            self.region.post(NO_JOBS)

    def _watch(self) -> None:
        """A worker that died takes its transfers with it; the model goes on without prefetch."""
        if self.threaded and self.worker.error is not None and not self.worker.alive:
            if not self._died:
                self.notice(f"the fetch worker died ({self.worker.error!r}); experts are loaded when they are needed")
            self._died = True
            self.prefetcher.enabled = False
            with self.lock:
                for tag, sent in list(self.worker.sent.items()):
                    if sent.transfer.done():
                        self.region_complete(tag)

    def region_complete(self, tag: int) -> None:
        """Under the lock, in place of a dead worker."""
        sent = self.worker.sent[tag]
        try:
            sent.transfer.wait(0.0)
        except LinkError:
            self._give_up(sent.fetch)
            return
        del self.worker.sent[tag]
        if self.prefetcher.residency.land(tag):
            self.place(sent.fetch)

    def notice(self, text: str) -> None:
        """Said once."""
        if text not in self.notices:
            self.notices.append(text)
            log.warning(text)

    def start_over(self) -> bool:
        """After an interruption, when the tables may not agree: waits for what is on the link, then empties them. False if
        a read never ends."""
        if not self.worker.quiesce():
            return False
        with self.lock:
            self.prefetcher.residency.forget()
        self.worker.reset()
        if self.threaded:
            self.worker.start()  # tables that did not agree may have been its end
        self._paused = False
        return True

    def describe(self) -> dict[str, Any]:
        """What came of it so far, for `--json`: records, and what restraint does now."""
        counts, made, scheduler = self.prefetcher.counts, self.prefetcher.residency.counts, self.prefetcher.scheduler
        return {
            "prefetched": made.prefetched - made.dropped,
            "useful": counts.useful,
            "late": counts.late,
            "wasted": counts.wasted,
            "failed": made.failed,
            "budget_transfers_per_layer": None if scheduler is None else scheduler.budget_avg,
            "level": None if self.restraint is None else self.restraint.level.name.lower(),
            "level_changes": 0 if self.restraint is None else self.restraint.changes,
            "notices": list(self.notices),
        }

    def close(self) -> bool:
        """Ends the worker. False if it hangs in a read."""
        return self.worker.stop()
