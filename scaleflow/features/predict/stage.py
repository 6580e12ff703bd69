"""`predict` as a stage of a pipeline."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleflow.interfaces.stages import StageCommand

#: File with the predictions in the stage's folder, if the stage names no output.
PREDICTIONS = "predictions.parquet"


class PredictStage(StageCommand):
    """Writes a model's predictions for a table."""

    def make_extra_words(self, values: Mapping[str, Any], folder: Path) -> list[str]:
        if values.get("output"):
            return ["--overwrite"]
        return ["--overwrite", "--output", str(folder / PREDICTIONS)]

    def read_extra_outputs(self, answer: Mapping[str, Any], values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        return {"file": str(values.get("output") or folder / PREDICTIONS)}


STAGE = PredictStage(
    name="predict",
    takes_run=True,
    flags={
        **dict.fromkeys(("input", "output", "keep", "columns", "delimiter", "batch_size", "shard_rows"), ()),
        **dict.fromkeys(("tokens", "temperature", "top_k", "top_p", "seed"), ()),
        "on_bad": ("raise", "skip", "empty"),
        "probabilities": ("true", "false"),
        "logits": ("true", "false"),
        "explain": ("true", "false"),
    },
    required=("run", "input"),
    data_flags=("input",),
    writes_data=True,
    outputs=("run_id", "model", "file", "folder"),
)
