"""The table of commands: `scaleflow NAME ...` and `python -m scaleflow NAME ...`."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import get_args

from scaleflow.commands.frame import run_command
from scaleflow.config.synonyms import OTHER_COMMANDS, simplify, translate_path
from scaleflow.config.unknown_keys import suggest
from scaleflow.config.words import FLAGS_WITH_VALUE
from scaleflow.errors import ConfigError
from scaleflow.interfaces.features import (
    Command,
    CommandGroup,
    find_file_word,
    import_named,
    list_features,
    tell_problem,
)
from scaleflow.launcher.command_exit import JSON, Outcome

#: The commands of the core.
CORE_COMMANDS = (
    Command(
        name="best",
        about="the best job of a sweep, and its model: PARENT",
        module="scaleflow.best",
        group="tracked runs",
        place=50,
    ),
    Command(
        name="sync",
        about="send to the tracking store what it lacks of the runs in a FOLDER",
        module="scaleflow.sync",
        group="tracked runs",
        place=60,
    ),
    Command(
        name="project",
        about="an entry point of the file MLproject, for mlflow run",
        module="scaleflow.project",
        group="tracked runs",
        place=70,
    ),
    Command(
        name="evaluate",
        about="evaluate a tracked model on a dataset: RUN_ID",
        module="scaleflow.evaluate",
        group="tracked models",
        place=10,
        usage="RUN_ID",
        other_names=("eval", "test", "validate", "score"),
    ),
)


@cache
def list_commands() -> Mapping[str, Command]:
    """Returns the commands of the core and of features by name, in the order of `scaleflow --help`."""
    commands = {command.name: command for command in CORE_COMMANDS}
    groups = get_args(CommandGroup)
    for feature in list_features().values():
        for command in feature.commands:
            if command.name in commands:
                tell_problem(feature.name, f"its command {command.name} is skipped: there is one already")
            elif command.group not in groups:
                tell_problem(feature.name, f"its command {command.name} is skipped: {command.group!r} is no group")
            else:
                commands[command.name] = command

    def find_position(command: Command) -> tuple[int, int, str]:
        return groups.index(command.group), command.place, command.name

    ordered = sorted(commands.values(), key=find_position)
    return {command.name: command for command in ordered}


@cache
def list_other_names() -> Mapping[str, str]:
    """Returns what to type instead of other tools' command names."""
    names = dict(OTHER_COMMANDS)
    for command in list_commands().values():
        for name in command.other_names:
            names[name] = f"scaleflow {command.name} {command.usage}".strip()
    return names


def run_named_command(command: Command, words: Sequence[str]) -> int:
    """Runs a command with the words after its name. Returns the exit code.

    If another package's command cannot be imported, it is refused with the name of its feature.
    """
    try:
        main: Callable[[Sequence[str]], int] = import_module(command.module).main
    except Exception as error:
        if command.module.startswith("scaleflow."):
            raise
        main = partial(run_command, partial(refuse_command, command, error))
    return main(words)


def refuse_command(command: Command, error: Exception, words: Sequence[str]) -> Outcome:
    """Raises ConfigError, because the command's module cannot be imported."""
    names = []
    for feature in list_features().values():
        if any(other is command for other in feature.commands):
            names.append(feature.name)
    reason = f"{type(error).__name__}: {error}"
    raise ConfigError(f"{command.name}: the feature {', '.join(names)} cannot import {command.module} ({reason})")


def find_command(words: Sequence[str]) -> Command | None:
    """Returns the command that the first word, ignoring `--json`, names; None for a run."""
    first = next((word for word in words if word != JSON), "")
    if not first.isidentifier():
        return None  # a flag or an override: no need to read the features
    return list_commands().get(first)


def translate_file_word(words: Sequence[str]) -> list[str]:
    """Returns the words of a run. If the first word is a file of a feature, such as `train.py`, the feature translates
    all words.

    Raises ConfigError if they cannot work.
    """
    place = find_first_word(words)
    suffix = Path(words[place]).suffix.lower() if place is not None else ""
    if place is None or not suffix or "=" in words[place]:
        return list(words)
    name = find_file_word(suffix)
    if not name:
        return list(words)
    translated: list[str] = import_named(name)(words, place)
    return translated


def find_first_word(words: Sequence[str]) -> int | None:
    """Returns the position of the first word that is neither a flag nor the value of a flag; None if there is none."""
    is_value = False
    for place, word in enumerate(words):
        if not is_value and not word.startswith("-"):
            return place
        is_value = not is_value and word in FLAGS_WITH_VALUE
    return None


def describe_commands() -> str:
    """Returns a line for each command, under the title of its group."""
    lines: list[str] = []
    for group in get_args(CommandGroup):
        lines.append(group)
        for command in list_commands().values():
            if command.group == group:
                lines.append(f"  scaleflow {command.name:<10} {command.about}")
    return "\n".join(f"  {line}" for line in lines)


def check_first_word(words: Sequence[str]) -> None:
    """Raises ConfigError if the first word of a run, after its flags, is not an override."""
    word = next(iter(words), "~")
    following = list(words[1:])
    if word[:1] in "~+" or "=" in word:
        return
    if word in list_commands():
        raise ConfigError(f"{word}: a command is the first word; write scaleflow {word} ...")
    if following and following[0].startswith("="):
        value = following[0][1:] or "".join(following[1:2])
        raise ConfigError(f"{word}: there is a space around the equals sign; type {shlex.quote(f'{word}={value}')}")
    named = [other for other in following if other in list_commands()]
    if word == "help" and named:
        raise ConfigError(f"help: there is no such command; type scaleflow {named[0]} --help")
    meant = list_other_names().get(simplify(word))
    if meant is not None:
        is_run = meant.startswith("scaleflow KEY=VALUE")
        data = translate_path(following[0]) if is_run and following else ""
        raise ConfigError(f"{word}: there is no such command; type {f'scaleflow {data}' if data else meant}")
    hint = suggest(word, list_commands(), "; to set a key of a run, write KEY=VALUE in one word")
    raise ConfigError(f"{word}: there is no such command{hint} ({', '.join(list_commands())})")
