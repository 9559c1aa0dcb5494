"""How a sequence predictor is trained: every setting, with its default."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from seqmoe.predictors.objective import Objective
from seqmoe.predictors.seq2seq import Dropout
from seqmoe.profiles.errors import UsageError


@dataclass(frozen=True)
class TrainOptions:
    """Settings of one training. A checkpoint is resumed only under the same ones. UsageError for what cannot be."""

    epochs: int = 12  # passes over the training sequences, both phases together
    budget_s: float | None = None  # replaces `epochs` by as many as are likely to fit; never exceeded by much
    teacher_share: float = 0.6  # of all steps that teacher forcing takes; the rest trains recursion too
    ridge_start: bool = True  # begin at the ridge regression of one step on the one before
    batch_rows: int = 2  # rows of packed sequences in one step, all processes together
    row_steps: int = 512
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.2
    warmup: int = 60  # steps
    clip: float = 1.0  # largest norm of the gradient
    ema: float = 0.995  # of the weights; what is validated and saved
    patience: int = 5  # validations without gain that end a phase
    seed: int = 0
    dropout: Dropout = field(default_factory=lambda: Dropout(input=0.2, hidden=0.3, token=0.3))
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_rows", "warmup", "patience"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.row_steps < 2:
            raise UsageError(f"row_steps must be at least 2, got {self.row_steps}")
        if not 0 <= self.teacher_share <= 1:
            raise UsageError(f"teacher_share must be between 0 and 1, got {self.teacher_share}")
        if not self.learning_rate > 0:
            raise UsageError(f"learning_rate must be more than 0, got {self.learning_rate}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self) | {"dropout": self.dropout._asdict()}

    def differs(self, other: dict[str, Any]) -> str | None:
        """The first setting that `other` (a `to_dict`) has differently, as "name: here, there"; None if none has."""
        mine = self.to_dict()
        for name, value in mine.items():
            if other.get(name) != value:
                return f"{name}: {other.get(name)} there, {value} here"
        return None
