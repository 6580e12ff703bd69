"""The process of a command: signals before there is a run, a closed standard output, a quick end."""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from scaleflow.commands.frame import explain_exit, print_answer
from scaleflow.compat.python import run_exit_functions
from scaleflow.launcher.command_exit import JSON, TERMINATED


def end_with(main: Callable[[], int], report: Callable[[int], object] = lambda _: None) -> NoReturn:
    """Runs a command, and ends the process with its exit code. Calls `report` with the code just before the end.

    Ctrl-C before there is a run prints no traceback. A closed standard output, as in `COMMAND --help | head`, ends the
    command quietly with exit code 0.
    """
    try:
        try:
            with catch_sigterm() if JSON in sys.argv else contextlib.nullcontext():
                code = main()
        except (KeyboardInterrupt, SystemExit) as error:
            sys.stdout.flush()
            if isinstance(error, SystemExit) and JSON not in sys.argv:  # argparse has printed a help page
                raise
            outcome = explain_exit(error)
            if JSON in sys.argv:  # the command was stopped before `run_command`
                print_answer(outcome)
            code = outcome.code
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError:  # the disk of a log is full; the work is done, so its exit code counts
            pass
    except BrokenPipeError:
        if not is_stdout_closed():
            raise
        with Path(os.devnull).open("w") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())  # so that flushing the rest of the buffer succeeds
        code = 0
    exit_process(code, report)


@contextlib.contextmanager
def catch_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit, so that a command that is stopped before there is a run can answer."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_stdout_closed() -> bool:
    """Whether the reader of standard output has closed it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))


def exit_process(code: int, report: Callable[[int], object]) -> NoReturn:
    """Ends the process without Python's teardown of modules, which takes half a second or more after MLflow's import.

    If a Hydra launcher, such as joblib's, has left processes of `multiprocessing`, the process ends in the usual way:
    Python tells these processes to end before it waits for them.
    """
    multiprocessing = sys.modules.get("multiprocessing")  # a thread may still be importing it
    if getattr(multiprocessing, "active_children", list)():
        sys.exit(code)
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    report(code)
    os._exit(code)
