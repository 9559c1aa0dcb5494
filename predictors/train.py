"""Training of the sequence predictor: teacher forcing until it converges, then recursion by scheduled sampling.

Runs alone, or in several processes under torchrun or accelerate launch: each takes its own rows of every batch, and the
gradients are averaged. Everything random follows from the seed and the counters in `Progress`, so a resumed training
goes on exactly as it would have.
"""

import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from seqmoe.predictors.batches import Batch, Piece, Steps, Vocabulary, assemble, epoch, pack
from seqmoe.predictors.objective import Recall, batch_loss, measure
from seqmoe.predictors.seq2seq import Dropout, Seq2SeqConfig, Seq2SeqNet
from seqmoe.predictors.seq2seq_file import PredictorInfo, save_predictor
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.train_options import TrainOptions
from seqmoe.predictors.train_start import fill_tables, start_from_ridge
from seqmoe.predictors.train_state import Progress, load_checkpoint, save_checkpoint, trace_digest
from seqmoe.profiles.errors import UsageError

_TIMED_STEPS = 6  # of each kind, before a budget is turned into a number of steps
_FLOOR = 0.02  # of the learning rate, at the end
Report = Callable[[Progress, dict[str, Any] | None], None]


@dataclass(frozen=True)
class Place:
    """Which of how many processes this is, and where it computes."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"


@contextmanager
def joined() -> Iterator[Place]:
    """The process group that torchrun or accelerate launch asked for through the environment; alone without them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = f"cuda:{local % torch.cuda.device_count()}" if cuda else "cpu"
    if world == 1:
        yield Place(device=device)
        return
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Place(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class TrainResult:
    """Where the predictor is and how well it forecasts the validation sequences."""

    folder: Path
    recall: Recall | None  # None without validation sequences
    progress: Progress
    parameters: int

    def to_dict(self) -> dict[str, Any]:
        last = self.progress.history[-1] if self.progress.history else {}
        return {
            "out": str(self.folder),
            "parameters": self.parameters,
            "steps": self.progress.step,
            "epochs": round(self.progress.history[-1]["epoch"], 2) if last else 0,
            "seconds": round(self.progress.seconds, 1),
            "finished": self.progress.finished,
            "validation": None if self.recall is None else recall_dict(self.recall),
        }


def recall_dict(recall: Recall) -> dict[str, Any]:
    """Rounded, for JSON: recall at m one step ahead, at k + 3 for each step ahead, and the KL."""
    return {
        "recall_at": {str(m): round(value, 4) for m, value in recall.at.items()},
        "recall_at_step": {str(h): round(value, 4) for h, value in enumerate(recall.ahead, start=1)},
        "kl": round(recall.kl, 4),
    }


class Trainer:
    """One training, from its beginning or a checkpoint, to `predictor.*` in a folder."""

    def __init__(
        self,
        config: Seq2SeqConfig,
        train: Trace,
        validation: Trace | None,
        options: TrainOptions,
        folder: Path,
        vocabulary: Vocabulary | None = None,
        place: Place | None = None,
        info: PredictorInfo | None = None,
        resume: bool = False,
    ) -> None:
        """`vocabulary` is needed exactly where `config` has token rows. UsageError for traces that do not fit."""
        place = place or Place()
        for name, trace in (("training", train), ("validation", validation)):
            if trace is not None:
                _check_trace(name, trace, config)
        if not any(length > 1 for length in train.seq_len.tolist()):
            raise UsageError("training needs a sequence of at least 2 steps, every one in the trace has 1")
        if (vocabulary.rows if vocabulary else 0) != config.token_rows:
            raise UsageError(f"config.token_rows is {config.token_rows}, the vocabulary has another number of rows")
        self.config, self.options, self.folder, self.place = config, options, folder, place
        self.vocabulary, self.info = vocabulary, info or PredictorInfo()
        self.steps = Steps.of(train, vocabulary)
        self.validation = None if validation is None else Steps.of(validation, vocabulary)
        torch.manual_seed(options.seed)
        self.net = Seq2SeqNet(config).to(place.device)
        if not resume:
            fill_tables(self.net, self.steps)
            if options.ridge_start:
                start_from_ridge(self.net, self.steps)
        self.net.set_dropout(options.dropout)
        self.average = copy.deepcopy(self.net).eval()
        self.average.set_dropout(Dropout())
        self.best = {name: value.clone() for name, value in self.average.state_dict().items()}
        self.optimizer = _optimizer(self.net, options)
        self.progress = Progress()
        self.identity = {
            "config": json.loads(json.dumps(_config_dict(config))),
            "options": json.loads(json.dumps(options.to_dict())),
            "trace": trace_digest(train),
            "validation": None if validation is None else trace_digest(validation),
            "processes": place.world,
        }
        if resume:
            self.progress, self.best = load_checkpoint(folder, self.net, self.average, self.optimizer, self.identity)

    def run(self, report: Report | None = None, stop_after: int | None = None) -> TrainResult:
        """Trains to the end, or for `stop_after` more steps (the checkpoint then says where), and saves the predictor."""
        report = report or (lambda progress, row: None)
        before, began = self.progress.seconds, time.monotonic()
        last_step = None if stop_after is None else self.progress.step + stop_after
        if not self.progress.total:
            self._plan()
        self.net.train()
        while not (self.progress.finished or self.progress.step == last_step or self._at_end() or self._out_of_time()):
            for rows in self._rest_of_epoch():
                loss, kl = self._step(rows)
                self.progress.position += 1
                self.progress.seconds = before + time.monotonic() - began
                self._losses.append(kl)
                report(self.progress, None)
                if not math.isfinite(loss):
                    raise UsageError(f"the loss is {loss} at step {self.progress.step}: lower the learning rate")
                if self.progress.step == last_step or self._at_end() or self._out_of_time():
                    break
            else:
                self.progress.epoch, self.progress.position = self.progress.epoch + 1, 0
                row = self._validate()
                report(self.progress, row)
                self._save()
        if not self.progress.finished and (self._at_end() or self._out_of_time()):
            if self.progress.position:
                report(self.progress, self._validate())
            self.progress.finished = "steps" if self._at_end() else "budget"
        self._save()
        return self._result()

    _losses: list[float]

    def _plan(self) -> None:
        """How many steps: the epochs asked for, or what the budget is likely to hold at the measured speed."""
        options = self.options
        rows = pack(self.steps.starts, self.steps.lengths, options.row_steps, np.random.default_rng(options.seed))
        per_epoch = max(1, -(-len(rows) // options.batch_rows))
        self.progress.total = per_epoch * options.epochs
        if options.budget_s is not None:
            seconds = self._time_step(rows, 0.0), self._time_step(rows, 0.5)
            share = options.teacher_share
            each = share * seconds[0] + (1 - share) * seconds[1]
            left = 0.85 * options.budget_s - _TIMED_STEPS * sum(seconds)  # the rest validates
            self.progress.total = max(1, int(self._agreed(left / each)))

    def _time_step(self, rows: list[list[Piece]], own_share: float) -> float:
        """Seconds of one training step, measured without changing anything."""
        part = rows[: self.options.batch_rows][self.place.rank :: self.place.world] or rows[:1]
        times = []
        for _ in range(_TIMED_STEPS):
            began = time.monotonic()
            loss, _ = batch_loss(self.net, self._batch(part), self.options.objective, own_share)
            loss.backward()
            self.optimizer.zero_grad(set_to_none=True)
            times.append(time.monotonic() - began)
        return float(np.median(times))

    def _rest_of_epoch(self) -> Iterator[list[list[Piece]]]:
        options = self.options
        self._losses = []
        rng = np.random.default_rng([options.seed, self.progress.epoch])
        per_process = max(1, options.batch_rows // self.place.world)
        batches = epoch(self.steps, per_process, options.row_steps, rng, self.place.rank, self.place.world)
        for number, rows in enumerate(batches):
            if number >= self.progress.position:
                yield rows

    def _batch(self, rows: list[list[Piece]]) -> Batch:
        return assemble(self.steps, rows, self.options.row_steps).to(self.place.device)

    def _step(self, rows: list[list[Piece]]) -> tuple[float, float]:
        """One step of the optimiser -> (loss, KL) of this process."""
        progress, options = self.progress, self.options
        torch.manual_seed((options.seed * 1_000_003 + progress.step) * 1_009 + self.place.rank)
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate * self._rate()
        batch, own_share = self._batch(rows), self._own_share()
        if own_share and progress.recursion_from is None:  # from here on another score counts
            progress.recursion_from, progress.stale, progress.best_score = progress.step, 0, -1.0
        loss, kl = batch_loss(self.net, batch, options.objective, own_share)
        (loss * self._weight(batch)).backward()
        self._share_gradients()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        decay = min(options.ema, (1 + progress.step) / (10 + progress.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.net.parameters()), 1 - decay)
        progress.step += 1
        return float(loss.detach()), kl

    def _at_end(self) -> bool:
        return self.progress.step + self.progress.skipped >= self.progress.total

    def _position(self) -> float:
        """Share of the planned steps that lies behind, those that an early end of teacher forcing saved included."""
        return min(1.0, (self.progress.step + self.progress.skipped) / self.progress.total)

    def _rate(self) -> float:
        """Of the learning rate: linear warm-up, then a cosine over all planned steps."""
        warm = min(1.0, (self.progress.step + 1) / self.options.warmup)
        return warm * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * self._position())))

    def _own_share(self) -> float:
        """Of recursion's inputs that are the net's own: 0 in the first phase, then from a quarter up to all of them."""
        share, at = self.options.teacher_share, self._position()
        if share >= 1 or at < share:
            return 0.0
        return min(1.0, 0.25 + 0.75 * (at - share) / (0.75 * (1 - share)))

    def _weight(self, batch: Batch) -> float:
        """What makes the mean over processes the mean over all their steps."""
        if self.place.world == 1:
            return 1.0
        count = torch.tensor(float(batch.valid.sum()), device=self.place.device)
        mine = float(count)
        dist.all_reduce(count)
        return mine * self.place.world / max(float(count), 1.0)

    def _share_gradients(self) -> None:
        if self.place.world == 1:
            return
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.net.parameters()]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= self.place.world
        for parameter, part in zip(self.net.parameters(), flat.split([g.numel() for g in gradients]), strict=True):
            parameter.grad = part.view_as(parameter)

    def _agreed(self, value: float) -> float:
        """Rank 0's value, for all."""
        if self.place.world == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=self.place.device)
        dist.broadcast(shared, 0)
        return float(shared)

    def _out_of_time(self) -> bool:
        budget = self.options.budget_s
        return budget is not None and bool(self._agreed(float(self.progress.seconds > budget)))

    def _validate(self) -> dict[str, Any]:
        """Measures, keeps the best weights, decides whether a phase has converged -> the row of the history."""
        progress = self.progress
        row: dict[str, Any] = {
            "step": progress.step,
            "epoch": progress.epoch + (progress.position > 0) * 0.5,
            "seconds": round(progress.seconds, 1),
            "learning_rate": self.options.learning_rate * self._rate(),
            "own_share": round(self._own_share(), 3),
            "train_kl": round(float(np.mean(self._losses)), 5) if self._losses else None,
        }
        if self.validation is None:
            self._keep()
        else:
            recall = measure(self.average, self.validation, self.options.objective.horizon)
            row |= recall_dict(recall)
            one, far = recall.ahead[0], recall.ahead[1:]
            both = self.options.teacher_share < 1 and far and progress.recursion_from is not None
            score = self._agreed(0.5 * (one + float(np.mean(far))) if both else one)
            row["score"] = round(score, 5)
            if score > progress.best_score + 1e-5:
                progress.best_score, progress.stale = score, 0
                self._keep()
            else:
                progress.stale += 1
            if progress.stale >= self.options.patience:
                self._converged()
        progress.history.append(row)
        return row

    def _converged(self) -> None:
        progress, share = self.progress, self.options.teacher_share
        if share < 1 and progress.recursion_from is None:  # go on with the second phase at once
            first = math.ceil(share * progress.total)
            progress.skipped = max(0, first - progress.step)
            progress.stale = 0
        else:
            progress.finished = "converged"

    def _keep(self) -> None:
        self.best = {name: value.detach().clone() for name, value in self.average.state_dict().items()}

    def _save(self) -> None:
        if self.place.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            parts = (self.net, self.average, self.best, self.optimizer, self.progress, self.identity)
            save_checkpoint(self.folder, *parts)

    def _result(self) -> TrainResult:
        best = Seq2SeqNet(self.config)
        best.load_state_dict(self.best)
        best = best.to(self.place.device).eval()
        recall = None if self.validation is None else measure(best, self.validation, self.options.objective.horizon)
        count = sum(p.numel() for p in best.parameters())
        result = TrainResult(self.folder, recall, self.progress, count)
        if self.place.rank == 0:
            facts = {"options": self.options.to_dict(), "trace": self.identity["trace"]} | result.to_dict()
            facts.pop("out")
            save_predictor(self.folder, best, self.vocabulary, replace(self.info, training=self.info.training | facts))
        return result


def _optimizer(net: Seq2SeqNet, options: TrainOptions) -> torch.optim.AdamW:
    matrices = [p for p in net.parameters() if p.dim() == 2]
    others = [p for p in net.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98), fused=True)


def _config_dict(config: Seq2SeqConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def _check_trace(name: str, trace: Trace, config: Seq2SeqConfig) -> None:
    for field in ("num_layers", "num_experts", "top_k"):
        if getattr(trace, field) != getattr(config, field):
            raise UsageError(f"the {name} trace has {field} {getattr(trace, field)}, expected {getattr(config, field)}")
