from scaleflow.interfaces.features import Command, Feature

FEATURE = Feature(
    name="housekeeping",
    about="a new project, its schema, and the disk space of old runs",
    commands=(
        Command(
            name="init",
            about="a new project: a dataset, a model, a recipe, a pipeline, a test: FOLDER",
            module="scaleflow.features.housekeeping.init",
            group="before a run",
            place=10,
        ),
        Command(
            name="schema",
            about="a JSON schema of the config, or of a GROUP, for editors",
            module="scaleflow.features.housekeeping.schema",
            group="before a run",
            place=20,
        ),
        Command(
            name="clean",
            about="delete the folders of finished runs that the store has completely",
            module="scaleflow.features.housekeeping.clean",
            group="tracked runs",
            place=40,
            usage="FOLDER",
            other_names=("delete", "rm", "prune", "gc", "remove"),
        ),
    ),
)
