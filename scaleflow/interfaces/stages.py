"""What a command says of itself so that it can be a stage of a pipeline.

A feature names each of its stages as "module:NAME" in `Feature.stages`. NAME is a `StageCommand`, or an object of a
subclass if the keys of the stage are not all that its words are made of, or its answer not all of its outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Stands for an output that does not exist yet, where keys are checked before any stage has run.
UNKNOWN = "value-not-known-yet"

#: The keys that every stage may have.
COMMON_KEYS = ("command", "after", "when", "foreach")

#: The outputs of the stages that have a run of their own, and of those that are about one.
OF_A_RUN = ("run_id", "model", "metrics", "folder")

#: Values of options with a dash in the flag.
Choices = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StageCommand:
    """A command that a stage can be.

    The methods take the stage's keys as `values`, without interpolations, and its own folder.
    """

    name: str  # as it is typed after `scaleflow`
    composes: bool = False  # whether its overrides are those of a new run, after the pipeline's own
    work: str = ""  # what a command that composes does in place of a run of its own, such as `data checks`
    takes_run: bool = False  # whether it is about a tracked run, its key `run`
    #: Its options, as keys of the stage with `_` for `-`; each with the values that it takes, () for any
    flags: Mapping[str, Choices] = field(default_factory=dict)
    required: Sequence[str] = ()  # the keys that it cannot do without
    data_flags: Sequence[str] = ()  # the options that are files of data: with other content, the stage runs again
    writes_data: bool = False  # whether it may write data that stages after it read
    files: Sequence[str] = ()  # names of files in the stage's folder that its run in the store gets
    outputs: Sequence[str] = OF_A_RUN
    good: Sequence[int] = (0,)  # the exit codes after which the stage has finished

    @property
    def has_own_run(self) -> bool:
        """Whether the command itself records a run, as a training and a sweep do."""
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
        """Checks the keys before any stage has run, with stand-ins for outputs.

        Raises ConfigError if it cannot work.
        """

    def make_words(self, values: Mapping[str, Any], folder: Path, config_dirs: Sequence[str]) -> list[str]:
        """Returns the words of the command, after `scaleflow`."""
        words = [self.name]
        if self.takes_run:
            words.append(str(values["run"]))
        words += [str(each) for each in values.get("overrides") or ()]
        if self.composes or "trust" in self.flags:  # it imports code of the user's
            for path in config_dirs:
                words += ["--config-dir", path]
        words += self.make_extra_words(values, folder)
        for key in self.flags:
            value = values.get(key)
            if value is None or value is False:
                continue
            flag = f"--{key.replace('_', '-')}"
            for each in value if isinstance(value, list) else [value]:
                words += [flag] if each is True else [flag, str(each)]
        return words

    def make_extra_words(self, values: Mapping[str, Any], folder: Path) -> list[str]:
        """Returns words that are no keys of the stage, such as where a file is written."""
        return []

    def read_outputs(self, answer: Mapping[str, Any], values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Returns the outputs of a stage that has finished; `answer` is what the command says with `--json`."""
        known = {**answer, "folder": str(folder), **self.read_extra_outputs(answer, values, folder)}
        return {key: known.get(key) for key in self.outputs}

    def read_extra_outputs(self, answer: Mapping[str, Any], values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Returns the outputs that the answer does not have by their names."""
        return {}

    def read_run(self, folder: Path) -> dict[str, Any]:
        """Returns the outputs about the command's own run that the store may get later; {} if it has no run."""
        return {}

    def list_files(self, values: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[str]:
        """Returns absolute paths: if one of these is gone later, the stage runs again. Raises ConfigError if one that
        must exist does not.
        """
        return []

    def summarize(self, outputs: Mapping[str, Any]) -> str:
        """Returns the results of a stage that has finished in a few words; empty: its metrics are shown."""
        return ""
