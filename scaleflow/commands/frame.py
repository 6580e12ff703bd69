"""The frame of every command: it turns errors into exit codes, and answers `--json`."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scaleflow.errors import ConfigError, RunError, read_reason
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.answer import (
    ANSWER,
    FAILED,
    INTERRUPTED,
    JSON,
    REFUSED,
    TERMINATED,
    print_refusal,
    to_printable,
    write_error,
)


def run_command(work: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Runs a command: prints its errors, and with `--json` the answer as the last line of standard output.

    Args:
        work: gets the words of the command without `--json`, and returns the exit code.
        argv: the words; None for those of `sys.argv`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    rest = [word for word in words if word != JSON]
    ANSWER.is_wanted = len(rest) < len(words)
    if not ANSWER.is_wanted:
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
    """Runs a command. Prints a `ConfigError`, a `RunError` or the loss of the store, and returns its exit code."""
    try:
        return work(words)
    except ConfigError as refusal:
        return print_refusal(str(refusal))
    except RunError as error:
        write_error(to_printable(str(mask_secrets(str(error)))))
        return FAILED
    except Exception as error:
        from scaleflow.tracking.connection import is_unreachable

        if not is_unreachable(error):
            raise
        reason = to_printable(str(mask_secrets(read_reason(error))))
        write_error(f"the tracking store does not answer any more: {reason}")
        return FAILED


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
