"""`promote` as a stage of a pipeline."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleflow.interfaces.stages import StageCommand
from scaleflow.launcher.command_exit import FINISHED, NOT_PROMOTED
from scaleflow.tracking.uri import check_model_name


class PromoteStage(StageCommand):
    """Promotes a tracked model."""

    def check(self, values: Mapping[str, Any], config_dirs: Sequence[str]) -> None:
        check_model_name("model: ", str(values["model"]))

    def read_extra_outputs(self, answer: Mapping[str, Any], values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        version = answer["version"]
        model = f"models:/{values['model']}/{version}" if version else answer["model"]
        return {"promoted": answer["is_promoted"], "model": model}

    def summarize(self, outputs: Mapping[str, Any]) -> str:
        return "promoted" if outputs["promoted"] else "not promoted"


STAGE = PromoteStage(
    name="promote",
    takes_run=True,
    flags={"model": (), "trust": ()},
    required=("run", "model"),
    outputs=("run_id", "model", "promoted", "version", "folder"),
    good=(FINISHED, NOT_PROMOTED),
)
