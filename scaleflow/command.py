"""The frame of all commands: it prepares their words, turns errors into exit codes, and answers `--json`."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import math
import os
import re
import select
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from scaleflow.errors import ConfigError, RunError
from scaleflow.secret_masking import mask_secrets

FAILED, REFUSED, INTERRUPTED, TERMINATED = 1, 2, 130, 143

JSON = "--json"


class Answer:
    """What a command answers to `--json`, in addition to its exit code.

    Attributes:
        read: returns the values. It is called at the end of the command, and only with `--json`.
        error: the error that was printed last.
    """

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[str, Any]] = dict
        self.error: str | None = None


#: The answer of this process's command.
ANSWER = Answer()


class CommandParser(argparse.ArgumentParser):
    """The parser of a command; its page of help is `about`."""

    def __init__(self, name: str, about: str | None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(f"python -m {name}", description=about, formatter_class=form, allow_abbrev=False)
        self.add_argument(JSON, action="store_true", help="print one JSON object as the last line of standard output")

    def error(self, message: str) -> NoReturn:
        ANSWER.error = str(mask_secrets(message))
        super().error(message)


def run_command(work: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Runs a command: prints its errors, and with `--json` the answer as the last line of standard output.

    Args:
        work: gets the words of the command without `--json`, and returns the exit code.
        argv: the words; None for those of `sys.argv`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    rest = [word for word in words if word != JSON]
    if len(rest) == len(words):
        return work_in_words(work, rest)
    ANSWER.read, ANSWER.error = dict, None
    try:
        code = work_in_words(work, rest)
    except BrokenPipeError:
        raise
    except BaseException as error:
        code = explain_exit(error)
    print_answer(code)
    return code


def work_in_words(work: Callable[[list[str]], int], words: list[str]) -> int:
    """Runs a command. Prints a `ConfigError` or a `RunError`, and returns its exit code."""
    try:
        return work(words)
    except ConfigError as refusal:
        return refuse(str(refusal))
    except RunError as error:
        write_error(to_printable(str(mask_secrets(str(error)))))
        return FAILED


@contextlib.contextmanager
def catch_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit, so that a command that is stopped before there is a run can answer."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def explain_exit(error: BaseException) -> int:
    """Prints the error that ends a command, unless it is printed already; returns the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        write_error("stopped by SIGINT")
        return INTERRUPTED
    traceback.print_exception(error)
    ANSWER.error = str(mask_secrets(f"{type(error).__name__}: {error}"))
    return FAILED


def print_answer(code: int) -> None:
    """Prints the answer to `--json`: in one line, the last one of standard output."""
    signals = {INTERRUPTED: "stopped by SIGINT", TERMINATED: "stopped by SIGTERM"}
    answer = {"exit_code": code, "error": (ANSWER.error or signals.get(code)) if code else None}
    try:
        values = dict(ANSWER.read()) if code != REFUSED else {}
    except (OSError, ValueError, ConfigError) as error:  # the folder is gone
        values = {"error": str(error)}
    answer |= {key: value for key, value in values.items() if key != "error" or (code and value)}
    print(json.dumps(to_json(answer), default=str), flush=True)


def to_json(value: Any) -> Any:
    """Returns a value with null in place of numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refuse(message: str) -> int:
    """Prints why the command does nothing; returns the exit code."""
    write_error(to_printable(str(mask_secrets(message))))
    return REFUSED


def write_error(text: str) -> None:
    """Prints an error to standard error, if that can be written."""
    ANSWER.error = text
    with contextlib.suppress(OSError):
        print(f"scaleflow: {text}", file=sys.stderr, flush=True)


def to_printable(message: str) -> str:
    """Returns a message on at most two lines, with characters that cannot be printed as escapes."""
    lines = message.split("\n")
    escaped = ["".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line) for line in lines]
    return ("\n" if len(escaped) <= 2 else "\\n").join(escaped)


def surely_trains(words: Sequence[str]) -> bool:
    """Returns whether a command trains or is refused, whatever its config is.

    A flag may ask for something else, and the config of a cluster may ask for a script, which is all that is printed.
    """
    flags = ("-m", "--multirun", JSON)
    return all(word in flags or re.match(r"(?!cluster|experiment)\w[\w./]*=", word) for word in words)


def end_with(main: Callable[[], int]) -> NoReturn:
    """Runs a command, and ends the process with its exit code. Ctrl-C before there is a run gives no traceback.

    A closed standard output, as in `COMMAND --help | head`, ends the command quietly with exit code 0.
    """
    try:
        try:
            with catch_sigterm() if JSON in sys.argv else contextlib.nullcontext():
                code = main()
        except (KeyboardInterrupt, SystemExit) as error:
            sys.stdout.flush()
            if isinstance(error, SystemExit) and JSON not in sys.argv:  # argparse has printed a page of help
                raise
            code = explain_exit(error)
            if JSON in sys.argv:  # the command was stopped before `run_command`
                print_answer(code)
        sys.stdout.flush()
    except BrokenPipeError:
        if not is_stdout_closed():
            raise
        with Path(os.devnull).open("w") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())  # what is still in the buffer cannot fail either
        code = 0
    exit_process(code)


def is_stdout_closed() -> bool:
    """Whether the reader of standard output has closed it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))


def exit_process(code: int) -> NoReturn:
    """Ends the process without Python's teardown of modules, which takes half a second or more after MLflow's import.

    If a Hydra launcher has left processes of `multiprocessing`, as joblib's does, the process ends in the usual way:
    Python tells them to end before it waits for them.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.active_children():
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(code)


def split_overrides(words: list[str]) -> list[str]:
    """Replaces `--overrides 'a=1 b=2'` by its words: MLflow passes a parameter as one word."""
    if "--overrides" not in words[:-1]:
        return words
    index = words.index("--overrides")
    return [*words[:index], *shlex.split(words[index + 1]), *words[index + 2 :]]


def quote_override(key: str, value: object) -> str:
    """Returns `KEY=VALUE` as a word for a shell. What is special to Hydra is quoted for it."""
    text = str(value)
    is_plain = re.fullmatch(r"[\w./:@%+-][\w./:@%+ -]*", text, re.ASCII) is not None and text == text.strip()
    return shlex.quote(f"{key}={text}" if is_plain else "{}='{}'".format(key, text.replace("'", r"\'")))


def quote_nan_option(words: Sequence[str]) -> list[str]:
    """Quotes the option of `debug=nan`, which Hydra would parse as a number."""
    return [re.sub(r"(?<=[=,])nan(?=,|$)", "'nan'", word) if word.startswith("debug=") else word for word in words]


def accept_keys_of_run(words: Sequence[str]) -> list[str]:
    """With `resume=RUN`, makes Hydra accept keys that only that run's options have, such as `model.filters=8` of a cnn.

    A key that the run does not have either is rejected when the run's config is read.
    """
    if not any(word.lstrip("+").startswith("resume=") for word in words):
        return list(words)
    return [f"++{word}" if re.match(r"(?!hydra\.)\w+(\.\w+)+=", word) else word for word in words]
