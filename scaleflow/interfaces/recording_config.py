"""The sections of the config about what is kept of a run, how it is observed, and how it is repeated.

The comments of conf/ describe the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Best:
    """`checkpoint.best`: the value by which the best checkpoint is chosen, at the end of each epoch."""

    monitor: str = "val/loss"
    mode: Literal["auto", "min", "max"] = "auto"


@dataclass(frozen=True)
class Checkpoint:
    """`checkpoint`: when the whole state of a run is saved, and which checkpoints are kept.

    A run also saves at its end and when it is stopped.
    """

    name: Literal["default", "best", "none"] = "default"
    every_epochs: int | None = field(default=1, metadata={"at_least": 1})
    every_steps: int | None = field(default=None, metadata={"at_least": 1})
    every_seconds: float | None = field(default=None, metadata={"above": 0.0})
    keep: int = field(default=2, metadata={"at_least": 1})
    best: Best | None = None
    export: Literal["last", "best"] = "last"
    folder: str | None = None
    max_seconds: float | None = field(default=None, metadata={"above": 0.0})
    write_seconds: float = field(default=600.0, metadata={"above": 0.0})

    @property
    def sought(self) -> Best | None:
        """The value that the best checkpoint is chosen by; None if none is kept."""
        return self.best or (Best() if self.export == "best" else None)


@dataclass(frozen=True)
class Profiler:
    """`profiler`: which steps are traced."""

    name: Literal["none", "trace"] = "none"
    start_step: int | list[int] = field(default=50, metadata={"at_least": 2})
    steps: int = field(default=20, metadata={"at_least": 2})

    @property
    def windows(self) -> list[tuple[int, int]]:
        """The (first, last) traced step of each window, in order; empty if nothing is traced."""
        if self.name == "none":
            return []
        starts = self.start_step if isinstance(self.start_step, list) else [self.start_step]
        return [(start, start + self.steps - 1) for start in sorted(starts)]


@dataclass(frozen=True)
class EvaluationOptions:
    """`evaluation`: what is made of the predictions for the test split, or without one, for the validation split."""

    name: Literal["default", "full", "none"] = "default"
    id: str | None = None
    slices: list[str] | None = None
    worst: int = field(default=24, metadata={"at_least": 0, "at_most": 1000})
    intervals: int = field(default=1000, metadata={"at_least": 0, "at_most": 10_000})
    importance: int = field(default=5000, metadata={"at_least": 0, "at_most": 1_000_000})
    seconds: float = field(default=5.0, metadata={"above": 0.0})
    miss_cost: float = field(default=1.0, metadata={"above": 0.0})
    baselines: int = field(default=1_000_000, metadata={"at_least": 0, "at_most": 1_000_000})


@dataclass(frozen=True)
class ExportOptions:
    """`export`: the formats of the trained model, besides the Keras file and the SavedModel."""

    formats: list[str] | None = None
    tolerance: float | None = field(default=None, metadata={"above": 0.0})
    int8_loss: float = field(default=0.01, metadata={"at_least": 0.0})
    calibration_examples: int = field(default=200, metadata={"at_least": 1})


@dataclass(frozen=True)
class PromotionOptions:
    """`promotion`: whether the trained model becomes the one in use, the alias `champion` of a registered model."""

    name: Literal["none", "champion"] = "none"
    model: str | None = None
    metric: str | None = None
    confidence: float = field(default=0.95, metadata={"above": 0.5, "below": 1.0})
    tolerance: float = 0.0
    at_least: dict[str, float] | None = None
    environment: Literal["here", "clean"] = "here"
    most_ms: float | None = field(default=None, metadata={"above": 0.0})
    most_mb: float | None = field(default=None, metadata={"above": 0.0})


@dataclass(frozen=True)
class Tracking:
    """`tracking`: where the run is recorded."""

    name: Literal["mlflow", "none"] = "mlflow"
    uri: str | None = None
    experiment: str = "scaleflow"
    run_name: str | None = None
    tags: dict[str, str] | None = None
    flush_seconds: float = field(default=60.0, metadata={"at_least": 0.0})
    offline: bool = False
    system_metrics: bool = True
    code: bool = True
    register_as: str | None = None
    alias: str | None = "newest"
    tensorboard: bool = False
    histograms_every_epochs: int = field(default=1, metadata={"at_least": 1})


@dataclass(frozen=True)
class Debug:
    """`debug`: switches to find errors. Each option of the group sets one of them; they can be combined."""

    inline: bool = False
    overfit: bool = False
    fast: bool = False
    nan: bool = False
    placement: bool = False
    eager: bool = False


@dataclass(frozen=True)
class Sweep:
    """`sweep`: options for several runs by one command (`-m`)."""

    on_change: Literal["refuse", "new", "rerun", "keep"] = "refuse"
    metric: str = "val/loss"
    mode: Literal["auto", "min", "max"] = "auto"
    repeat: int = field(default=1, metadata={"at_least": 1})
    warm_up: int = field(default=0, metadata={"at_least": 0})
    same_losses: bool = False
