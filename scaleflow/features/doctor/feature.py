from scaleflow.interfaces.features import Command, Feature

FEATURE = Feature(
    name="doctor",
    about="what a machine has",
    commands=(
        Command(
            name="doctor",
            about="what this machine has, and which strategies work on it",
            module="scaleflow.features.doctor.command",
            group="before a run",
            place=30,
            other_names=("env", "info", "status", "devices", "diagnose"),
        ),
    ),
)
