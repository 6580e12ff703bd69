from scaleflow.interfaces.features import Command, Feature

FEATURE = Feature(
    name="language",
    about="text from a language model",
    commands=(
        Command(
            name="generate",
            about="let a language model continue a text: RUN_ID --prompt TEXT",
            module="scaleflow.features.language.generate",
            group="tracked models",
            place=20,
        ),
    ),
    public_names={
        "generate_text": "scaleflow.features.language.generate",
    },
    needs=("predict",),
)
