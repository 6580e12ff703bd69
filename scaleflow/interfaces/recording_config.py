"""The sections of the config about what is kept of a run, how it is observed, and how it is repeated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Best:
    """`checkpoint.best`: the value by which the best checkpoint is chosen, at the end of each epoch.

    Attributes:
        monitor: the watched value, as in `EarlyStopping`. `auto`: `val/loss`, and without a validation split there is
            no best checkpoint. Default `val/loss`.
        mode: whether a smaller (`min`) or larger (`max`) value is better. Default `auto`, as in `EarlyStopping`.
    """

    monitor: str = "val/loss"
    mode: Literal["auto", "min", "max"] = "auto"


@dataclass(frozen=True)
class Checkpoint:
    """`checkpoint`: when the whole state of a run is saved, and which checkpoints are kept.

    A run also saves at its end and when it is stopped.

    Attributes:
        name: `default` saves checkpoints; `best` saves by time, and tests and exports the best epoch's; `none` saves
            none, and the run cannot be resumed. Default `default`.
        every_epochs: save after this many epochs. At least 1. Default 1. null: not at the ends of epochs.
        every_steps: save after this many steps; calls of the compiled loop end there. At least 1. Default null: never.
        every_seconds: save after this many seconds of training since the last save. Checked after each call of the
            loop. Above 0. Default null: never.
        keep: the number of newest checkpoints that are kept. At least 1. Default 2.
        best: also keep the best checkpoint, and the value that it is chosen by. Default null: none is kept, unless
            `export` is `best`.
        export: which model is tested and exported: that of the `last` step or of the `best` checkpoint. Default `last`.
        folder: the folder of the checkpoints, a path or the address of a prefix in an object store (`s3://BUCKET/PATH`,
            `gs://`, `abfs://`). At an address, each checkpoint is written to the run's folder first, then uploaded in
            the background. Several machines need a path that all of them see, or an address. Default null:
            `checkpoints` in the run's folder.
        max_seconds: seconds after the start of the command at which it saves and ends as KILLED, as if by a signal.
            Checked after each call of the loop. Not for kubernetes. Above 0. Default null: no limit.
        write_seconds: the most seconds that the run waits for one checkpoint to be written, before it fails, and that
            its end waits for uploads to an object store, before it ends without them. Above 0. Default 600.
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
    """`profiler`: which steps are traced.

    Attributes:
        name: `trace` traces the steps of one or more windows; `none` traces nothing. Default `none`.
        start_step: the first traced step of the window, or a list with that of each window. Steps are counted from
            1, as in metrics; the first step of a run compiles and is not traced. At least 2. Default 50.
        steps: the number of steps of each window. Windows must not overlap. At least 2. Default 20.
    """

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
    """`evaluation`: what is made of the predictions for the test split, or without one, for the validation split.

    Attributes:
        name: `default` keeps the predictions and makes a report of them; `full` also looks for what mattered in the
            worst mistakes: parts of pictures, words of texts; `none` makes nothing. Default `default`.
        id: a column that identifies examples, which kept predictions copy: of a table any column of its files, of
            another dataset an input with one value. Default null: the file and the row.
        slices: further columns that divide the examples into slices, as `id`. Default null: the inputs with one value,
            the classes and the lengths of texts only.
        worst: the number of mistakes of each output that the report shows with their inputs. 0 to 1000. Default 24.
        intervals: the number of bootstrap resamples from which the 95 % intervals are computed. 0 to 10,000. Default
            1000. 0: no intervals.
        importance: a table: the most examples with which the importance of its columns is measured: how much worse the
            model gets if a column is shuffled. 0 to 1,000,000. Default 5000. 0: it is not measured.
        seconds: the time that importance may take, and so may what mattered in mistakes, in seconds: columns and
            examples that it does not suffice for have none. Above 0. Default 5; in conf/evaluation/full.yaml 60.
        miss_cost: two classes: the cost of a missed second class, if a false alarm costs 1. The report has the
            threshold that costs least. Above 0. Default 1.
    """

    name: Literal["default", "full", "none"] = "default"
    id: str | None = None
    slices: list[str] | None = None
    worst: int = field(default=24, metadata={"at_least": 0, "at_most": 1000})
    intervals: int = field(default=1000, metadata={"at_least": 0, "at_most": 10_000})
    importance: int = field(default=5000, metadata={"at_least": 0, "at_most": 1_000_000})
    seconds: float = field(default=5.0, metadata={"above": 0.0})
    miss_cost: float = field(default=1.0, metadata={"above": 0.0})


@dataclass(frozen=True)
class ExportOptions:
    """`export`: the formats of the trained model, besides the Keras file and the SavedModel.

    Attributes:
        formats: `keras`, `litert`, `litert_int8`, `onnx` and `openvino`. Each is loaded in its own runtime and compared
            with the trained model on the test split. Default null: none.
        tolerance: the most by which an output may differ, in units of the largest output, or of 1 if that is larger. A
            format that differs by more is removed. Above 0. Default null: 1e-4 for float32, 1e-2 for mixed_float16 and
            5e-2 for mixed_bfloat16.
        int8_loss: the most that the accuracy of `litert_int8` may be lower; without an accuracy, the most that an error
            may be larger, as a share of it. At least 0. Default 0.01.
        calibration_examples: the training examples, drawn with the seed, from which `litert_int8` takes the ranges of
            values. At least 1. Default 200.
    """

    formats: list[str] | None = None
    tolerance: float | None = field(default=None, metadata={"above": 0.0})
    int8_loss: float = field(default=0.01, metadata={"at_least": 0.0})
    calibration_examples: int = field(default=200, metadata={"at_least": 1})


@dataclass(frozen=True)
class PromotionOptions:
    """`promotion`: whether the trained model becomes the one in use, the alias `champion` of a registered model.

    Attributes:
        name: `champion` compares the model with the champion and moves the alias if it is better; `none` does nothing.
            Default `none`.
        model: the registered model. Required for `champion`.
        metric: by which the models are compared, on the same examples: `accuracy`, `mae`, or `OUTPUT/accuracy` of a
            model with several outputs. Default null: the first that the model has.
        confidence: of the interval of the difference, by a paired bootstrap. Above 0.5, below 1. Default 0.95.
        tolerance: the lower end of the interval must be above this. Below 0, a model that may be slightly worse is
            promoted, too. Default 0.
        at_least: metrics of the run, such as `test/accuracy`, and what they must be at least; errors and losses, at
            most. A slice of the report is `slice/COLUMN/VALUE`. Default null: no floors.
        environment: where the model is served before the alias moves: `here`, in a process with the packages of this
            one, or `clean`, with the packages of its own requirements, which are installed. Default `here`.
        most_ms: the most that an answer may take, in ms: the median of single requests over HTTP. Above 0. Default
            null: no limit.
        most_mb: the most memory that the serving process may take, in MB. Above 0. Default null: no limit.
    """

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
    """`tracking`: where the run is recorded.

    Attributes:
        name: `mlflow` records the run in MLflow; `none` leaves everything in the run's folder. Default `mlflow`.
        uri: the MLflow tracking URI. Default null: the environment variable MLFLOW_TRACKING_URI, otherwise
            `sqlite:///mlflow.db` in the current folder. `make_plan` makes the path of an SQLite file absolute.
        experiment: the name of the MLflow experiment, which is created if it is missing. With the default `scaleflow`,
            MLFLOW_EXPERIMENT_ID or MLFLOW_EXPERIMENT_NAME wins.
        run_name: the name of the run. Default null: DATASET-MODEL-STRATEGY-PRECISION, after the typed keys
            of `model` and `optimizer`; in a sweep after the swept values.
        tags: tags of the run in MLflow. Default null: scaleflow's own only.
        flush_seconds: the most seconds that the end of a run waits for a slow or unreachable store. `scaleflow.sync`
            sends the rest later. At least 0. Default 60.
        offline: also start if the store does not answer. Default false: the command ends with exit code 2.
        system_metrics: record CPU, memory, disk, network and GPU use of this machine and of each worker process, every
            ten seconds. Default true.
        code: keep the uncommitted changes, and copies of the user's modules that the config names, in the run's folder
            and in MLflow, with secrets masked. false: only digests of the modules and the commit. Default true.
        register_as: the registered model of which the logged model becomes a new version. Default null: not registered.
        alias: the alias of the registered model that moves to the new version, never back to an older one. Letters,
            digits, `_` and `-`; not `latest` or `v1`. Default `newest`. null: no alias.
        tensorboard: also write metrics, and histograms of the weights, to `tensorboard/` in the run's folder. Needs the
            package tensorboard. Default false.
        histograms_every_epochs: tensorboard: the number of epochs between two histograms. At least 1. Default 1.
    """

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
    """`debug`: switches to find errors. Each option of the group sets one of them; they can be combined.

    Attributes:
        inline: run the worker in the launcher's process, for pdb. One process only. Default false.
        overfit: train every step on the first global batch, validate on the same, and do not test. Default false.
        fast: one step of training, and one batch of validation and test. Default false.
        nan: end the run at the first operation that gives NaN or Inf, and name it. Slower. Default false.
        placement: write the device of each operation to the worker's log. Default false.
        eager: compile nothing: Python runs each operation. On `one_device` and `pipeline`. Slow. Default false.
    """

    inline: bool = False
    overfit: bool = False
    fast: bool = False
    nan: bool = False
    placement: bool = False
    eager: bool = False


@dataclass(frozen=True)
class Sweep:
    """`sweep`: options for several runs by one command (`-m`).

    Attributes:
        on_change: what to do if `hydra.sweep.dir` holds a sweep of another config, or if the user's code or the data
            files changed since its jobs ran. `refuse` ends the command. `new` runs the jobs of another config in
            addition to the old ones. `rerun` does so, too, and runs jobs whose code or data changed again. `keep` keeps
            their results if they are finished. Default `refuse`.
        metric: the metric that ranks the jobs in the report: its last value, or with `checkpoint.export=best` that of
            the best checkpoint. A sweeper gets it for each job; NaN if the job did not finish. Default `val/loss`.
        mode: whether a smaller (`min`) or larger (`max`) value of it is better. Default `auto`: as the sweeper's
            `direction` says; without one, as in `EarlyStopping`. It must be set for a metric of the user's own.
        repeat: how often each job runs and counts; the report has medians. At least 1. Default 1.
        warm_up: how often each job runs before that, without counting. At least 0. Default 0.
        same_losses: fail if jobs that differ only in strategy, hardware, cluster and precision, and have the same
            global batch, start with different losses. Default false.
    """

    on_change: Literal["refuse", "new", "rerun", "keep"] = "refuse"
    metric: str = "val/loss"
    mode: Literal["auto", "min", "max"] = "auto"
    repeat: int = field(default=1, metadata={"at_least": 1})
    warm_up: int = field(default=0, metadata={"at_least": 0})
    same_losses: bool = False
