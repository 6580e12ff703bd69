"""`check` as a stage of a pipeline."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleflow.config.policies import Policy
from scaleflow.interfaces.stages import StageCommand

#: The command composes a config, and looks at its data in one process.
CHECK = Policy(work="data checks")

#: Page with the findings, in the stage's folder.
REPORT = "data_report.html"

LEVELS = ("hint", "drift", "fault")


class CheckStage(StageCommand):
    """Runs `scaleflow check` and counts its findings by level."""

    def make_extra_words(self, values: Mapping[str, Any], folder: Path) -> list[str]:
        return ["--report", str(folder / REPORT)]

    def read_extra_outputs(self, answer: Mapping[str, Any], values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        levels = [finding["level"] for finding in answer["findings"]]
        counts = {f"{level}s": levels.count(level) for level in LEVELS}
        return {"metrics": counts}


STAGE = CheckStage(
    name="check",
    composes=True,
    work=CHECK.work,
    flags={"against": (), "level": LEVELS, "examples": ()},
    files=(REPORT,),
    outputs=("metrics", "report", "folder"),
)
