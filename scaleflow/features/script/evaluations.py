"""Decides which call of `evaluate` in a script is the test of its run."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaleflow.features.script.recorder import ScriptRecorder


@dataclass
class Evaluation:
    """A call of `evaluate`.

    Attributes:
        model: the evaluated model.
        number: the number of the call in the script, from 1.
        step: the updates before it, by all fits.
        values: what Keras returned, by name.
        is_outdated: whether its model was trained again afterwards.
    """

    model: Any
    number: int
    step: int
    values: Mapping[str, Any]
    is_outdated: bool = False


class Evaluations:
    """Records the calls of `evaluate`: one as the test, `test/NAME`, and the others as `evaluate_NUMBER/NAME`.

    The test is the last evaluation of the last fitted model. If that model was not evaluated after its fit, it is the
    last evaluation of a model that the script has not fitted, such as a checkpoint that it has loaded. Evaluations of
    the last fitted model between its fits are earlier points of `test/NAME`.

    Args:
        recorder: records the metrics.
    """

    def __init__(self, recorder: ScriptRecorder) -> None:
        self._recorder = recorder
        self._count = 0
        self._last_fitted: Any = None
        self._fitted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._of_fitted: Evaluation | None = None
        self._of_other: Evaluation | None = None

    def begin_fit(self, model: Any) -> None:
        """Notes that a model is trained."""
        if self._of_fitted is not None and self._of_fitted.model is not model:
            self._record_as_other(self._of_fitted)
            self._of_fitted = None
        if self._of_other is not None and self._of_other.model is model:
            self._of_fitted = self._of_other
            self._of_other = None
        if self._of_fitted is not None:
            self._of_fitted.is_outdated = True
        self._last_fitted = model
        self._fitted.add(model)

    def add(self, model: Any, values: Mapping[str, Any]) -> None:
        """Adds the result of an evaluation. It is recorded when a later call, or the end of the script, decides how."""
        self._count += 1
        now = Evaluation(model, self._count, self._recorder.step, values)
        if model is self._last_fitted:
            if self._of_fitted is not None:
                self._record_earlier(self._of_fitted, now)
            self._of_fitted = now
        elif model in self._fitted:
            self._record_as_other(now)
        else:
            if self._of_other is not None:
                self._record_as_other(self._of_other)
            self._of_other = now

    def finish(self) -> None:
        """Records the test, at the end of the script."""
        test = self._of_fitted
        other = self._of_other
        if test is None or (test.is_outdated and other is not None):
            test, other = other, test
        for evaluation in (test, other):
            if evaluation is None:
                continue
            if evaluation is test and not evaluation.is_outdated:
                self._record_as_test(evaluation)
            else:
                self._record_as_other(evaluation)
        self._of_fitted = None
        self._of_other = None

    def _record_earlier(self, evaluation: Evaluation, now: Evaluation) -> None:
        """Records an evaluation that another one of the same model follows."""
        if evaluation.step < now.step and set(evaluation.values) == set(now.values):
            self._record_as_test(evaluation)
        else:
            self._record_as_other(evaluation)

    def _record_as_test(self, evaluation: Evaluation) -> None:
        self._record("test", evaluation)

    def _record_as_other(self, evaluation: Evaluation) -> None:
        self._record(f"evaluate_{evaluation.number}", evaluation)

    def _record(self, prefix: str, evaluation: Evaluation) -> None:
        named = {f"{prefix}/{name}": value for name, value in evaluation.values.items()}
        self._recorder.log_metrics(named, evaluation.step)
