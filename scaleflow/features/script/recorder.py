"""Records a script: when its run begins, its params, its metrics by update, and its last fitted model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np

from scaleflow.config.parse import flatten_config
from scaleflow.features.script.events import ParamsLogged
from scaleflow.features.script.feature import ScriptOptions
from scaleflow.features.script.source import Program
from scaleflow.interfaces.events import Emit, EpochEnded, Event, MetricsLogged, Note, RunReady, StepsPlanned, TagsSet
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.runs import EventReader, WorkerProcess

#: Sections of the config that apply to a script. Their keys are params.
SECTIONS = ("strategy", "hardware", "precision", "cluster", "tracking")

#: Maximum length of a value in the name of a run, in characters.
MAX_NAMED = 24

#: Maximum length of a param, in characters.
MAX_PARAM = 500


@dataclass
class ScriptRecorder:
    """Records the run of a script. There is no run until something is trained or logged.

    Attributes:
        process: the process that runs the script.
        emit: takes events, after the lines that the script printed before them.
        program: the script.
        resolved: how the process was set up: `strategy`, `precision`, `hardware`, `replicas`.
        step: the number of updates by all fits so far.
        phase: the number of fits so far.
        is_silent: whether the script repeats what an earlier command has recorded. Nothing is recorded again.
    """

    process: WorkerProcess
    emit: Emit
    program: Program
    resolved: Mapping[str, Any]
    step: int = 0
    phase: int = 0
    is_silent: bool = False
    _pid: int = field(default_factory=os.getpid)
    _params: dict[str, str] = field(default_factory=dict)
    _waiting: list[Event] = field(default_factory=list)
    _points: set[tuple[int, str, str]] = field(default_factory=set)  # what earlier commands have recorded

    def continue_run(self, step: int, is_silent: bool) -> None:
        """Continues the run of an earlier command, or of an earlier process of this command.

        Args:
            step: the number of updates at which it continues.
            is_silent: whether the script repeats what was recorded, until a fit continues.
        """
        first: RunReady | None = None
        for event in EventReader(self.process.spec.events).read():
            if isinstance(event, RunReady):
                first = first or event
                self._params |= event.params
            elif isinstance(event, ParamsLogged):
                self._params |= event.values
            elif isinstance(event, MetricsLogged):
                self._points.update(list_points(event))
        if first is None:  # the earlier process ended before the script trained
            return
        self.is_silent = is_silent
        self.process.report_ready(
            replace(first, params=dict(self._params), began=int(self.process.spec.started * 1000), resumed=step)
        )

    @property
    def is_own_process(self) -> bool:
        """Whether this is the process of the run, and not one that the script has forked."""
        return os.getpid() == self._pid

    @property
    def is_ready(self) -> bool:
        """Whether there is a run."""
        return self.process.is_ready

    def begin_run(self, epochs: int = 0, steps: int = 0, resolved: Mapping[str, Any] | None = None) -> None:
        """Begins the run, or tells the launcher how long it is with another fit.

        Args:
            epochs, steps: the length of the fit; 0 if it is unknown, or if there is none.
            resolved: facts about the first fit, for the `resolved.` params.
        """
        if not self.is_own_process:
            return
        if self.is_ready:
            self.log_params({f"resolved.{name}": value for name, value in (resolved or {}).items()})
            if epochs:
                self.emit(StepsPlanned(self.step + steps if steps else 0))
            return
        self.resolved = {**self.resolved, **(resolved or {})}
        spec = self.process.spec
        plan = spec.plan
        params = {**self._list_config_params(), **self._params}
        self._params = params
        self.process.report_ready(
            RunReady(
                name=self._make_name(),
                began=int(spec.started * 1000),
                tags=plan.tracking.tags or {},
                params=params,
                steps=steps,
                epochs=epochs,
                search=list(plan.search),
                parent=spec.parent,
            )
        )
        for event in self._waiting:
            self.emit(event)
        self._waiting = []

    def send(self, event: Event) -> None:
        """Emits an event now, or when the run begins. A process that the script has forked records nothing."""
        if not self.is_own_process or self.is_silent:
            return
        if self.is_ready:
            self.emit(event)
        else:
            self._waiting.append(event)

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Records params. A param keeps its first value, because a store cannot change it."""
        new: dict[str, str] = {}
        for name, value in values.items():
            text = format_param(value)
            if name not in self._params:
                new[name] = text
            elif self._params[name] not in (text, format_param(mask_secrets(value))):
                self.send(Note(f"the param {name} keeps its first value, {self._params[name]}; {text} is not recorded"))
        self._params |= new
        if self.is_ready and new:
            self.emit(ParamsLogged(new))

    def log_metrics(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Records metrics after `step` updates; None: after those so far."""
        numbers: dict[str, float] = {}
        for name, value in values.items():
            numbers |= name_numbers(name, value)
        event = MetricsLogged(self.step if step is None else step, numbers)
        known = self._points.intersection(list_points(event))
        for _, name, _ in known:
            del numbers[name]
        if numbers:
            self.send(event)

    def log_epoch(self, epoch: int, epochs: int, logs: Mapping[str, Any]) -> None:
        """Records the end of an epoch: `logs` are the values of Keras's history.

        Args:
            epoch: the number of the epoch, from 1.
            epochs: the number of the last epoch of this fit.
        """
        values = name_logs(logs)
        self.log_metrics(values)
        self.send(EpochEnded(epoch, epochs, self.step, values))

    def set_tags(self, values: Mapping[str, Any]) -> None:
        self.send(TagsSet({str(name): str(value) for name, value in values.items()}))

    def _make_name(self) -> str:
        """Returns the name of the run: what the command changes in the script, its file, and how it runs."""
        plan = self.process.spec.plan
        section = plan.config["script"]
        changes: list[str] = []
        for values in (section.get("constants") or {}, section.get("fit") or {}):
            for name, value in values.items():
                changes.append(f"{name}={str(value)[:MAX_NAMED]}")
        rate = plan.of(ScriptOptions).compiled_rate
        if rate is not None:
            changes.append(f"learning_rate={rate:g}")
        where = f"{self.program.path.name}-{self.resolved['strategy']}-{self.resolved['precision']}"
        if plan.tracking.run_name:
            parts = [plan.tracking.run_name, *changes]
        else:
            parts = [*changes, where]
        return str(mask_secrets(" ".join(parts)))

    def _list_config_params(self) -> dict[str, str]:
        """Returns the params that are known before the script runs."""
        plan = self.process.spec.plan
        config = {section: plan.config[section] for section in SECTIONS if section in plan.config}
        values: dict[str, Any] = flatten_config(mask_secrets(config))
        values |= {group: plan.choices[group] for group in SECTIONS if group in plan.choices}
        values |= {f"resolved.{name}": value for name, value in self.resolved.items()}
        options = plan.of(ScriptOptions)
        values["script.file"] = options.path
        if options.arguments:
            values["script.arguments"] = " ".join(options.arguments)
        if "seed" in options.typed:
            values["seed"] = plan.seed
        for name, constant in self.program.constants.items():
            key = f"script.{name}"
            if name in ("file", "arguments"):  # params with these names describe the script itself
                key = f"script.constants.{name}"
            values[key] = constant.value
        return {name: format_param(mask_secrets(value)) for name, value in values.items()}


def list_points(event: MetricsLogged) -> list[tuple[int, str, str]]:
    """Returns (step, metric, value as text) of the values in an event."""
    return [(event.step, name, repr(value)) for name, value in event.values.items()]


def format_param(value: Any) -> str:
    """Returns the text of a param, which may be cut."""
    text = str(value)
    return text if len(text) <= MAX_PARAM else f"{text[: MAX_PARAM - 3]}..."


def name_logs(logs: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values of a history under the names of metrics: `val_loss` is `val/loss`, `loss` is `train/loss`."""
    values: dict[str, float] = {}
    for name, value in logs.items():
        is_validation = name.startswith("val_")
        metric = f"val/{name.removeprefix('val_')}" if is_validation else f"train/{name}"
        values |= name_numbers(metric, value)
    return values


def name_numbers(metric: str, value: Any) -> dict[str, float]:
    """Returns the number of a metric; of a vector, such as a score for each class, one number each: `train/f1/0`."""
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "biuf":
        return {}  # a callback of the user has added something else to the history
    if numbers.size == 1:
        return {metric: float(numbers.reshape(()))}
    return {f"{metric}/{place}": float(number) for place, number in enumerate(numbers.ravel())}


def count_updates(model: Any) -> int | None:
    """Returns the updates of a model's optimizer so far; None if it has none, or several."""
    iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
    if iterations is None:
        return None
    return int(keras.ops.convert_to_numpy(iterations))
