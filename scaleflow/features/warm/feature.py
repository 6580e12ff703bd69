from scaleflow.interfaces.features import Command, Feature

FEATURE = Feature(
    name="warm",
    about="an interpreter that is kept ready for commands",
    warm_server="scaleflow.features.warm.server",
    launcher="scaleflow.features.warm.hint:WarmHint",
    commands=(
        Command(
            name="warm",
            about="start, status or stop: an interpreter kept ready",
            module="scaleflow.features.warm.command",
            group="before a run",
            place=80,
        ),
    ),
)
