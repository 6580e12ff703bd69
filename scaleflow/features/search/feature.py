from scaleflow.interfaces.features import Command, Feature

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
)
