"""Private names of Optuna."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optuna


def continue_trial(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> optuna.Trial:
    """Returns an open trial of another process as a running trial, which can be continued and reported."""
    import optuna

    return optuna.trial.Trial(study, trial._trial_id)
