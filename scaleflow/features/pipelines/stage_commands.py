"""The commands that a stage can be, with their options and outputs. A new one is an entry in `STAGE_COMMANDS`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaleflow.config.compose import config_dir_flags
from scaleflow.config.words import make_override
from scaleflow.errors import ConfigError
from scaleflow.launcher.command_exit import FINISHED, NOT_PROMOTED
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.run import Run
from scaleflow.sweep.ledger import Ledger, select_swept
from scaleflow.sweep.ranking import find_best_job
from scaleflow.tracking.tracked_runs import BEST

#: The keys that every stage may have.
COMMON = ("command", "after", "when", "foreach")

#: The outputs of the stages that have a run of their own, and of those that are about one.
OF_A_RUN = ("run_id", "model", "metrics", "folder")

#: The page of a check in the stage's folder, and the predictions of one that names no output.
REPORT, PREDICTIONS = "data_report.html", "predictions.parquet"

#: Values of options with a dash in the flag.
Choices = tuple[str, ...]


@dataclass(frozen=True)
class StageCommand:
    """A command that a stage can be."""

    name: str
    composes: bool = False  # whether its overrides are those of a new run, after the pipeline's own
    takes_run: bool = False  # whether it is about a tracked run, its key `run`
    #: Its options, as keys of the stage with `_` for `-`; each with the values that it takes, () for any
    flags: Mapping[str, Choices] = field(default_factory=dict)
    required: tuple[str, ...] = ()  # the keys that it cannot do without
    outputs: tuple[str, ...] = OF_A_RUN
    good: tuple[int, ...] = (FINISHED,)  # the exit codes after which the stage has finished

    @property
    def has_own_run(self) -> bool:
        """Whether the command itself records a run: that of a training or of a sweep."""
        return self.name in ("train", "sweep")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that such a stage may have."""
        own = ("overrides",) if self.composes or self.takes_run else ()
        return (*COMMON, *own, *(("run",) if self.takes_run else ()), *self.flags)


STAGE_COMMANDS = {
    each.name: each
    for each in (
        StageCommand(
            "check",
            composes=True,
            flags={"against": (), "level": ("hint", "drift", "fault"), "examples": ()},
            outputs=("metrics", "report", "folder"),
        ),
        StageCommand("sweep", composes=True, outputs=(*OF_A_RUN, "best")),
        StageCommand("train", composes=True),
        StageCommand(
            "evaluate",
            takes_run=True,
            flags={
                "split": ("test", "validation", "train", "all"),
                "unknown_classes": ("refuse", "count"),
                "trust": (),
            },
            required=("run",),
        ),
        StageCommand(
            "predict",
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
            outputs=("run_id", "model", "file", "folder"),
        ),
        StageCommand("convert", takes_run=True, flags={"trust": ()}, required=("run",)),
        StageCommand(
            "promote",
            takes_run=True,
            flags={"model": (), "trust": ()},
            required=("run", "model"),
            outputs=("run_id", "model", "promoted", "version", "folder"),
            good=(FINISHED, NOT_PROMOTED),
        ),
        StageCommand(
            "python",
            flags={"target": (), "arguments": (), "writes": ()},
            required=("target",),
            outputs=("result", "folder"),
        ),
    )
}

#: The outputs of a sweep's best job.
BEST_OUTPUTS = ("overrides", "run_id", "model", "metrics", "folder")


def make_words(
    command: StageCommand, values: Mapping[str, Any], folder: Path, config_dirs: tuple[str, ...]
) -> list[str]:
    """Returns the words of a stage's command, after `scaleflow`, from its resolved keys."""
    if command.name == "python":
        arguments = json.dumps(values.get("arguments") or {})
        return ["python", str(values["target"]), arguments, str(folder / "result.json"), *config_dirs]
    runs_own_code = command.composes or "trust" in command.flags
    dirs = config_dir_flags(config_dirs) if runs_own_code else []
    overrides = [str(each) for each in values.get("overrides") or ()]
    if command.name == "train":
        return [*dirs, *overrides, make_override("hydra.run.dir", folder)]
    if command.name == "sweep":
        return ["-m", *dirs, *overrides, make_override("hydra.sweep.dir", folder)]
    words = [command.name, *([str(values["run"])] if command.takes_run else []), *overrides, *dirs]
    if command.name == "check":
        words += ["--report", str(folder / REPORT)]
    if command.name == "predict":
        words += ["--overwrite", *([] if values.get("output") else ["--output", str(folder / PREDICTIONS)])]
    for key in command.flags:
        flag, value = f"--{key.replace('_', '-')}", values.get(key)
        if value is None or value is False:
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [flag] if each is True else [flag, str(each)]
    return words


def read_outputs(
    command: StageCommand, answer: Mapping[str, Any], values: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Returns the outputs of a stage that has finished, from its answer and its resolved keys."""
    known = {**answer, "folder": str(folder)}
    match command.name:
        case "check":
            levels = [each["level"] for each in answer["findings"]]
            known["metrics"] = {f"{level}s": levels.count(level) for level in command.flags["level"]}
        case "sweep":
            known |= read_run(command, folder)
            known["metrics"] = known["best"].get("metrics", {})
        case "evaluate":
            start = f"evaluate/{answer['name']}"  # the same metric has a name without this, as in a run: `accuracy`
            named = {name: value for name, value in answer["metrics"].items() if name.startswith(start)}
            known["metrics"] = answer["metrics"] | {name.split("/", 2)[-1]: value for name, value in named.items()}
        case "predict":
            known["file"] = str(values.get("output") or folder / PREDICTIONS)
        case "convert":
            known["metrics"] = {
                f"{each['name']}/{key}": value for each in answer["formats"] for key, value in each["values"].items()
            }
        case "promote":
            known["promoted"] = answer["is_promoted"]
            known["model"] = f"models:/{values['model']}/{answer['version']}" if answer["version"] else answer["model"]
        case "python":
            known["result"] = json.loads((folder / "result.json").read_text())
    return {key: known.get(key) for key in command.outputs}


def find_named_files(values: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[str]:
    """Returns the absolute paths of the files and folders that a function's `writes`, arguments or result name.

    Raises ConfigError if one that it `writes` does not exist.
    """
    writes = list_texts(values.get("writes"))
    if missing := [each for each in writes if not Path(each).exists()]:
        raise ConfigError(f"writes: {missing[0]}: does not exist after the function has returned")
    texts = [*writes, *list_texts(values.get("arguments")), *list_texts(outputs.get("result"))]
    return sorted({str(Path(text).absolute()) for text in texts if is_existing_path(text)})


def is_existing_path(text: str) -> bool:
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):  # it is too long, or has a null character
        return False


def list_texts(value: Any) -> list[str]:
    """Returns the texts in a value of JSON, those in its lists and mappings too."""
    if isinstance(value, Mapping | list):
        return [text for each in (value.values() if isinstance(value, Mapping) else value) for text in list_texts(each)]
    return [value] if isinstance(value, str) else []


def read_run(command: StageCommand, folder: Path) -> dict[str, Any]:
    """Returns the run and the model of a training or a sweep, as far as the store has them."""
    run = Run(folder)
    if command.name == "train":
        return {"run_id": run.run_id, "model": run.model_uri}
    best = read_best_job(folder)
    return {"run_id": run.run_id, "model": best.get("model"), "best": best}


def read_best_job(folder: Path) -> dict[str, Any]:
    """Returns the outputs of the best job of the sweep in a folder; {} if no finished job has its metric."""
    if BEST not in RunState.read(folder).tags:
        return {}
    best = find_best_job(str(folder))
    overrides = select_swept(best.overrides, Ledger.load(RunFolder(folder)).swept)
    path, metrics = str(best.run.files.path.absolute()), dict(best.metrics)
    return dict(zip(BEST_OUTPUTS, (overrides, best.run.run_id, best.run.model_uri, metrics, path), strict=True))
