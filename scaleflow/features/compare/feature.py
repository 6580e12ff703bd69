from scaleflow.interfaces.features import Command, Feature

FEATURE = Feature(
    name="compare",
    about="two runs side by side, and the same run again",
    commands=(
        Command(
            name="rerun",
            about="a new run with the config of a tracked run: RUN_ID",
            module="scaleflow.features.compare.rerun",
            group="tracked runs",
            place=10,
            usage="RUN_ID",
            other_names=("repeat", "reproduce", "retry"),
        ),
        Command(
            name="diff",
            about="in what two runs differ, and if it is more than noise: RUN_A RUN_B",
            module="scaleflow.features.compare.diff",
            group="tracked runs",
            place=30,
            usage="RUN_A RUN_B",
            other_names=("compare",),
        ),
    ),
    public_names={
        "compare_runs": "scaleflow.features.compare.runs",
    },
)
