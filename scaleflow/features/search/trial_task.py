"""The worker's task of a trial. Its work needs TensorFlow and is imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scaleflow.features.search.trial_kinds import RateTest, Trial, to_params
from scaleflow.runs import Task, WorkerProcess

if TYPE_CHECKING:
    from scaleflow.features.search.batch_size_trial import BatchSizeTrial
    from scaleflow.features.search.rate_trial import RateTrial


@dataclass(frozen=True)
class FindSetting(Task):
    """Finds a setting with a short training."""

    trial: Trial  # which setting, and its bounds

    def run(self, process: WorkerProcess) -> None:
        """Builds the trial, reports `ready`, and runs the trial."""
        from scaleflow.runs.user_metrics import user_metrics
        from scaleflow.worker.ready import list_params, report_ready

        process.lock_folder()
        running_trial = make_trial(process, self.trial)
        process.explain = running_trial.setup.explain
        params = to_params(self.trial, list_params(process.spec.plan, running_trial.setup))
        report_ready(process, running_trial.setup, self.trial.label, params)
        with user_metrics(lambda name, value: None):  # user code may log during training
            running_trial.run()


def make_trial(process: WorkerProcess, trial: Trial) -> RateTrial | BatchSizeTrial:
    """Builds a trial. Raises ConfigError if it cannot work."""
    from scaleflow.features.search.batch_size_trial import BatchSizeTrial
    from scaleflow.features.search.rate_trial import RateTrial
    from scaleflow.worker.runtime import make_startup_timer

    spec = process.spec
    timer = make_startup_timer(spec)
    if isinstance(trial, RateTest):
        return RateTrial(spec, trial, process.emit, should_stop=process.should_stop, startup_timer=timer)
    return BatchSizeTrial(spec, process.emit, process.should_stop, startup_timer=timer)
