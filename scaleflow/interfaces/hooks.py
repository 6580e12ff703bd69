"""The hooks of features: methods that are called at fixed points of a run.

A feature names its hook classes in its declaration. An error in a hook becomes a note with the feature's name and never
ends a run. Exception: before `ready`, a ConfigError in a worker's hook refuses the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scaleflow.interfaces.config import Plan
from scaleflow.interfaces.data import OutputStructure, Rows, Source
from scaleflow.interfaces.events import Emit, Event
from scaleflow.interfaces.training import Feed, Objective, Workers

if TYPE_CHECKING:
    import numpy as np

    from scaleflow.dataset import Permutation, Splits
    from scaleflow.dataset.schema import SplitSample
    from scaleflow.evaluation.analysis import Analysis
    from scaleflow.evaluation.predictions import Predictions

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class ReadData:
    """The data of a run, or of an evaluation, before preprocessing."""

    plan: Plan
    source: Source
    #: The splits by name, training first. In an evaluation, only the evaluated split.
    splits: Mapping[str, Rows]
    #: The raw inputs of a few examples.
    raw_sample: Any
    #: A sample of the training split, as columns. None in workers other than the chief, and if `earlier` is set.
    sample: SplitSample | None = None
    #: The data schema of the earlier run that is resumed or evaluated; empty if it has none. None: a new run.
    earlier: Mapping[str, Any] | None = None
    #: All workers of the run. They call each hook in the same order, with the same values except for `sample`. A
    #: function that is passed to `workers.from_chief` must not raise: the others would wait.
    workers: Workers
    emit: Emit
    #: Emits an event after the first batch was read. If the data cannot be read, that error is reported instead.
    emit_late: Emit


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data of a run as its training reads it: after preprocessing, and without examples that `debug` leaves out."""

    plan: Plan
    splits: Splits


@dataclass(frozen=True, kw_only=True)
class DrawnExamples:
    """The training examples of an epoch, if it does not have each example exactly once."""

    order: Permutation  # the examples at the places of an epoch, by seed and epoch
    outputs: OutputStructure  # the model's outputs, which may correct its answers, as `Outputs.logit_shift` does
    note: str  # a note for the user and the report


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run that trains a model, in one of its workers."""

    plan: Plan
    folder: Path  # the run's folder
    log: Path  # the file of this worker's output
    is_chief: bool  # whether the events of this worker are the run's events
    is_resumed: bool  # whether it continues from an earlier command or attempt
    is_job: bool  # whether it is a job of a sweep
    splits: Splits  # the data after preprocessing
    objective: Objective
    emit: Emit
    should_stop: Callable[[], bool]  # returns whether the run was requested to stop


@dataclass(frozen=True, kw_only=True)
class EvaluatedSplit:
    """The split whose predictions will be kept, in a run or in an evaluation of a tracked model."""

    plan: Plan
    name: str  # `test`, `validation`, `train` or `all`
    rows: Rows  # before preprocessing


class ExampleReader(Protocol):
    """Reads examples of the split by their places, [n] int64, ascending."""

    @property
    def inputs(self) -> Any:
        """The description of the raw inputs: `Inputs`, or a dict of them."""

    def read_examples(self, examples: Array) -> tuple[Any, Any]:
        """Returns raw inputs and targets, [n, ...] each."""

    def preprocess(self, inputs: Any) -> Any:
        """Converts raw inputs to inputs of the model."""

    def read_columns(self, examples: Array) -> Mapping[str, Array]:
        """Returns the inputs with one value per example, and the added columns, by name: [n]."""

    def read_pictures(self, examples: Array) -> Array | None:
        """Returns pictures [n, height, width, channels] uint8; None if no input is a picture."""

    def add_columns(self, read: Callable[[Array], Mapping[str, Any]]) -> ExampleReader:
        """Returns a reader with further columns, which `read` returns by name, [n] each."""


@dataclass(frozen=True, kw_only=True)
class KeptPredictions:
    """The kept predictions of a test, and facts about the model."""

    plan: Plan
    folder: Path  # the folder of the run or the evaluation; write files to `RunFolder(folder).evaluation`, which exists
    title: str  # the tested model, for people
    predictions: Predictions
    #: Waits for the figures of the predictions, and returns them. Call it in a thread, because they are still being
    #: computed. Raises the errors of the computation.
    analyse: Callable[[], Analysis]
    reader: ExampleReader
    emit: Emit
    #: Returns the model's outputs for preprocessed inputs. None: the model was not trained by this process.
    predict: Callable[[Any], Any] | None = None
    train: Mapping[str, float] = field(default_factory=dict)  # metrics of the training split: `accuracy`
    baseline: Mapping[str, float] = field(default_factory=dict)  # metrics of the best constant answer
    schema: Mapping[str, Any] = field(default_factory=dict)  # the schema of the training data
    doubts: Mapping[str, str] = field(default_factory=dict)  # warnings about the model, by rule


@dataclass(frozen=True)
class ReportSection:
    """A section that a feature adds to the report of a test, if there is a feature that makes reports.

    `Feature.report` names a function that takes `KeptPredictions` and returns such sections. It is called in a thread,
    without TensorFlow. `pages/html.py` and `pages/charts.py` draw charts and tables.
    """

    title: str
    html: str = ""  # included unchanged: escape texts
    rows: Sequence[Mapping[str, Any]] = ()  # the rows of a table, by column name; may contain `Estimate`s


class WorkerHook:
    """A feature's hook in each worker. Subclass it, and name the subclass in `Feature.worker`.

    A process makes one object and calls its methods from top to bottom, so it can keep earlier results in attributes.
    Within a phase, a feature comes after the features that it needs. An error in a hook becomes a note with the
    feature's name, and does not end the run. Only an error in `draw_examples` or `change_feed` ends it, before `ready`,
    and one in `explain_no_folds` of a feature that changes the training: without them, the trained model would differ
    from the config.
    """

    def explain_no_folds(self, plan: Plan) -> str:
        """Returns why members of an ensemble cannot leave out a part of the training examples; "" if they can.

        Evaluations also call it.
        """
        return ""

    def after_data(self, data: ReadData) -> Mapping[str, Any]:
        """Looks at the data, before `ready`. Returns values to keep in the run's data schema, as JSON can hold them.

        It is not called with `dataset.check=none`.

        Raises:
            ConfigError: to refuse the run.
        """
        return {}

    def draw_examples(self, data: TrainingData) -> DrawnExamples | None:
        """Returns the training examples of an epoch; None: each example once, as without the feature.

        All workers call it, and must return the same. Only one feature of a run may return a value.

        Raises:
            ConfigError: to refuse the run.
        """
        return None

    def change_feed(self, data: TrainingData, feed: Feed) -> Feed:
        """Returns the feed of the training examples, with other batches or unchanged.

        All workers call it. A batch must depend only on the seed, the epoch and the step: then it is the same on any
        number of replicas, and in a resumed run.

        Raises:
            ConfigError: to refuse the run.
        """
        return feed

    def before_test(self, split: EvaluatedSplit) -> None:
        """Receives the split whose predictions will be kept, before `ready`. Not called with `evaluation=none`.

        All workers call it.

        Raises:
            ConfigError: to refuse the run.
        """

    def after_build(self, run: TrainedRun, export: Callable[[Path], object]) -> None:
        """Receives the built model, before `ready` and before training. All workers call it.

        Args:
            export: writes the untrained model to a folder, in the form of an exported model. All workers must call it.

        Raises:
            ConfigError: to refuse the run.
        """

    def report_examples(self, data: TrainingData, feed: Feed, folder: Path, emit: Emit) -> None:
        """Adds to the record of the training examples, right after `ready`.

        Only the chief calls it. A resumed run does not call it, but a trial that searches for a setting does.

        Args:
            feed: the feed of the training examples, after all features have changed it.
            folder: the run's folder.
        """

    def at_ready(self, run: TrainedRun) -> None:
        """Called right after `ready`: the run exists, and its training begins. All workers call it."""

    def after_epoch(self, run: TrainedRun, epoch: int, metrics: Mapping[str, float]) -> None:
        """Receives the metrics of an epoch after its validation. Only the chief calls it, and training waits for it.

        After an error, it is not called for later epochs. A resumed run calls it again for the epochs after its
        checkpoint.

        Args:
            epoch: the number of the epoch, from 1.
            metrics: the loss, the metrics and the speed of the epoch (`train/loss`, `perf/step_ms`), and, if it was
                validated, the metrics of its validation (`val/loss`).
        """

    def after_test(self, kept: KeptPredictions) -> None:
        """Receives the predictions of the test, before the model is exported. Only the chief calls it.

        The export waits for it. Use a thread for slow work that does not need the model.
        """

    def after_export(self, run: TrainedRun, step: int) -> None:
        """Receives the trained model, which is in the run's folder. Only the chief calls it.

        Args:
            step: the optimizer update after which the model was taken.
        """

    def finish_test(self) -> None:
        """Waits for the work that `after_test` began, and reports it. Follows the export, or the
        test of an evaluation.
        """

    def at_end(self, run: TrainedRun) -> None:
        """Called after a run has trained to its end, before the end is reported. The run waits for it.

        Only the chief calls it, after everything else is written. A stopped run does not call it.
        """

    def close(self) -> None:
        """Releases resources of the hook, such as a process. It always follows `at_ready`, even after an error."""


@dataclass(frozen=True)
class FollowedRun:
    """The run or the sweep that a launcher hook follows."""

    plan: Plan  # for a sweep, the plan of its first job
    folder: Path
    is_job: bool  # whether it is a job of a sweep
    find_name: Callable[[], str]  # returns its name in the store
    print_note: Callable[[str], None]  # prints a line on the terminal
    is_on_terminal: bool = False  # whether such a line goes to a terminal instead of a file or a pipe
    print_line: Callable[[str], None] = print  # prints a line that is no note


class LauncherHook:
    """A feature's hook in the launcher, during a run that trains, and after a run or a sweep.

    It runs in the process of the command, on the chief's machine. It must not import TensorFlow. Methods must return
    quickly, because the launcher waits for them.
    """

    def __init__(self, run: FollowedRun) -> None:
        self.run = run

    def on_event(self, event: Event) -> None:
        """Receives each event of the run, in order. A sweep has no events; its jobs have their own."""

    def after_folds(self, kept: KeptPredictions) -> Sequence[Path]:
        """Receives the predictions of all folds of a sweep's best job. Returns files for the sweep's own run."""
        return ()

    def describe_end(self) -> Sequence[tuple[str, str]]:
        """Returns rows (label, text) for the last lines of a run that is FINISHED."""
        return ()

    def after_run(self, answer: Mapping[str, Any]) -> None:
        """Called at the end, when everything is recorded. Not called if the run was refused.

        Args:
            answer: the object of `--json`, with `exit_code`.
        """
