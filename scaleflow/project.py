"""Runs the entry points of the file MLproject, for `mlflow run`.

    scaleflow project main strategy=auto ... --overrides 'a=1 b=2'
    scaleflow project sweep ...
    scaleflow project evaluate RUN_ID ...

main and sweep stand for scaleflow and scaleflow -m. Any other word is the name of a command.
MLflow passes every parameter, also those that the user did not set. Options that equal the defaults are dropped,
because an explicit option would take precedence over a recipe (-P experiment=...).
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from scaleflow.commands.frame import run_command
from scaleflow.commands.table import list_commands
from scaleflow.errors import ConfigError
from scaleflow.interfaces.features import list_features
from scaleflow.launcher.command_exit import Outcome

#: The entry points without a command: the words that they stand for, after `python -m scaleflow`.
ENTRY_POINTS: Mapping[str, Sequence[str]] = {"main": (), "sweep": ("-m",)}


def main(argv: Sequence[str] | None = None) -> int:
    """Replaces this process by the command. Returns only for `--help` or an unknown entry point, with an exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"--help", "-h"} & set(words[:1]):
        print(__doc__)
        return 0
    name = words[0] if words else ""
    if name in ENTRY_POINTS or name in list_commands():
        command = ENTRY_POINTS.get(name, (name,))
        os.execv(sys.executable, [sys.executable, "-m", "scaleflow", *command, *drop_empty_words(words[1:])])
    return run_command(refuse_entry_point, words)


def refuse_entry_point(words: Sequence[str]) -> Outcome:
    raise ConfigError(f"{' '.join(words[:1])}: expected {', '.join(ENTRY_POINTS)} or a command as the first argument")


def drop_empty_words(words: Sequence[str]) -> list[str]:
    """Removes `GROUP=DEFAULT`, `KEY=` and an empty `--overrides`."""
    defaults = {f"{group}={option}" for group, option in default_options().items()}
    end = words.index("--overrides") if "--overrides" in words else len(words)
    settings = [word for word in words[:end] if word not in defaults and not word.endswith("=")]
    return [*settings, *(words[end:] if "".join(words[end + 1 :]).strip() else ())]


def default_options() -> dict[str, str]:
    """Returns the default option of each config group; `null` if the group has no default.

    The groups come from the defaults list in config.yaml and from features.
    """
    entries = list(OmegaConf.load(Path(__file__).with_name("conf") / "config.yaml").defaults)
    for feature in list_features().values():
        entries.extend(feature.defaults)
    options: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry, Mapping | DictConfig):
            for group, option in entry.items():
                options[str(group)] = "null" if option is None else str(option)
    return options
