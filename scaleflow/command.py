"""Shared parts of the commands: preparing their words, printing a refusal, ending the process."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import select
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from scaleflow.secret_masking import mask_secrets

FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def refuse(message: str) -> int:
    """Prints why the command does nothing; returns the exit code."""
    print(f"scaleflow: {to_printable(str(mask_secrets(message)))}", file=sys.stderr)
    return REFUSED


def to_printable(message: str) -> str:
    """Returns a message on at most two lines, with characters that cannot be printed as escapes."""
    lines = message.split("\n")
    escaped = ["".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line) for line in lines]
    return ("\n" if len(escaped) <= 2 else "\\n").join(escaped)


def surely_trains(words: Sequence[str]) -> bool:
    """Returns whether a command trains or is refused, whatever its config is.

    A flag may ask for something else, and the config of a cluster may ask for a script, which is all that is printed.
    """
    return all(word in ("-m", "--multirun") or re.match(r"(?!cluster|experiment)\w[\w./]*=", word) for word in words)


def end_with(main: Callable[[], int]) -> NoReturn:
    """Runs a command, and ends the process with its exit code. Ctrl-C before there is a run gives no traceback.

    A closed standard output, as in `COMMAND --help | head`, ends the command quietly with exit code 0.
    """
    try:
        try:
            code = main()
        except SystemExit:  # argparse has printed a page of help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("scaleflow: stopped by SIGINT", file=sys.stderr)
        code = INTERRUPTED
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
