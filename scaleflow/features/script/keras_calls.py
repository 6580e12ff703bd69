"""Records the calls of `fit` and `evaluate` in a script. Keras itself trains and evaluates.

Keras's functions are replaced while the script runs. Each replacement calls the original with the script's own
arguments, adds a callback that only reads, and leaves out the progress bar.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import keras

from scaleflow.compat.keras import build_from_batch
from scaleflow.features.script.environment import EnvironmentCheck
from scaleflow.features.script.evaluations import Evaluations
from scaleflow.features.script.fit_data import FitData
from scaleflow.features.script.fit_progress import FitProgress, StateSaver
from scaleflow.features.script.interruptions import ScriptRefused, StopRequests
from scaleflow.features.script.recorder import ScriptRecorder, count_updates
from scaleflow.interfaces.events import Note
from scaleflow.worker.failures import guard

#: Seconds between two looks for a request to stop.
SECONDS_BETWEEN_LOOKS = 0.1

#: Arguments of `fit` that are data. Their values are no params.
DATA_ARGUMENTS = ("x", "y", "validation_data", "sample_weight", "callbacks", "verbose")

#: The batch size of `fit` for arrays, without another one.
DEFAULT_BATCH_SIZE = 32

#: The argument by which Keras's own `fit` calls `evaluate`.
INTERNAL = "_use_cached_eval_dataset"


class EpochCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Records each epoch of a fit. It has no hook for batches, which would slow down each step.

    Attributes:
        epochs: the number of epochs that were recorded.
    """

    def __init__(self, recorder: ScriptRecorder, sizes: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self._sizes = sizes or {}
        self._recorder = recorder
        self._first_step = 0
        self._first_updates: int | None = None
        self.epochs = 0

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._first_step = self._recorder.step
        self._first_updates = count_updates(self.model)
        resolved: dict[str, Any] = {}
        if self._recorder.phase == 1:
            resolved = {**count_weights(self.model), **self._sizes}
        self._recorder.begin_run(int(self.params["epochs"]), self._count_planned_steps(), resolved)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.epochs += 1
        self._recorder.step = self.count_all_steps()
        self._recorder.log_epoch(epoch + 1, int(self.params["epochs"]), logs or {})

    def count_all_steps(self) -> int:
        """Returns the updates by all fits so far."""
        return self._first_step + self._count_steps()

    def _count_planned_steps(self) -> int:
        return int(self.params.get("steps") or 0) * int(self.params["epochs"])

    def _count_steps(self) -> int:
        """Returns the updates of this fit so far. Without a count by the optimizer, it is the number of batches, or of
        epochs if that is unknown.
        """
        updates = count_updates(self.model)
        if updates is not None and updates > (self._first_updates or 0):
            return updates - (self._first_updates or 0)
        return self.epochs * int(self.params.get("steps") or 1)


class ResumableEpochCallback(EpochCallback):
    """Records each epoch of a fit whose state is saved, and ends the script if the run is asked to stop.

    It must be the last callback of its fit.
    """

    def __init__(
        self, recorder: ScriptRecorder, progress: FitProgress, stop: StopRequests, sizes: Mapping[str, int]
    ) -> None:
        super().__init__(recorder, sizes)
        self._progress = progress
        self._stop = stop

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._progress.begin(self)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._progress.keep_place()

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Ends the script before a validation if the run is asked to stop. The state is that after the last batch."""
        if self._stop.is_asked() and not self._progress.is_cut:
            self._progress.save()
        self._stop.raise_if_asked()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._progress.is_cut:  # Keras has left the epoch before its end
            self._stop.raise_if_asked()
        super().on_epoch_end(epoch, logs)
        self._progress.end_epoch(must_save=self._stop.is_asked())
        self._stop.raise_if_asked()


class EvaluationCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the result of an evaluation by name."""

    def __init__(self) -> None:
        super().__init__()
        self.result: Mapping[str, Any] = {}

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self.result = dict(logs or {})


class KerasCalls:
    """Records the calls of Keras's functions in a script.

    Args:
        recorder: records what they report.
        stop: the requests to stop the run.
        fit_arguments: arguments of each `fit` that the command sets.
        learning_rate: the learning rate of the compiled optimizer; None: the script's own.
        saver: saves the state of each fit, and knows what an earlier command has trained.

    Attributes:
        model: the model of the last fit; None before the first.
        inputs: the argument `x` of the last fit.
        evaluations: the calls of `evaluate`.
        data: the digests of the data.
    """

    def __init__(
        self,
        recorder: ScriptRecorder,
        stop: StopRequests,
        fit_arguments: Mapping[str, Any],
        learning_rate: float | None,
        saver: StateSaver,
    ) -> None:
        self._recorder = recorder
        self._saver = saver
        self._stop_asked = threading.Event()
        self._environment = EnvironmentCheck(recorder.emit)
        self._stop = stop
        self._fit_arguments = fit_arguments
        self._learning_rate = learning_rate
        self.evaluations = Evaluations(recorder)
        self.data = FitData(recorder.program.path.name)
        self._depth = 0  # calls of `fit` that have not returned
        self.model: Any = None
        self.inputs: Any = None

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Replaces Keras's functions inside the `with` block."""
        kind = keras.Model
        originals = {name: getattr(kind, name) for name in ("fit", "evaluate", "predict")}
        replacements = {
            "fit": self._make_fit(originals["fit"]),
            "evaluate": self._make_evaluate(originals["evaluate"]),
            "predict": make_quiet(originals["predict"]),
        }
        for name, function in replacements.items():
            setattr(kind, name, function)
        try:
            yield
        finally:
            for name, function in originals.items():
                setattr(kind, name, function)

    def _make_fit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def fit(model: Any, *arguments: Any, **named: Any) -> Any:
            """Calls Keras's `fit` with the command's changes and a callback that records the epochs.

            Raises ScriptStopped if the run is asked to stop.
            """
            if not self._recorder.is_own_process:
                return original(model, *arguments, **named)
            bound = signature.bind(model, *arguments, **named)
            values = bound.arguments
            values["verbose"] = 0
            if self._depth:  # a callback that trains another model
                return original(**name_self(values))
            values.update(self._fit_arguments)
            if inspect.isgenerator(values.get("x")) and model.distribute_strategy.num_replicas_in_sync > 1:
                values["x"] = build_and_restore(model, values["x"])
            self._begin_fit(model, values, signature)
            callbacks = list_callbacks(values.get("callbacks"))
            history = find_history(callbacks)
            data = {name: values.get(name) for name in ("x", "validation_data")}
            progress = FitProgress(
                model, data, callbacks, history, self._saver, self._recorder, self._stop_asked.is_set
            )
            recording = ResumableEpochCallback(self._recorder, progress, self._stop, read_sizes(values))
            others = [callback for callback in callbacks if callback is not history]
            values["callbacks"] = [*others, history, recording]
            self._depth += 1
            try:
                with self._watch(), progress.follow():
                    returned = original(**name_self(values))
            finally:
                self._depth -= 1
            self._stop.raise_if_asked()
            return returned

        return fit

    def _begin_fit(self, model: Any, values: Mapping[str, Any], signature: inspect.Signature) -> None:
        self.model = model
        self.inputs = values.get("x")
        self._environment.run()
        replicas = model.distribute_strategy.num_replicas_in_sync
        if replicas > 1 and computes_own_loss(model):
            self._recorder.send(
                Note(
                    f"on {replicas} replicas a loss that the script computes itself counts as a mean over the "
                    f"examples; a sum over them would train with 1/{replicas} of its gradient"
                )
            )
        self._recorder.phase += 1
        self._add_data(values)
        self.evaluations.begin_fit(model)
        if self._learning_rate is not None:
            set_learning_rate(model, self._learning_rate)
        self._recorder.log_params(list_fit_params(model, values, signature, self._recorder.phase))

    def _add_data(self, values: Mapping[str, Any]) -> None:
        """Describes the data of a fit. What cannot be described becomes a note."""
        suffix = "" if self._recorder.phase == 1 else f"_{self._recorder.phase}"
        with guard("the digest of the data", self._recorder.send):
            self.data.add(f"train{suffix}", values.get("x"), values.get("y"), values.get("sample_weight"))
            validation = values.get("validation_data")
            if isinstance(validation, list | tuple) and len(validation) in (2, 3):
                self.data.add(f"validation{suffix}", *validation)

    def _make_evaluate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def evaluate(model: Any, *arguments: Any, **named: Any) -> Any:
            if not self._recorder.is_own_process:
                return original(model, *arguments, **named)
            bound = inspect.signature(original).bind(model, *arguments, **named)
            values = name_self(bound.arguments)
            is_internal = INTERNAL in values
            if not is_internal:
                values["verbose"] = 0
            if is_internal or self._depth:
                return original(**values)
            keeper = EvaluationCallback()
            values["callbacks"] = [*list_callbacks(values.get("callbacks")), keeper]
            result = original(**values)
            self.evaluations.add(model, keeper.result)
            with guard("the digest of the data", self._recorder.send):
                self.data.add("test", values.get("x"), values.get("y"), values.get("sample_weight"))
            return result

        return evaluate

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        """Looks for a request to stop while a model trains. The fit ends after its current batch."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(SECONDS_BETWEEN_LOOKS):
                if self._stop.is_asked():
                    self._stop_asked.set()

        thread = threading.Thread(target=watch, name="stop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def build_and_restore(model: Any, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """Builds a model from the first batch of a generator. Returns a generator of all batches, the first included.

    On several replicas Keras would take this batch for itself.
    """
    first = next(batches)
    build_from_batch(model, first)
    return prepend_batch(first, batches)


def prepend_batch(first: Any, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """Yields a batch, and then those of a generator. Keras accepts generators, and no other iterators."""
    yield first
    yield from batches


def computes_own_loss(model: Any) -> bool:
    """Returns whether a model trains with a loss that is not computed by one of Keras's losses."""
    kind = type(model)
    if kind.train_step is not keras.Model.train_step or kind.compute_loss is not keras.Model.compute_loss:
        return True
    losses = keras.tree.flatten(getattr(model, "loss", None))
    return any(inspect.isfunction(each) and not each.__module__.startswith("keras.") for each in losses)


def name_self(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns bound arguments as named ones, with those of `**kwargs` among them."""
    named = dict(values)
    named.update(named.pop("kwargs", {}))
    return named


def make_quiet(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of Keras without its progress bar."""

    @functools.wraps(original)
    def quiet(model: Any, *arguments: Any, **named: Any) -> Any:
        bound = inspect.signature(original).bind(model, *arguments, **named)
        bound.arguments["verbose"] = 0
        return original(**name_self(bound.arguments))

    return quiet


def list_callbacks(callbacks: Any) -> list[Any]:
    """Returns the callbacks of a call as a list. Keras accepts None, one callback, and nested lists."""
    if callbacks is None:
        return []
    flat: list[Any] = keras.tree.flatten(callbacks)
    return flat


def find_history(callbacks: Sequence[Any]) -> keras.callbacks.History:
    """Returns the callback with Keras's history: the script's own one, or a new one."""
    for callback in reversed(callbacks):
        if isinstance(callback, keras.callbacks.History):
            return callback
    return keras.callbacks.History()


def set_learning_rate(model: Any, rate: float) -> None:
    """Sets the learning rate of a compiled optimizer. Raises ScriptRefused if it cannot be set."""
    optimizer: Any = getattr(model, "optimizer", None)
    try:
        optimizer.learning_rate = rate
    except (AttributeError, TypeError) as error:
        raise ScriptRefused(
            f"optimizer.learning_rate={rate:g}: cannot be set: {error}; change the rate in the script instead"
        ) from error


def list_fit_params(
    model: Any, values: Mapping[str, Any], signature: inspect.Signature, phase: int = 1
) -> dict[str, Any]:
    """Returns the params of a fit: its arguments, the loss, the optimizer and its options."""
    prefix = "fit" if phase == 1 else f"fit_{phase}"
    params: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if name == "self" or name in DATA_ARGUMENTS:
            continue
        value = values.get(name, parameter.default)
        if value is not None:
            params[f"{prefix}.{name}"] = value
    for name, value in describe_compiled(model).items():
        params[name if phase == 1 else f"{prefix}.{name}"] = value
    return params


def describe_compiled(model: Any) -> dict[str, Any]:
    """Returns the params of a compiled model: the loss, the optimizer and its options, and the number of weights."""
    params: dict[str, Any] = {}
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        params["optimizer"] = type(optimizer).__name__
        for name, value in read_optimizer_options(optimizer).items():
            params[f"optimizer.{name}"] = value
    loss = getattr(model, "loss", None)
    if loss is not None:
        params["loss"] = describe_loss(loss)
    return params


def count_weights(model: Any) -> dict[str, int]:
    """Returns the numbers of all weights and of those that train; {} before the model is built."""
    if not model.built:
        return {}
    trainable = sum(math.prod(weight.shape) for weight in model.trainable_weights)
    return {"parameters": model.count_params(), "trainable_parameters": trainable}


def read_sizes(values: Mapping[str, Any]) -> dict[str, int]:
    """Returns the global batch size of a fit, if its data are arrays: 32 unless it names another one."""
    is_array = any(hasattr(each, "shape") for each in keras.tree.flatten(values.get("x")))
    return {"global_batch_size": int(values.get("batch_size") or DEFAULT_BATCH_SIZE)} if is_array else {}


def read_optimizer_options(optimizer: Any) -> dict[str, Any]:
    """Returns the options of an optimizer that are set, as Keras writes them."""
    try:
        config = optimizer.get_config()
    except Exception:  # the user's own optimizer need not have a config
        return {}
    options: dict[str, Any] = {}
    for name, value in config.items():
        if value is None or name == "name":
            continue
        options[name] = json.dumps(value, default=str) if isinstance(value, dict | list) else value
    return options


def describe_loss(loss: Any) -> str:
    """Returns the name of a loss, or of several in the structure that `compile` got."""
    if isinstance(loss, str):
        return loss
    if isinstance(loss, Mapping):
        return ", ".join(f"{name}: {describe_loss(each)}" for name, each in loss.items())
    if isinstance(loss, list | tuple):
        return ", ".join(describe_loss(each) for each in loss)
    return str(getattr(loss, "__name__", type(loss).__name__))
