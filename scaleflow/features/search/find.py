"""Finds a good setting for a run, with short trainings.

    scaleflow find lr                                   # of the default run
    scaleflow find lr model=cnn optimizer=sgd --high 1
    scaleflow find batch_size dataset=csv dataset.data_dir=house.csv dataset.target=price

Type the words of the run after it, as for `scaleflow`. The last lines have the word to add to them.

lr: the learning rate rises from --low to --high, by the same factor at each step (Smith 2015, arXiv:1506.01186), until
the loss diverges. The word is a tenth of the rate with the lowest smoothed loss.
batch_size: the batch size doubles while it fits and gets faster. The word is the fastest, or a smaller one that is as
fast within a percent. `training.batch_size=auto` does that before a run.

Either is a run in MLflow, with its figures as a table and a picture. It trains only: it does not validate, save
checkpoints or export a model, and keys about these have no effect.

Exit code: 0 found; 1 nothing was found; 2 the command cannot work, nothing was recorded; 130 or 143 interrupted.
"""

import argparse
import re
from dataclasses import replace

from scaleflow.api import launch_prepared
from scaleflow.commands.frame import CommandParser, make_main
from scaleflow.config.compose import ComposedConfig, compose_config
from scaleflow.config.plan import set_values
from scaleflow.config.words import split_overrides
from scaleflow.errors import ConfigError
from scaleflow.features.search.checks import check_trial
from scaleflow.features.search.trial_kinds import AUTO, BatchSearch, RateTest, Trial
from scaleflow.features.search.trial_task import FindSetting
from scaleflow.interfaces import name_command
from scaleflow.launcher.command_exit import Outcome
from scaleflow.launcher.prepare import PreparedRun, prepare_run

#: Minimum number of steps of a rate test. With fewer, the rates would be too far apart.
MIN_STEPS = 20


@make_main
def main(argv: list[str]) -> Outcome:
    parser = CommandParser("find", __doc__)
    default = RateTest()
    parser.add_argument("setting", choices=(RateTest.name, BatchSearch.name), help="what to find")
    parser.add_overrides("a word of the run")
    parser.add_argument("--low", type=float, metavar="RATE", help=f"lr: the first rate (default {default.low:g})")
    parser.add_argument("--high", type=float, metavar="RATE", help=f"lr: the last rate (default {default.high:g})")
    parser.add_argument("--steps", type=int, metavar="N", help=f"lr: the number of steps (default {default.steps})")
    typed = parser.parse_intermixed_args(split_overrides(argv))
    words = list(typed.overrides)
    trial = read_trial(typed)
    if isinstance(trial, BatchSearch):
        for word in words:
            if re.match(r"\+*training\.batch_size=(?!auto$)", word):
                raise ConfigError(f"{word}: this command looks for it; leave it out")
        words.append(f"{trial.key}={AUTO}")
    outcome, _ = launch_prepared(prepare_trial(compose_config(words, typed.config_dir), trial))
    return outcome


def prepare_trial(composed: ComposedConfig, trial: Trial) -> PreparedRun:
    """Prepares the run of a trial from the config of the run that needs the setting.

    Raises ConfigError if the trial cannot work.
    """
    resume = composed.resolved.get("resume")
    if resume is not None:
        raise ConfigError(f"resume={resume}: a setting is found with a new model; leave it out")
    run = prepare_run(composed)
    plan = run.spec.plan
    if isinstance(trial, RateTest) and plan.choices.get("optimizer") == "tabular":
        plan = set_values(plan, {"optimizer.schedule": "constant"})  # this optimizer sets another schedule
    check_trial(plan, trial, f"{name_command('find')} {trial.name}")
    return replace(run, spec=replace(run.spec, plan=plan, task=FindSetting(trial)))


def read_trial(typed: argparse.Namespace) -> Trial:
    """Returns the trial that a command requests. Raises ConfigError if its options do not work."""
    options = {}
    for key in ("low", "high", "steps"):
        value = getattr(typed, key)
        if value is not None:
            options[key] = value
    if typed.setting == BatchSearch.name:
        if options:
            raise ConfigError(f"--{next(iter(options))}: is for a learning rate; leave it out")
        return BatchSearch()
    test = RateTest(**options)
    if not 0 < test.low < test.high < float("inf"):
        raise ConfigError(f"--low {test.low:g} --high {test.high:g}: expected two rates above 0, the lower one first")
    if not MIN_STEPS <= test.steps <= 2**31 - 1:
        raise ConfigError(f"--steps {test.steps}: expected at least {MIN_STEPS}")
    return test
