"""Keeps an interpreter ready that has imported TensorFlow, Keras and MLflow, so that commands start in an instant.

    scaleflow warm start         # start one for this Python, unless it runs
    scaleflow warm status        # the servers of this user: memory, age, commands served
    scaleflow warm stop          # end them; commands that run go on

Commands use a server that runs. With SCALEFLOW_WARM=1 in the environment the first command starts one; with
SCALEFLOW_WARM=0 a command uses none. A server ends after 30 minutes without a command, when memory runs short, and when
a package changes. It takes about 600 MB of memory, most of which the commands share.

Exit code: 0 done; 1 a server cannot be started; 2 the command cannot work.
"""

import time
from pathlib import Path
from typing import Any

from scaleflow.commands.frame import CommandParser, make_main
from scaleflow.errors import RunError
from scaleflow.interfaces.formatting import format_duration
from scaleflow.launcher.command_exit import Outcome
from scaleflow.launcher.processes.handover import (
    NotWarm,
    ServerFiles,
    ask_server,
    digest_interpreter,
    find_servers,
    make_sockets_folder,
    start_warm_server,
)

#: Maximum seconds to wait for the end of a server without commands.
STOP_SECONDS = 10.0


@make_main
def main(argv: list[str]) -> Outcome:
    parser = CommandParser("warm", __doc__)
    parser.add_argument("action", choices=("start", "status", "stop"))
    action = parser.parse_args(argv).action
    lines, servers = {"start": start, "status": describe_servers, "stop": stop}[action]()
    print("\n".join(lines))
    return Outcome(read=lambda: {"servers": servers})


def start() -> tuple[list[str], list[dict[str, Any]]]:
    """Starts this interpreter's server and waits until it is ready."""
    began = time.monotonic()
    try:
        files = ServerFiles(make_sockets_folder(), digest_interpreter(()))
        is_new = start_warm_server(files, ())
        answer = ask_server(files, "status")
    except NotWarm as why:
        raise RunError(f"warm start: {why}") from why
    how = f"ready after {format_duration(time.monotonic() - began)}" if is_new else "runs already"
    return [f"{how}: {describe(answer)}"], [answer]


def describe_servers() -> tuple[list[str], list[dict[str, Any]]]:
    """Returns a line about each server, and their answers."""
    answers = ask_all("status")
    lines = [describe(answer) for answer in answers]
    return lines or ["no warm server runs; start one: scaleflow warm start"], answers


def ask_all(question: str) -> list[dict[str, Any]]:
    """Returns the answers of all servers that answer."""
    answers = []
    for files in find_servers():
        answer = ask(files, question)
        if answer:
            answers.append(answer)
    return answers


def stop() -> tuple[list[str], list[dict[str, Any]]]:
    """Asks all servers to end, and waits for those without a running command."""
    answers = ask_all("stop")
    lines = []
    for answer in answers:
        if answer["running"]:
            state = "ends with its last command"
        elif wait_for_end(int(answer["pid"])):
            state = "stopped"
        else:
            state = f"has not ended within {STOP_SECONDS:g} s"
        lines.append(f"{state}: {describe(answer)}")
    return lines or ["no warm server runs"], answers


def wait_for_end(pid: int) -> bool:
    """Waits up to `STOP_SECONDS` until a process has ended. Returns whether it has."""
    deadline = time.monotonic() + STOP_SECONDS
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def ask(files: ServerFiles, question: str) -> dict[str, Any]:
    """Returns a server's answer, or {} if it is gone."""
    try:
        return ask_server(files, question)
    except NotWarm:
        return {}


def describe(answer: dict[str, Any]) -> str:
    """Returns a line such as `process 4711, 612 MB, 3 min old, 12 commands served, 1 running`."""
    count = answer["commands"]
    megabytes = answer["memory_bytes"] / 1e6
    return (
        f"process {answer['pid']}, {megabytes:.0f} MB, {format_duration(answer['age_seconds'])} old, "
        f"{count} command{'s' * (count != 1)} served, {answer['running']} running"
    )
