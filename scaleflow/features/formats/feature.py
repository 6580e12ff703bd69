"""Exports trained models in more formats."""

from dataclasses import dataclass, field

from scaleflow.interfaces.config import Plan
from scaleflow.interfaces.features import Command, Feature


@dataclass(frozen=True)
class ExportOptions:
    """`export`: formats of the trained model in addition to the Keras file and the SavedModel."""

    formats: list[str] | None = None
    tolerance: float | None = field(default=None, metadata={"above": 0.0})
    int8_loss: float = field(default=0.01, metadata={"at_least": 0.0})
    calibration_examples: int = field(default=200, metadata={"at_least": 1})


def has_formats(plan: Plan) -> bool:
    return bool(plan.of(ExportOptions).formats)


FEATURE = Feature(
    name="formats",
    about="more formats of a trained model",
    commands=(
        Command(
            name="convert",
            about="export it in more formats: RUN_ID export.formats=[onnx]",
            module="scaleflow.features.formats.convert",
            group="tracked models",
            place=30,
            usage="RUN_ID export.formats=[onnx]",
            other_names=("export", "onnx", "tflite", "quantize"),
        ),
    ),
    stages=("scaleflow.features.formats.stage:STAGE",),
    public_names={
        "convert_model": "scaleflow.features.formats.convert",
    },
    section=ExportOptions,
    group="export",
    ignored_keys=("export",),
    conf="scaleflow.features.formats.conf",
    defaults=({"export": "default"},),
    events=("scaleflow.features.formats.events",),
    other_files=("formats.json",),
    check="scaleflow.features.formats.formats:check_plan",
    worker="scaleflow.features.formats.hook:FormatsHook",
    is_used=has_formats,
)
