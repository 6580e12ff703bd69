"""Records what a program or a notebook trains with Keras: `scaleflow.fit(model, x, y)`, and the callback `Record`.

Keras trains in this process, with the program's own model. So classes that are defined in cells of a notebook work.
"""

from __future__ import annotations

import ast
import atexit
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import keras
import tensorflow as tf

from scaleflow.api import Result
from scaleflow.config.typed_folder import in_typed_folder
from scaleflow.errors import ConfigError
from scaleflow.features.script.keras_calls import (
    EpochCallback,
    describe_compiled,
    list_callbacks,
    list_fit_params,
    read_sizes,
)
from scaleflow.features.script.local_run import LocalRun, LocalSettings, read_settings
from scaleflow.features.script.recorder import ScriptRecorder
from scaleflow.features.script.run_script import CELLS_FILE
from scaleflow.features.script.saved_model import save_model
from scaleflow.features.script.source import Program, parse_script
from scaleflow.interfaces import Status
from scaleflow.runs.code_digest import is_installed
from scaleflow.runs.provenance.tags import INSIDE

P = ParamSpec("P")

#: Params of the config that say nothing about a model that existed before the run.
UNUSED_PARAMS = ("strategy", "hardware", "precision", "cluster")


@in_typed_folder
def fit(model: Any, *arguments: Any, overrides: Sequence[str] | str = (), **named: Any) -> Any:
    """Trains a compiled Keras model as `model.fit` does, in this process, and records a run.

    Args:
        model: the compiled model.
        arguments: the arguments of Keras's `model.fit`, such as `x` and `y`.
        overrides: words for the run, such as `["tracking.experiment=flowers", "seed=3"]`. A seed is set before the
            training; the initial weights exist already.
        named: the other arguments of `model.fit`, such as `epochs=5`.

    Returns:
        Keras's History. Its additional attribute `run` is the `Result` of the run. It is None if nothing was recorded,
        or in a script that scaleflow runs, whose run records this training.

    Raises:
        ConfigError: if a word is wrong, or cannot apply to a model that exists. Other exceptions are those of the
            training: the run is then FAILED, or KILLED after Ctrl-C.
    """
    if not isinstance(model, keras.Model):
        raise ConfigError(f"fit(model={type(model).__name__}): expected a keras.Model")
    settings = read_settings(overrides, "fit(overrides=...)")
    signature = inspect.signature(model.fit)
    bound = signature.bind(*arguments, **named)
    values = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    values.pop("kwargs", None)
    if settings.seed is not None:
        keras.utils.set_random_seed(settings.seed)
    if is_recorded_elsewhere(model):
        return keep_run(model.fit(**values), None)
    training = RecordedTraining(settings, model, values, call="scaleflow.fit")
    training.recorder.log_params(list_fit_params(model, values, signature))
    callbacks = [*list_callbacks(values.get("callbacks")), training.callback]
    try:
        history = model.fit(**{**values, "callbacks": callbacks})
    except BaseException as error:
        training.end_after(error)
        raise
    return keep_run(history, training.end())


def keep_run(history: Any, result: Result | None) -> Any:
    """Returns a history with the attribute `run`. A model's own `fit` may return something else, which is unchanged."""
    if isinstance(history, keras.callbacks.History):
        history.run = result
    return history


def guard_training(method: Callable[P, None]) -> Callable[P, None]:
    """Decorates a method of `Record`, so that an error in it does not end the training."""

    @functools.wraps(method)
    def call(*arguments: P.args, **named: P.kwargs) -> None:
        try:
            method(*arguments, **named)
        except Exception as error:
            record: Any = arguments[0]
            record.give_up(error)

    return call


class Record(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that records a run of each `model.fit`, and changes nothing else.

    Put it last in the list: it logs the model at its place in the list, and callbacks such as EarlyStopping may restore
    other weights at the end.

    Args:
        overrides: words for the run, such as `"tracking.experiment=flowers"`.

    Attributes:
        run: the `Result` of the last run; None before its end.

    Raises:
        ConfigError: if a word is wrong, or cannot apply to a model that exists.
    """

    def __init__(self, *overrides: str) -> None:
        super().__init__()
        self._settings = read_settings(overrides, "Record(...)")
        if self._settings.seed is not None:
            raise ConfigError("Record(...): seed: it changes nothing in the training; call keras.utils.set_random_seed")
        self._training: RecordedTraining | None = None
        self._epoch: tuple[int, Mapping[str, Any]] | None = None
        self._hook: Any = None
        self._count = 0  # trainings so far
        self.run: Result | None = None

    @guard_training
    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._end("FAILED", "its model.fit did not reach its end")
        if is_recorded_elsewhere(self.model):
            return
        self._epoch = None
        self._count += 1
        self._training = RecordedTraining(self._settings, self.model, {}, call="scaleflow.Record", number=self._count)
        params = {f"fit.{name}": self.params[name] for name in ("epochs", "steps") if self.params.get(name)}
        self._training.recorder.log_params({**params, **describe_compiled(self.model)})
        self._training.callback.set_model(self.model)
        self._training.callback.set_params(self.params)
        self._training.callback.on_train_begin(logs)
        self._watch_exceptions()

    @guard_training
    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._log_epoch()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = (epoch, logs or {})  # the callbacks after this one may still add values

    @guard_training
    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._log_epoch()
        training = self._training
        if training is not None:
            self._training = None
            self._forget_exceptions()
            self.run = training.end()

    def give_up(self, error: Exception) -> None:
        """Stops to record the current training."""
        training = self._training
        self._training = None
        if training is None:
            print(f"note: the training is not recorded: {type(error).__name__}: {error}")
            return
        training.run.give_up(error)
        training.run.finish("FAILED", "it could not be recorded")

    def _log_epoch(self) -> None:
        """Records the epoch that ended last."""
        if self._training is not None and self._epoch is not None:
            self._training.callback.on_epoch_end(*self._epoch)
        self._epoch = None

    def _end(self, status: Status, reason: str) -> None:
        """Ends a run whose `fit` did not call `on_train_end`."""
        training = self._training
        if training is None:
            return
        self._log_epoch()
        self._training = None
        self._forget_exceptions()
        self.run = training.run.finish(status, reason)

    def _end_after(self, error: BaseException) -> None:
        self._end(*describe_exception(error))

    def _watch_exceptions(self) -> None:
        """Ends the run if an exception ends the program, or the cell of a notebook: Keras calls no callback then."""
        shell = find_notebook()
        if shell is not None:

            def after_cell(result: Any) -> None:
                error = result.error_before_exec or result.error_in_exec
                if error is not None:
                    self._end_after(error)

            shell.events.register("post_run_cell", after_cell)
            self._hook = (shell.events.unregister, "post_run_cell", after_cell)
        else:
            before = sys.excepthook

            def after_exception(kind: type[BaseException], error: BaseException, trace: Any) -> Any:
                self._end_after(error)
                return before(kind, error, trace)

            sys.excepthook = after_exception
            self._hook = (restore_hook, after_exception, before)
        atexit.register(self._end, "FAILED", "the program ended before its model.fit")

    def _forget_exceptions(self) -> None:
        hook = self._hook
        self._hook = None
        if hook is not None:
            forget, *arguments = hook
            forget(*arguments)
        atexit.unregister(self._end)


def restore_hook(own: Any, before: Any) -> None:
    """Restores `sys.excepthook`, unless the program has replaced it meanwhile."""
    if sys.excepthook is own:
        sys.excepthook = before


class RecordedTraining:
    """One training with Keras, and the run that records it.

    Args:
        settings: what the user's words say.
        model: the model.
        values: the arguments of its `fit`, as far as they are known.
        call: what records it, for the params of the run.
        number: the number of the training among those with these words, from 1.

    Attributes:
        run: the run.
        recorder: records params and metrics.
        callback: records the epochs. `fit` gets it.
    """

    def __init__(
        self, settings: LocalSettings, model: Any, values: Mapping[str, Any], call: str, number: int = 1
    ) -> None:
        program = read_program()
        self._model = model
        self._inputs = values.get("x")
        self.run = LocalRun(settings, number, functools.partial(find_code, program))
        self.recorder = LocalRecorder(self.run.process, self.run.emit, program, describe_runtime(model), call=call)
        self.recorder.phase = 1
        self.callback = EpochCallback(self.recorder, read_sizes(values))

    def end(self) -> Result | None:
        """Logs the model, and ends the run."""
        if self.run.is_open:
            try:
                save_model(self._model, self._inputs, self.recorder, self.run.process)
            except Exception as error:
                self.run.give_up(error)
        return self.run.finish("FINISHED")

    def end_after(self, error: BaseException) -> None:
        """Ends the run after an exception that ended the training."""
        self.run.finish(*describe_exception(error))


class LocalRecorder(ScriptRecorder):
    """Records the training of a model that existed before the run."""

    def __init__(self, *arguments: Any, call: str) -> None:
        super().__init__(*arguments)
        self._call = call

    def _list_config_params(self) -> dict[str, str]:
        params = super()._list_config_params()
        kept = {name: value for name, value in params.items() if name.partition(".")[0] not in UNUSED_PARAMS}
        return {**kept, "script.file": str(self.program.path), "script.call": self._call}


def describe_exception(error: BaseException) -> tuple[Status, str]:
    """Returns the status and the reason of a run that an exception ended."""
    if isinstance(error, KeyboardInterrupt):
        return "KILLED", "stopped by Ctrl-C"
    return "FAILED", traceback.format_exception_only(error)[-1].strip()


def is_recorded_elsewhere(model: Any) -> bool:
    """Returns whether another process, or the run of a script that scaleflow runs, records the training."""
    if os.environ.get(INSIDE):
        return True
    resolver = getattr(model.distribute_strategy, "cluster_resolver", None)
    task = getattr(resolver, "task_id", None)
    return bool(task)


def describe_runtime(model: Any) -> dict[str, Any]:
    """Returns the `resolved.` params of a model: how it was set up."""
    strategy = model.distribute_strategy
    name = "one_device"
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        name = "mirrored"
    elif tf.distribute.has_strategy() or strategy.num_replicas_in_sync > 1:
        name = type(strategy).__name__
    return {
        "strategy": name,
        "precision": model.dtype_policy.name,
        "hardware": "gpu" if tf.config.list_logical_devices("GPU") else "cpu",
        "replicas": strategy.num_replicas_in_sync,
    }


def find_notebook() -> Any:
    """Returns IPython's shell, if this process is a notebook or IPython's terminal; else None."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get_shell is None else get_shell()


def read_program() -> Program:
    """Returns the program that this process runs, with its constants. A notebook has none: its cells may run twice."""
    empty = Program(Path("notebook" if find_notebook() is not None else "python"), ast.parse(""), {}, set())
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or not file.endswith(".py"):
        return empty
    path = Path(file).absolute()
    if find_notebook() is not None or is_installed(path):
        return empty
    try:
        program = parse_script(path)
    except ConfigError:  # for instance a program that was moved after it began
        return empty
    return Program(Path(path.name), program.tree, program.constants, program.repeated, cells_file=path)


def find_code(program: Program, folder: Path) -> Path | None:
    """Returns the file with the user's code: the program, or the cells of a notebook so far, which it writes."""
    if program.cells_file is not None:
        return program.cells_file
    shell = find_notebook()
    cells = [] if shell is None else [str(cell) for cell in shell.user_ns.get("In", ())]
    if not any(cells):
        return None
    path = folder / CELLS_FILE
    path.write_text("\n\n".join(cells) + "\n", encoding="utf-8")
    return path
