"""Describes commands that can be stages of a pipeline.

A feature names each of its stages as "module:NAME" in `Feature.stages`. NAME is a `StageCommand`, or an object of a
subclass if the command's words need more than the stage's keys, or its outputs more than its answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: A stand-in for an output that does not exist yet, to check keys before any stage has run.
UNKNOWN = "value-not-known-yet"

#: The keys that every stage may have.
COMMON_KEYS = ("command", "after", "when", "foreach")

#: The outputs of stages that have their own run, or that are about a run.
OF_A_RUN = ("run_id", "model", "metrics", "folder")

#: The allowed values of an option of the command.
Choices = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StageCommand:
    """A command that can be a stage.

    The methods take the stage's keys as `values`, without interpolations, and the stage's folder.
    """

    name: str  # the word after `scaleflow`
    composes: bool = False  # whether it composes a new run from overrides, which follow the pipeline's own
    work: str = ""  # the work of a composing command without its own run, such as `data checks`
    takes_run: bool = False  # whether it is about a tracked run, which the key `run` names
    #: Its options, as keys of the stage with `_` instead of `-`, each with its allowed values; () allows any
    flags: Mapping[str, Choices] = field(default_factory=dict)
    required: Sequence[str] = ()  # the required keys
    data_flags: Sequence[str] = ()  # options that name data files: if their content changes, the stage runs again
    writes_data: bool = False  # whether it may write data that later stages read
    files: Sequence[str] = ()  # names of files in the stage's folder to log with its run in the store
    outputs: Sequence[str] = OF_A_RUN
    good: Sequence[int] = (0,)  # the exit codes that mean success

    @property
    def has_own_run(self) -> bool:
        """Whether the command itself records a run, as a training or a sweep does."""
        return self.composes and not self.work

    @property
    def takes_overrides(self) -> bool:
        return self.composes or self.takes_run

    @property
    def keys(self) -> Sequence[str]:
        """The keys that such a stage may have."""
        keys = [*COMMON_KEYS]
        if self.takes_overrides:
            keys.append("overrides")
        if self.takes_run:
            keys.append("run")
        return [*keys, *self.flags]

    def check(self, values: Mapping[str, Any], config_dirs: Sequence[str]) -> None:
        """Checks the keys before any stage has run. Outputs are replaced by stand-ins.

        Raises ConfigError if the stage cannot work.
        """

    def make_words(self, values: Mapping[str, Any], folder: Path, config_dirs: Sequence[str]) -> list[str]:
        """Returns the words of the command, after `scaleflow`."""
        words = [self.name]
        if self.takes_run:
            words.append(str(values["run"]))
        words += [str(override) for override in values.get("overrides") or ()]
        if self.composes or "trust" in self.flags:  # it imports user code
            for path in config_dirs:
                words += ["--config-dir", path]
        words += self.make_extra_words(values, folder)
        for key in self.flags:
            value = values.get(key)
            if value is None or value is False:
                continue
            flag = f"--{key.replace('_', '-')}"
            for item in value if isinstance(value, list) else [value]:
                words.append(flag)
                if item is not True:
                    words.append(str(item))
        return words

    def make_extra_words(self, values: Mapping[str, Any], folder: Path) -> list[str]:
        """Returns words that do not come from keys of the stage, such as where to write a file."""
        return []

    def read_outputs(self, answer: Mapping[str, Any], values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Returns the outputs of a finished stage. `answer` is the command's `--json` object."""
        known = {**answer, "folder": str(folder), **self.read_extra_outputs(answer, values, folder)}
        return {key: known.get(key) for key in self.outputs}

    def read_extra_outputs(self, answer: Mapping[str, Any], values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Returns outputs that the answer does not contain under their names."""
        return {}

    def read_run(self, folder: Path) -> dict[str, Any]:
        """Returns outputs about the command's own run that the store may get later; {} if it has no run."""
        return {}

    def list_files(self, values: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[str]:
        """Returns absolute paths of files. If one of them is missing later, the stage runs again.

        Raises ConfigError if a required file does not exist.
        """
        return []

    def summarize(self, outputs: Mapping[str, Any]) -> str:
        """Returns the results of a finished stage in a few words; empty: its metrics are shown."""
        return ""
