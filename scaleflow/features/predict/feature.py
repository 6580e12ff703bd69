from scaleflow.interfaces.features import Command, Feature

FEATURE = Feature(
    name="predict",
    about="predictions for the rows of a table",
    commands=(
        Command(
            name="predict",
            about="write its predictions for a table: RUN_ID --input FILE --output FILE",
            module="scaleflow.features.predict.command",
            group="tracked models",
            place=50,
            usage="RUN_ID --input FILE --output FILE",
            other_names=("infer", "inference", "batch", "transform"),
        ),
    ),
    stages=("scaleflow.features.predict.stage:STAGE",),
    command_files={"stage.log": ("predictions.parquet",)},
    needs=("checks",),
)
