"""Learning rates, batch sizes and settings, found by trying them."""

from scaleflow.interfaces.config import Plan, Rule
from scaleflow.interfaces.features import Command, Feature, Placeholder, UntrainedRuns

#: Param of a trial's run: the setting that it searches.
FIND_PARAM = "find"

PLACEHOLDERS = (
    Placeholder(key="training.batch_size", word="auto", command="find batch_size"),
    Placeholder(key="optimizer.learning_rate", word="auto", command="find lr"),
)


def is_setting_searched(plan: Plan) -> bool:
    return any(placeholder.is_in(plan.config) for placeholder in PLACEHOLDERS)


FEATURE = Feature(
    name="search",
    about="learning rates, batch sizes and settings, found by trying them",
    commands=(
        Command(
            name="find",
            about="a good learning rate (lr) or batch_size for a run",
            module="scaleflow.features.search.find",
            group="before a run",
            place=50,
            usage="lr",
            other_names=("lrfind", "lrfinder", "autotune"),
        ),
        Command(
            name="tune",
            about="good settings for a run, by trying them for --minutes",
            module="scaleflow.features.search.tune",
            group="before a run",
            place=60,
        ),
        Command(
            name="refit",
            about="its model once more, on all rows but the test's: PARENT or RUN_ID",
            module="scaleflow.features.search.refit",
            group="tracked runs",
            place=20,
        ),
    ),
    public_names={
        "refit_run": "scaleflow.features.search.refit",
        "tune_run": "scaleflow.features.search.tune",
    },
    placeholders=PLACEHOLDERS,
    fill_in="scaleflow.features.search.checks:fill_in_settings",
    before_run="scaleflow.features.search.before_run:find_settings",
    is_used=is_setting_searched,
    events=("scaleflow.features.search.events",),
    untrained_runs=UntrainedRuns(param=FIND_PARAM, command="find", work="looked for a setting"),
    run_files=("batch_sizes.csv", "learning_rates.csv"),
    rules=(
        Rule(
            "training.batch_size=auto & training.global_batch_size!=null",
            "the global batch size leaves nothing to find",
            "leave training.global_batch_size null, or training.batch_size at its default",
        ),
        Rule(
            "training.batch_size=auto & strategy=parameter_server",
            "its workers do not take steps together, so a trial cannot measure one",
            "set a number, or use another strategy",
        ),
        Rule(
            "training.batch_size=auto & cluster!=local",
            "the trials before the run use this machine only",
            "use cluster=local, or set a number",
        ),
        Rule(
            "training.batch_size=auto & debug.inline",
            "the trials and the run each need a process of their own",
            "set a number",
        ),
        Rule(
            "optimizer.learning_rate=auto & debug.inline",
            "the trials and the run each need a process of their own",
            "set a number",
        ),
        Rule(
            "training.batch_size=auto & debug.fast",
            "one step needs no fast batch",
            "set a number",
        ),
    ),
)
