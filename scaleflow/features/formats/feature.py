from scaleflow.interfaces.features import Command, Feature

FEATURE = Feature(
    name="formats",
    about="more formats of a trained model",
    commands=(
        Command(
            name="convert",
            about="export it in more formats: RUN_ID export.formats=[onnx]",
            module="scaleflow.features.formats.convert",
            group="tracked models",
            usage="RUN_ID export.formats=[onnx]",
            other_names=("export", "onnx", "tflite", "quantize"),
        ),
    ),
    stages=("scaleflow.features.formats.stage:STAGE",),
    public_names={
        "convert_model": "scaleflow.features.formats.convert",
    },
)
