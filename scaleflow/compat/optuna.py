"""Private names of Optuna."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optuna


def continue_trial(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> optuna.Trial:
    """Returns a trial that another process began and left open, so that it can be run and told."""
    import optuna

    return optuna.trial.Trial(study, trial._trial_id)
