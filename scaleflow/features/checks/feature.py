from scaleflow.interfaces.features import Command, Feature

FEATURE = Feature(
    name="checks",
    about="the faults of data, and their drift",
    worker="scaleflow.features.checks.hook:DataChecks",
    is_used=lambda plan: plan.dataset.check != "none",
    commands=(
        Command(
            name="check",
            about="faults of a dataset, and how it differs from that of a run",
            module="scaleflow.features.checks.check",
            group="before a run",
            place=40,
            usage="dataset=...",
            other_names=("data", "inspect", "profile", "lint"),
        ),
    ),
    stages=("scaleflow.features.checks.stage:STAGE",),
    events=("scaleflow.features.checks.events",),
    command_files={"stage.log": ("data_report.html",)},
    public_names={
        "check_data": "scaleflow.features.checks.check",
    },
)
