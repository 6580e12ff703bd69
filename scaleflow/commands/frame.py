"""The frame of every command: its parser, errors as exit codes, and the answer to `--json`."""

import argparse
import functools
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from scaleflow.compat.python import list_arguments
from scaleflow.errors import ConfigError, RunError, find_similar, read_reason
from scaleflow.interfaces import name_command
from scaleflow.interfaces.formatting import GENERATOR, to_json
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.command_exit import (
    FAILED,
    INTERRUPTED,
    JSON,
    REFUSED,
    TERMINATED,
    Outcome,
    find_interruption,
    to_printable,
    write_error,
)
from scaleflow.launcher.processes.stop import Stopped


def run_command(work: Callable[[list[str]], Outcome], argv: Sequence[str] | None = None) -> int:
    """Runs a command. Prints its errors and, with `--json`, the answer as the last line of standard output.

    Args:
        work: receives the words of the command without `--json`.
        argv: the words; None: those in `sys.argv`.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    rest = [word for word in words if word != JSON]
    if len(rest) == len(words):
        return work_in_words(work, rest).code
    try:
        outcome = work_in_words(work, rest)
    except BrokenPipeError:
        raise
    except BaseException as error:
        outcome = explain_exit(error)
    print_answer(outcome)
    return outcome.code


def make_main(work: Callable[[list[str]], Outcome]) -> Callable[..., int]:
    """Makes the function `main` of a command's module.

    It takes the words of the command (None: those in `sys.argv`) and returns the exit code.
    """

    @functools.wraps(work)
    def main(argv: Sequence[str] | None = None) -> int:
        return run_command(work, argv)

    return main


def work_in_words(work: Callable[[list[str]], Outcome], words: list[str]) -> Outcome:
    """Runs a command, and prints its error: a `ConfigError`, a `RunError` or the loss of the store."""
    try:
        outcome = work(words)
    except Exception as error:
        interruption = find_interruption(error)
        if interruption is not None:
            raise interruption from None
        outcome = to_outcome(error)
    if outcome.error:
        write_error(outcome.error)
    return outcome


def to_outcome(error: Exception) -> Outcome:
    """Returns the outcome of a command that raised an error. Reraises an error that does not explain itself."""
    if isinstance(error, Stopped):
        return Outcome(error.exit_code, error=str(error))
    text = str(error)
    if not isinstance(error, ConfigError | RunError):
        from scaleflow.tracking.connection import is_unreachable

        if not is_unreachable(error):
            raise error
        text = f"the tracking store does not answer any more: {read_reason(error)}"
    from scaleflow.config.words import show_keys  # Hydra's grammar, which a command without an error may not need

    code = REFUSED if isinstance(error, ConfigError) else FAILED
    return Outcome(code, error=to_printable(show_keys(str(mask_secrets(text)))))


def explain_exit(error: BaseException) -> Outcome:
    """Returns the outcome of a command that an exception ended. Prints the exception, except a SystemExit."""
    if isinstance(error, SystemExit):
        return Outcome(error.code if isinstance(error.code, int) else int(error.code is not None))
    if isinstance(error, KeyboardInterrupt):
        write_error("stopped by SIGINT")
        return Outcome(INTERRUPTED)
    traceback.print_exception(error)
    return Outcome(FAILED, error=str(mask_secrets(f"{type(error).__name__}: {error}")))


def print_answer(outcome: Outcome) -> None:
    """Prints the answer to `--json` as one line, the last one of standard output."""
    code = outcome.code
    signals = {INTERRUPTED: "stopped by SIGINT", TERMINATED: "stopped by SIGTERM"}
    answer = {"exit_code": code, "error": (outcome.error or signals.get(code)) if code else None}
    try:
        values = dict(outcome.read())
    except (OSError, ValueError, ConfigError) as error:  # the folder is gone
        values = {"error": str(error)}
    answer |= {key: value for key, value in values.items() if key != "error" or (code and value)}
    print(json.dumps(to_json(answer), default=str), flush=True)


class CommandParser(argparse.ArgumentParser):
    """The parser of the command `scaleflow NAME`. `about` is its help page."""

    def __init__(self, name: str, about: str | None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(f"scaleflow {name}", description=about, formatter_class=form, allow_abbrev=False)
        self.name = name
        self._typed: list[str] = []
        self.add_argument(JSON, action="store_true", help="print one JSON object as the last line of standard output")

    def error(self, message: str) -> NoReturn:
        """Refuses the command, and suggests the intended word."""
        if message.startswith("unrecognized arguments: "):
            unknown = message.split()[2]
            message = self._describe_flag(unknown) if unknown.startswith("-") else self._describe_word(unknown)
        elif message.startswith("the following arguments are required: "):
            words = []
            for action in list_arguments(self):
                if action.required and action.dest != "overrides":
                    words += [*action.option_strings[:1], str(action.metavar or action.dest)]
            lacking = message.removesuffix(", KEY=VALUE")  # argparse also lists words that may be absent
            message = f"{lacking}; type {name_command(self.name)} {' '.join(words)}"
            for word in self._typed:
                if word.startswith("--") and word.partition("=")[0] not in self._flags:
                    message = self._describe_flag(word)
                    break
        raise ConfigError(message)

    @property
    def _flags(self) -> list[str]:
        return [*re.findall(r"--[\w-]+", self.format_usage()), "--help"]

    def _describe_flag(self, word: str) -> str:
        """Returns the error for an unknown flag, with a suggestion."""
        flag = word.partition("=")[0]
        if flag in ("--run", "--run-id", "--run_id", "--id", "--model-uri"):
            for action in list_arguments(self):
                if action.metavar == "RUN_ID":  # `check` takes it with a flag
                    words = " ".join([*action.option_strings[:1], "RUN_ID"])
                    return f"{word}: there is no such flag; type {name_command(self.name)} {words}"
        if self.name == "evaluate" and flag in ("--data", "--dataset", "--input", "--file", "--csv"):
            return f"{word}: there is no such flag; type dataset.data_dir=FILE"
        bare = {known.lstrip("-"): known for known in self._flags}
        similar = find_similar(flag.lstrip("-"), bare, 0.7)
        hint = f"; did you mean {bare[similar]}?" if similar else ""
        return f"{word}: there is no such flag{hint} ({', '.join(self._flags)})"

    def _describe_word(self, word: str) -> str:
        """Returns the error for a word that is no flag, and that the command has no place for."""
        name = name_command(self.name)
        if word.startswith("tracking.uri=") and "--uri" in self._flags:
            return f"{word}: this command takes no KEY=VALUE; type --uri {word.partition('=')[2]}"
        if "=" in word:
            return f"{word}: this command takes no KEY=VALUE; type {name} --help for what it takes"
        return f"{word}: there is one word too many; type {name} --help for what it takes"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._typed = list(args or ())
        return super().parse_known_args(args, namespace)

    def add_overrides(self, about: str) -> None:
        """Adds arguments for overrides of a config, and for folders with the user's own options."""
        self.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=about)
        self.add_repeated("--config-dir", "DIR", "a folder with your own config options")

    def add_repeated(self, flag: str, metavar: str, about: str, dest: str | None = None) -> None:
        about = f"{about}; repeat the flag for several"
        self.add_argument(flag, action="append", default=[], metavar=metavar, dest=dest, help=about)


def check_page(flag: str, path: Path) -> None:
    """Raises ConfigError if a page cannot be written to a path, or if another program's file exists there."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; create it first")
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a folder; name a file, such as {path / 'page.html'}")
    if path.exists() and GENERATOR.encode() not in path.read_bytes()[:1000]:
        raise ConfigError(f"{flag} {path}: this file is no page of scaleflow's; delete it, or name another one")
