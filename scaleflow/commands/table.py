"""The table of commands: `scaleflow NAME ...` and `python -m scaleflow NAME ...`."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from scaleflow.config.synonyms import OTHER_COMMANDS, simplify, translate_path
from scaleflow.config.unknown_keys import suggest
from scaleflow.errors import ConfigError
from scaleflow.launcher.command_exit import JSON


@dataclass(frozen=True)
class Command:
    """A command besides the run itself."""

    name: str  # as it is typed after `scaleflow`
    about: str  # a line for `scaleflow --help`
    module: str  # with the function `main(words)`, which returns the exit code. It is imported when the command runs.

    def run(self, words: Sequence[str]) -> int:
        """Runs the command with the words after its name; returns the exit code."""
        main: Callable[[Sequence[str]], int] = import_module(self.module).main
        return main(words)


#: The commands by the title under which they are listed. A new one is a line here, and its module.
GROUPS = {
    "before a run": (
        Command("init", "a new project: a dataset, a model, a recipe, a pipeline, a test: FOLDER", "scaleflow.init"),
        Command("schema", "a JSON schema of the config, or of a GROUP, for editors", "scaleflow.schema"),
        Command("doctor", "what this machine has, and which strategies work on it", "scaleflow.doctor.command"),
        Command("check", "faults of a dataset, and how it differs from that of a run", "scaleflow.check"),
        Command("find", "a good learning rate (lr) or batch_size for a run", "scaleflow.find"),
        Command("tune", "good settings for a run, by trying them for --minutes", "scaleflow.tune"),
        Command("pipeline", "the steps around a run, declared in a file: NAME", "scaleflow.pipeline.command"),
        Command("warm", "start, status or stop: an interpreter kept ready", "scaleflow.warm.command"),
    ),
    "tracked runs": (
        Command("rerun", "a new run with the config of a tracked run: RUN_ID", "scaleflow.rerun"),
        Command("refit", "its model once more, on all rows but the test's: PARENT or RUN_ID", "scaleflow.refit"),
        Command("diff", "in what two runs differ, and if it is more than noise: RUN_A RUN_B", "scaleflow.diff"),
        Command("clean", "delete the folders of finished runs that the store has completely", "scaleflow.clean"),
        Command("best", "the best job of a sweep, and its model: PARENT", "scaleflow.best"),
        Command("sync", "send to the tracking store what it lacks of the runs in a FOLDER", "scaleflow.sync"),
        Command("project", "an entry point of the file MLproject, for mlflow run", "scaleflow.project"),
    ),
    "tracked models": (
        Command("evaluate", "evaluate a tracked model on a dataset: RUN_ID", "scaleflow.evaluate"),
        Command("generate", "let a language model continue a text: RUN_ID --prompt TEXT", "scaleflow.generate"),
        Command("convert", "export it in more formats: RUN_ID export.formats=[onnx]", "scaleflow.convert"),
        Command("promote", "make it the champion if it is better: RUN_ID --model NAME", "scaleflow.promote"),
        Command(
            "predict",
            "write its predictions for a table: RUN_ID --input FILE --output FILE",
            "scaleflow.predict.command",
        ),
    ),
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}


def find_command(words: Sequence[str]) -> Command | None:
    """Returns the command that the first word names, apart from `--json`; None for a run."""
    return COMMANDS.get(next((word for word in words if word != JSON), ""))


def describe_commands() -> str:
    """Returns a line for each command, under the title of its group."""
    lines: list[str] = []
    for group, commands in GROUPS.items():
        lines += [group, *(f"  scaleflow {each.name:<10} {each.about}" for each in commands)]
    return "\n".join(f"  {line}" for line in lines)


def check_first_word(words: Sequence[str]) -> None:
    """Raises ConfigError if the first word of a run, after its flags, is not an override."""
    word = next(iter(words), "~")
    following = list(words[1:])
    if word[:1] in "~+" or "=" in word:
        return
    if word in COMMANDS:
        raise ConfigError(f"{word}: a command is the first word; write scaleflow {word} ...")
    if following and following[0].startswith("="):
        value = following[0][1:] or "".join(following[1:2])
        raise ConfigError(f"{word}: there is a space around the equals sign; type {shlex.quote(f'{word}={value}')}")
    if word == "help" and (named := next((each for each in following if each in COMMANDS), "")):
        raise ConfigError(f"help: there is no such command; type scaleflow {named} --help")
    if simplify(word) in OTHER_COMMANDS:
        meant = OTHER_COMMANDS[simplify(word)]
        is_run = meant.startswith("scaleflow KEY=VALUE")
        data = translate_path(following[0]) if is_run and following else ""
        raise ConfigError(f"{word}: there is no such command; type {f'scaleflow {data}' if data else meant}")
    hint = suggest(word, COMMANDS, "; to set a key of a run, write KEY=VALUE in one word")
    raise ConfigError(f"{word}: there is no such command{hint} ({', '.join(COMMANDS)})")
