"""Calls the hooks of features in a worker."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError, RunError, ScaleflowError, read_reason
from scaleflow.interfaces import Feed, Plan
from scaleflow.interfaces.events import Emit, Note
from scaleflow.interfaces.extras import catch_any, guard_extra
from scaleflow.interfaces.features import import_named, list_features
from scaleflow.interfaces.hooks import (
    DrawnExamples,
    EvaluatedSplit,
    KeptPredictions,
    ReadData,
    TrainedRun,
    TrainingData,
    WorkerHook,
)
from scaleflow.worker.failures import guard, is_loss_of_peer, is_out_of_memory


def load_hooks(plan: Plan, emit: Emit) -> dict[str, WorkerHook]:
    """Returns the hooks of the features that a plan uses, by the names of the features.

    A feature comes after those that it needs. A hook that cannot be imported becomes a note.

    Raises:
        ConfigError: if a hook cannot be imported that changes what the model is trained on.
    """
    hooks: dict[str, WorkerHook] = {}
    for feature in list_features().values():
        feature.check_use(plan)
        if not feature.worker or not feature.is_used_by(plan):
            continue
        if feature.changes_training:
            try:
                hooks[feature.name] = make_hook(feature.worker)
            except Exception as error:
                raise ConfigError(
                    f"the feature {feature.name}: it changes what the model is trained on, and cannot be imported "
                    f"({type(error).__name__}: {error}); repair its package, or leave out its keys"
                ) from error
        else:
            with guard(f"the feature {feature.name}", emit):
                hooks[feature.name] = make_hook(feature.worker)
    return hooks


def make_hook(place: str) -> WorkerHook:
    """Returns an object of the class at "module:NAME". Raises TypeError if the class is no `WorkerHook`."""
    hook = import_named(place)()
    if not isinstance(hook, WorkerHook):
        raise TypeError(f"{place} is no WorkerHook")
    return hook


def looks_at_data(hook: WorkerHook) -> bool:
    """Returns whether a hook looks at the data of a run."""
    return type(hook).after_data is not WorkerHook.after_data


def refuses_run(error: Exception) -> bool:
    """Returns whether an error in a hook must end the run: a refusal before `ready`, or the loss of a process."""
    return isinstance(error, ConfigError) or is_loss_of_peer(error)


def explain_no_folds(hooks: Mapping[str, WorkerHook], plan: Plan, emit: Emit) -> str:
    """Returns why the members of an ensemble cannot leave out parts of the training examples; "" if they can.

    Raises RunError if a feature fails that changes the training.
    """
    for name, hook in hooks.items():
        reason = ""
        feature = list_features().get(name)
        if feature is not None and feature.changes_training:
            with name_error(name):
                reason = hook.explain_no_folds(plan)
        else:
            with guard_extra(f"the feature {name}", lambda text: emit(Note(text))):
                reason = str(hook.explain_no_folds(plan))
        if reason:
            return reason
    return ""


@contextlib.contextmanager
def name_error(name: str) -> Iterator[None]:
    """Turns errors of a feature that changes the training into a RunError with its name. Its own refusals stay.

    Without the feature, the trained model would differ from the config.
    """
    try:
        with catch_any():
            yield
    except Exception as error:  # the code of another package
        if isinstance(error, ScaleflowError) or is_loss_of_peer(error) or is_out_of_memory(error):
            raise
        raise RunError(
            f"the feature {name}: it changes what the model is trained on, and fails "
            f"({type(error).__name__}: {read_reason(error)}); repair its package, or leave out its keys"
        ) from error


def call_after_data(hooks: Mapping[str, WorkerHook], data: ReadData) -> dict[str, Any]:
    """Returns the values that all hooks add to the data's schema. Raises ConfigError if a hook refuses the run."""
    kept: dict[str, Any] = {}
    for name, hook in hooks.items():
        with guard_extra(f"the feature {name}", lambda text: data.emit(Note(text)), refuses_run):
            values = dict(hook.after_data(data))
            json.dumps(values)  # the schema is written as JSON
            kept |= values
    return kept


def draw_examples(hooks: Mapping[str, WorkerHook], data: TrainingData) -> tuple[str, DrawnExamples | None]:
    """Returns the feature that chooses the training examples of an epoch, and its choice; None without such a feature.

    Raises ConfigError if a hook refuses the run, or if two features choose examples.
    """
    drawing = ""
    drawn: DrawnExamples | None = None
    for name, hook in hooks.items():
        with name_error(name):
            choice = hook.draw_examples(data)
            if not isinstance(choice, DrawnExamples | None):
                raise TypeError(f"draw_examples returns {type(choice).__name__}, and not DrawnExamples")
        if choice is None:
            continue
        if drawn is not None:
            raise ConfigError(
                f"the features {drawing} and {name} both say which examples an epoch has; use only one of the two"
            )
        drawing = name
        drawn = choice
    return drawing, drawn


def change_feed(hooks: Mapping[str, WorkerHook], data: TrainingData, feed: Feed) -> Feed:
    """Passes the training feed through all hooks, which may change it. Raises ConfigError if one refuses the run."""
    for name, hook in hooks.items():
        with name_error(name):
            feed = hook.change_feed(data, feed)
            if not hasattr(feed, "fetch"):
                raise TypeError(f"change_feed returns {type(feed).__name__}, and not a Feed")
    return feed


def call_before_test(hooks: Mapping[str, WorkerHook], split: EvaluatedSplit, emit: Emit) -> None:
    """Passes the split whose predictions will be kept to all hooks. Raises ConfigError if one refuses the run."""
    for name, hook in hooks.items():
        with guard_extra(f"the feature {name}", lambda text: emit(Note(text)), refuses_run):
            hook.before_test(split)


def call_after_build(hooks: Mapping[str, WorkerHook], run: TrainedRun, export: Callable[[Path], object]) -> None:
    """Passes the built model to all hooks.

    Raises ConfigError if a hook refuses the run, and RunError if the model cannot be exported.
    """

    def must_end(error: Exception) -> bool:
        return isinstance(error, RunError) or refuses_run(error)

    for name, hook in hooks.items():
        with guard_extra(f"the feature {name}", lambda text: run.emit(Note(text)), must_end):
            hook.after_build(run, export)


def call_report_examples(
    hooks: Mapping[str, WorkerHook], data: TrainingData, feed: Feed, folder: Path, emit: Emit
) -> None:
    """Lets all hooks add to the record of the training examples."""
    for name, hook in hooks.items():
        with guard(f"the feature {name}", emit):
            hook.report_examples(data, feed, folder, emit)


def call_at_ready(hooks: Mapping[str, WorkerHook], run: TrainedRun) -> None:
    """Informs all hooks that the run is ready."""
    for name, hook in hooks.items():
        with guard(f"the feature {name}", run.emit):
            hook.at_ready(run)


def make_after_epoch(hooks: Mapping[str, WorkerHook], run: TrainedRun) -> Callable[[int, Mapping[str, float]], None]:
    """Returns a function that passes the metrics of each epoch to hooks with `after_epoch`, until a hook fails."""
    callees = {name: hook for name, hook in hooks.items() if type(hook).after_epoch is not WorkerHook.after_epoch}

    def call_after_epoch(epoch: int, metrics: Mapping[str, float]) -> None:
        for name, hook in list(callees.items()):
            is_failed = True
            with guard_extra(f"the feature {name}", lambda text: run.emit(Note(text))):
                hook.after_epoch(run, epoch, {key: float(value) for key, value in metrics.items()})
                is_failed = False
            if is_failed:
                del callees[name]

    return call_after_epoch


def call_after_test(hooks: Mapping[str, WorkerHook], kept: KeptPredictions) -> None:
    """Passes the test predictions to all hooks."""
    for name, hook in hooks.items():
        with guard(f"the feature {name}", kept.emit):
            hook.after_test(kept)


def call_after_export(hooks: Mapping[str, WorkerHook], run: TrainedRun, step: int) -> None:
    """Passes the trained and exported model to all hooks."""
    for name, hook in hooks.items():
        with guard(f"the feature {name}", run.emit):
            hook.after_export(run, step)


def call_finish_test(hooks: Mapping[str, WorkerHook], emit: Emit) -> None:
    """Lets all hooks report their results from the test predictions."""
    for name, hook in hooks.items():
        with guard(f"the feature {name}", emit):
            hook.finish_test()


def call_at_end(hooks: Mapping[str, WorkerHook], run: TrainedRun) -> None:
    """Lets all hooks do their last work after training has completed."""
    for name, hook in hooks.items():
        with guard(f"the feature {name}", run.emit):
            hook.at_end(run)


def close_hooks(hooks: Mapping[str, WorkerHook], emit: Emit) -> None:
    """Lets all hooks release their resources."""
    for name, hook in hooks.items():
        with guard_extra(f"the feature {name}", lambda text: emit(Note(text))):
            hook.close()
