"""Lists the commands that a stage can run, and defines the core ones: `train`, `sweep` and `evaluate`."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from scaleflow.config.compose import config_dir_flags
from scaleflow.config.words import make_override
from scaleflow.interfaces.features import import_named, list_features, report_problems
from scaleflow.interfaces.stages import OF_A_RUN, StageCommand
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.run import Run
from scaleflow.sweep.ledger import Ledger, select_swept
from scaleflow.sweep.ranking import find_best_job
from scaleflow.tracking.tracked_runs import BEST

#: Outputs of a sweep's best job.
BEST_OUTPUTS = ("overrides", "run_id", "model", "metrics", "folder")


@cache
def list_stage_commands() -> Mapping[str, StageCommand]:
    """Returns the commands that a stage can run, by name in alphabetical order.

    If a stage cannot be imported, or repeats a name, it is skipped with a message on standard error.
    """
    commands: dict[str, StageCommand] = {}
    for feature in list_features().values():
        for place in feature.stages:
            with report_problems(feature.name, f"its stage {place} is skipped"):
                command = import_named(place)
                if not isinstance(command, StageCommand):
                    raise TypeError(f"{place} is no StageCommand")
                if command.name in commands:
                    raise ValueError(f"there is a stage {command.name} already")
                commands[command.name] = command
    return dict(sorted(commands.items()))


class TrainStage(StageCommand):
    """Trains a model."""

    def make_words(self, values: Mapping[str, Any], folder: Path, config_dirs: Sequence[str]) -> list[str]:
        overrides = map(str, values.get("overrides") or ())
        return [*config_dir_flags(config_dirs), *overrides, make_override("hydra.run.dir", folder)]

    def read_run(self, folder: Path) -> dict[str, Any]:
        run = Run(folder)
        return {"run_id": run.run_id, "model": run.model_uri}


class SweepStage(StageCommand):
    """Runs a sweep."""

    def make_words(self, values: Mapping[str, Any], folder: Path, config_dirs: Sequence[str]) -> list[str]:
        overrides = map(str, values.get("overrides") or ())
        return ["-m", *config_dir_flags(config_dirs), *overrides, make_override("hydra.sweep.dir", folder)]

    def read_run(self, folder: Path) -> dict[str, Any]:
        best = read_best_job(folder)
        return {"run_id": Run(folder).run_id, "model": best.get("model"), "best": best}

    def read_extra_outputs(self, answer: Mapping[str, Any], values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        outputs = self.read_run(folder)
        return {**outputs, "metrics": outputs["best"].get("metrics", {})}


def read_best_job(folder: Path) -> dict[str, Any]:
    """Returns the outputs of the best job of a sweep; {} if no finished job has the metric."""
    if BEST not in RunState.read(folder).annotations.tags:
        return {}
    best = find_best_job(str(folder))
    return {
        "overrides": select_swept(best.overrides, Ledger.load(RunFolder(folder)).typed_keys),
        "run_id": best.run.run_id,
        "model": best.run.model_uri,
        "metrics": dict(best.metrics),
        "folder": str(best.run.files.path.absolute()),
    }


class EvaluateStage(StageCommand):
    """Evaluates a tracked run."""

    def read_extra_outputs(self, answer: Mapping[str, Any], values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        metrics = dict(answer["metrics"])
        for name, value in answer["metrics"].items():
            if name.startswith(f"evaluate/{answer['name']}"):
                metrics[name.split("/", 2)[-1]] = value  # also under the name it has in a run, such as `accuracy`
        return {"metrics": metrics}


TRAIN = TrainStage(name="train", composes=True)

SWEEP = SweepStage(name="sweep", composes=True, outputs=(*OF_A_RUN, "best"))

EVALUATE = EvaluateStage(
    name="evaluate",
    takes_run=True,
    flags={
        "split": ("test", "validation", "train", "all"),
        "unknown_classes": ("refuse", "count"),
        "trust": (),
    },
    required=("run",),
)
