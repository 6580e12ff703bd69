"""What features do at fixed points of a run.

A feature names the classes of its hooks in its declaration. An error in a hook becomes a note with the feature's name.
It never ends a run; before `ready`, a ConfigError of a worker's hook refuses it.
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
    """The data of a run, or of an evaluation, before their preprocessing."""

    plan: Plan
    source: Source
    #: The splits by name, that for training first; of an evaluation, the evaluated one alone.
    splits: Mapping[str, Rows]
    #: The raw inputs of a few examples.
    few: Any
    #: A sample of the training split, as columns. None in workers that are not the chief, and if there is `earlier`.
    sample: SplitSample | None = None
    #: The schema of the data of an earlier run that goes on, or is evaluated; empty if it kept none. None: a new run.
    earlier: Mapping[str, Any] | None = None
    #: All workers of the run. They call each hook in the same order, with the same values except for `sample`. What is
    #: passed to `workers.from_chief` must not raise: the others would wait.
    workers: Workers
    emit: Emit
    #: Emits an event after the first batch was read: data that cannot be read have an error of their own by then.
    emit_late: Emit


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data of a run as its training reads them: after their preprocessing, and without what `debug` leaves out."""

    plan: Plan
    splits: Splits


@dataclass(frozen=True, kw_only=True)
class DrawnExamples:
    """Which training examples an epoch has, if it is not each of them once."""

    order: Permutation  # finds the examples at the places of an epoch, by the seed and the number of the epoch
    outputs: OutputStructure  # those of the model, which can correct its answers for it, as by `Outputs.logit_shift`
    note: str  # tells the user about it. The report has it, too


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run that trains a model, in one of its workers."""

    plan: Plan
    folder: Path  # of the run
    log: Path  # the file of this worker's output
    is_chief: bool  # whether the events of this worker are those of the run
    is_resumed: bool  # whether it continues from an earlier command or attempt
    is_job: bool  # whether it is a job of a sweep
    splits: Splits  # the data after their preprocessing
    objective: Objective
    emit: Emit
    should_stop: Callable[[], bool]  # returns whether the run has been asked to stop


@dataclass(frozen=True, kw_only=True)
class EvaluatedSplit:
    """The split whose predictions will be kept, in a run or in an evaluation of a tracked model."""

    plan: Plan
    name: str  # `test`, `validation`, `train` or `all`
    rows: Rows  # before their preprocessing


class ExampleReader(Protocol):
    """Reads examples of the split, given by their ascending places in it: [n] int64."""

    @property
    def inputs(self) -> Any:
        """What describes the raw inputs: `Inputs`, or a dict of them."""

    def read_examples(self, examples: Array) -> tuple[Any, Any]:
        """Returns raw inputs and targets, [n, ...] each."""

    def preprocess(self, inputs: Any) -> Any:
        """Returns the inputs of the model for raw ones."""

    def read_columns(self, examples: Array) -> Mapping[str, Array]:
        """Returns the inputs with one value each, and columns that were added, by name: [n]."""

    def read_pictures(self, examples: Array) -> Array | None:
        """Returns pictures [n, height, width, channels] uint8; None if no input is a picture."""

    def add_columns(self, read: Callable[[Array], Mapping[str, Any]]) -> ExampleReader:
        """Returns a reader of further columns, which `read` returns by name, [n] each."""


@dataclass(frozen=True, kw_only=True)
class KeptPredictions:
    """The predictions that a test has kept, and what is known of the model."""

    plan: Plan
    folder: Path  # of the run, or of the evaluation; files are for `RunFolder(folder).evaluation`, which exists
    title: str  # what was tested, for people
    predictions: Predictions
    #: Waits for the figures of the predictions, and returns them. Call it in a thread: they are computed meanwhile.
    #: Raises what their computation raised.
    analyse: Callable[[], Analysis]
    reader: ExampleReader
    emit: Emit
    #: Returns the outputs of the model for preprocessed inputs. None: it is no model that was just trained.
    predict: Callable[[Any], Any] | None = None
    train: Mapping[str, float] = field(default_factory=dict)  # metrics of the training split: `accuracy`
    baseline: Mapping[str, float] = field(default_factory=dict)  # those of the best constant answer
    schema: Mapping[str, Any] = field(default_factory=dict)  # of the training data
    doubts: Mapping[str, str] = field(default_factory=dict)  # warnings about the model, by their rule


@dataclass(frozen=True)
class ReportSection:
    """A section that a feature adds to the report of a test, if there is a feature that makes reports.

    `Feature.report` names a function that takes `KeptPredictions` and returns such sections. It is called in a thread,
    without TensorFlow. `pages/html.py` and `pages/charts.py` have what draws charts and tables.
    """

    title: str
    html: str = ""  # as it is: escape texts
    rows: Sequence[Mapping[str, Any]] = ()  # of a table, by the names of its columns; also `Figure`s


class WorkerHook:
    """What a feature does in each worker. Subclass it, and name the subclass in `Feature.worker`.

    A process makes one object and calls its methods from top to bottom, so it can keep what it found before in
    attributes. Within a phase, a feature comes after those that it needs. An error in a hook is told in a note with the
    name of the feature, and does not end the run. Only an error in `draw_examples` or `change_feed` ends it, before
    `ready`: without them, another model would be trained than the config says.
    """

    def explain_no_folds(self, plan: Plan) -> str:
        """Returns why no member of an ensemble can leave out a part of the training examples; "" if it can.

        Evaluations call it, too.
        """
        return ""

    def after_data(self, data: ReadData) -> Mapping[str, Any]:
        """Looks at the data, before `ready`. Returns what is kept in the run's schema of them, as JSON can hold it.

        With `dataset.check=none` it is not called.

        Raises:
            ConfigError: if the run is refused.
        """
        return {}

    def draw_examples(self, data: TrainingData) -> DrawnExamples | None:
        """Returns which training examples an epoch has; None: each of them once, as without the feature.

        All workers call it, and return the same. Only one feature of a run can return something.

        Raises:
            ConfigError: if the run is refused.
        """
        return None

    def change_feed(self, data: TrainingData, feed: Feed) -> Feed:
        """Returns the feed of the training examples with other batches, or as it is.

        All workers call it. A batch has to follow from the seed, the epoch and the step alone: then it is the same on
        any number of replicas, and in a resumed run.

        Raises:
            ConfigError: if the run is refused.
        """
        return feed

    def before_test(self, split: EvaluatedSplit) -> None:
        """Sees the split whose predictions will be kept, before `ready`; not with `evaluation=none`.

        All workers call it.

        Raises:
            ConfigError: if the run is refused.
        """

    def after_build(self, run: TrainedRun, export: Callable[[Path], object]) -> None:
        """Sees the model when it is built, before `ready` and before the training. All workers call it.

        Args:
            export: writes the untrained model to a folder, in the form of an exported one. All workers must call it.

        Raises:
            ConfigError: if the run is refused.
        """

    def report_examples(self, data: TrainingData, feed: Feed, folder: Path, emit: Emit) -> None:
        """Adds to what is recorded of the training examples, right after `ready`.

        Only the chief calls it, and no resumed run. A trial that searches a setting calls it, too.

        Args:
            feed: of the training examples, as all features have changed it.
            folder: of the run.
        """

    def at_ready(self, run: TrainedRun) -> None:
        """Is called right after `ready`: the run exists, and its training begins. All workers call it."""

    def after_epoch(self, run: TrainedRun, epoch: int, metrics: Mapping[str, float]) -> None:
        """Sees the metrics of an epoch after its validation. Only the chief calls it, and the training waits for it.

        After an error, it is not called for later epochs. A resumed run calls it again for the epochs after its
        checkpoint.

        Args:
            epoch: the number of the epoch, from 1.
            metrics: the loss, the metrics and the speed of the epoch (`train/loss`, `perf/step_ms`), and those of its
                validation if there was one (`val/loss`).
        """

    def after_test(self, kept: KeptPredictions) -> None:
        """Sees the predictions of the test, before the model is exported. Only the chief calls it.

        The export waits for it. What takes long and does not need the model belongs in a thread.
        """

    def after_export(self, run: TrainedRun, step: int) -> None:
        """Sees the trained model, which is in the run's folder. Only the chief calls it.

        Args:
            step: the optimizer update after which the model was taken.
        """

    def finish_test(self) -> None:
        """Waits for what `after_test` began, and reports it. It follows the export, or the test of an evaluation."""

    def at_end(self, run: TrainedRun) -> None:
        """Is called at the end of a run that has trained to its end, before the end is reported. The run waits for it.

        Only the chief calls it, after everything else is written. A run that is stopped does not.
        """

    def close(self) -> None:
        """Frees what the hook holds, such as a process. It follows `at_ready` in any case, also after an error."""


@dataclass(frozen=True)
class FollowedRun:
    """The run or the sweep that hooks of the launcher follow."""

    plan: Plan  # of a sweep: that of its first job
    folder: Path
    is_job: bool  # whether it is a job of a sweep
    find_name: Callable[[], str]  # returns its name in the store
    print_note: Callable[[str], None]  # shows a line in the terminal
    is_on_terminal: bool = False  # whether such a line goes to a terminal, and not to a file or a pipe


class LauncherHook:
    """What a feature does in the launcher while a run that trains goes on, and after a run or a sweep.

    It runs in the process of the command, on the chief's machine. It imports no TensorFlow. A method returns quickly:
    the launcher waits for it.
    """

    def __init__(self, run: FollowedRun) -> None:
        self.run = run

    def on_event(self, event: Event) -> None:
        """Sees each event of the run, in their order. A sweep has none; its jobs have theirs."""

    def after_folds(self, kept: KeptPredictions) -> Sequence[Path]:
        """Sees the predictions of all folds of a sweep's best job; returns files for the sweep's own run."""
        return ()

    def describe_end(self) -> Sequence[tuple[str, str]]:
        """Returns rows (label, text) for the last lines of a run that is FINISHED."""
        return ()

    def after_run(self, answer: Mapping[str, Any]) -> None:
        """Is called at the end, when everything is recorded; not if the run was refused.

        Args:
            answer: the object of `--json`, with `exit_code`.
        """
