"""`convert` as a stage of a pipeline."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleflow.interfaces.stages import StageCommand


class ConvertStage(StageCommand):
    """Exports a trained model in more formats."""

    def read_extra_outputs(self, answer: Mapping[str, Any], values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        metrics = {}
        for exported in answer["formats"]:
            for key, value in exported["values"].items():
                metrics[f"{exported['name']}/{key}"] = value
        return {"metrics": metrics}


STAGE = ConvertStage(name="convert", takes_run=True, flags={"trust": ()}, required=("run",))
