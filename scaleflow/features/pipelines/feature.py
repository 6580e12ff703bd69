from scaleflow.interfaces.features import Command, Feature

FEATURE = Feature(
    name="pipelines",
    about="a declared graph of commands",
    commands=(
        Command(
            name="pipeline",
            about="the steps around a run, declared in a file: NAME",
            module="scaleflow.features.pipelines.command",
            group="before a run",
            place=70,
            usage="NAME",
            config_group="pipeline",
        ),
    ),
    stages=(
        "scaleflow.features.pipelines.stage_commands:TRAIN",
        "scaleflow.features.pipelines.stage_commands:SWEEP",
        "scaleflow.features.pipelines.stage_commands:EVALUATE",
        "scaleflow.features.pipelines.python_stage:PYTHON",
    ),
    command_files={
        "pipeline.yaml": ("pipeline.yaml", "results.csv", "stages.yaml", "graph.svg"),
        "stage.log": ("result.json",),
    },
    folder_marks=("stage.log",),
    conf="scaleflow.features.pipelines.conf",
    public_names={
        "PipelineResult": "scaleflow.features.pipelines.command",
        "run_pipeline": "scaleflow.features.pipelines.command",
    },
)
