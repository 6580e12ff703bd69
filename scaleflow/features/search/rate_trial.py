"""Finds the learning rate with a short training. `trial_rules.py` has the rules.

The trial does not validate, save or export.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from scaleflow.cluster.tasks import count_synchronous_workers
from scaleflow.config.plan import set_values
from scaleflow.errors import ConfigError, NotFinite
from scaleflow.features.search.events import SettingFound
from scaleflow.features.search.trial_controller import TrialController
from scaleflow.features.search.trial_kinds import RateTest
from scaleflow.features.search.trial_rules import Divergence, choose_rate, smooth_losses
from scaleflow.interfaces.events import Emit, MetricsLogged, RunEnded
from scaleflow.interfaces.formatting import format_csv
from scaleflow.runs import RunSpec
from scaleflow.worker.build import build_training
from scaleflow.worker.runtime import StartupTimer

if TYPE_CHECKING:
    from scaleflow.training import Loop


class RateTrial(TrialController):
    """Raises the learning rate from step to step and records each step's loss.

    Raises ConfigError if the training step has its own optimizers.
    """

    def __init__(
        self, spec: RunSpec, test: RateTest, emit: Emit, should_stop: Callable[[], bool], startup_timer: StartupTimer
    ) -> None:
        from scaleflow import training

        values = {
            "optimizer.learning_rate": test.low,
            "training.epochs": test.steps,
            "training.max_steps": test.steps,  # also for the choice of XLA
        }
        self.setup = build_training(set_values(spec.plan, values), emit, startup_timer)
        options = self.setup.plan.training
        if self.setup.engine.optimizer is None:
            raise ConfigError(
                f"training.step._target_={options.step and options.step.path}: its update applies its own "
                "optimizers, whose rates the test cannot raise; set the rate by hand"
            )
        self._sync = training.WorkerSync(self.setup.runtime.strategy, count_synchronous_workers(spec.plan), should_stop)
        super().__init__(training.compute_length(options, self.setup.feeds.train), self._sync)
        self._engine: Loop = self.setup.engine  # type: ignore[assignment]  # the only one that is not refused
        self._spec = spec
        self._test = test
        self._emit = emit
        self._divergence = Divergence()
        self._losses: list[float] = []

    def run(self) -> None:
        """Takes the steps, then reports the chosen rate and the end of the run."""
        self._engine.begin_freeze_phase(0, self.setup.feeds.train)
        with contextlib.suppress(NotFinite):  # the loss has diverged
            self._engine.run(self.setup.feeds.train, self)
        if self.stopped:
            self._emit(RunEnded("KILLED", f"stopped at step {self.step}"))
        else:
            self._report()
        self._sync.leave()

    def choose_steps(self) -> int:
        return 1

    def record_call(self, steps: int, seconds: float) -> bool:
        test = self._test
        loss = self._engine.last_loss
        rate = test.rate_at(self.step - 1)
        self._losses.append(loss)
        self._emit(MetricsLogged(self.step, {"train/loss": loss, "find/learning_rate": rate}))
        if self._divergence.add(loss) or self.step == test.steps:
            return True
        self._engine.set_rate_factor(test.rate_at(self.step) / test.low, rate / test.low)
        return False

    def _report(self) -> None:
        test = self._test
        losses = self._losses
        rates = [test.rate_at(step) for step in range(len(losses))]
        choice = choose_rate(rates, losses, test.steps)
        if choice is None:
            why = f"the loss does not fall at any learning rate from {test.low:g} to {test.high:g}"
            self._emit(RunEnded("FAILED", f"{why}; check the data and the model, or try other bounds (--low, --high)"))
            return
        rate, reason = choice
        path = self._spec.folder / test.table
        if self._spec.records:
            columns = {"learning_rate": rates, "loss": losses, "smoothed_loss": smooth_losses(losses, test.steps)}
            path.write_text(format_csv(list(columns), zip(*columns.values(), strict=True)))
        self._emit(SettingFound(test.key, rate, reason, path=str(path)))
        self._emit(RunEnded("FINISHED"))
