"""The process of a stage: runs a scaleflow command or a function of the user's. It ends with the pipeline's process.

    python -m scaleflow.features.pipelines.stage_process PARENT_PID WORD ... --json

The words are those after `scaleflow`. `python TARGET ARGUMENTS RESULT DIR ...` calls a function with arguments given as
JSON and writes its return value as JSON to the file RESULT. Its module is in the current folder, in a DIR, or
installed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scaleflow.launcher.command_exit import Outcome


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports ends it without a traceback
    from scaleflow.__main__ import entry
    from scaleflow.interfaces.parent_process import end_with_parent
    from scaleflow.launcher.command_exit import TERMINATED

    parent, *words = sys.argv[1:]
    end_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # the parent ended before this process could watch it
        sys.exit(TERMINATED)
    sys.argv = ["scaleflow", *words]
    sys.orig_argv = [sys.executable, "-m", "scaleflow", *words]  # the command that a run records
    if words[0] != "python":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        entry()  # imports little, so that a warm server can take over
    from scaleflow.commands.frame import run_command
    from scaleflow.commands.process import end_with

    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with(lambda: run_command(call_function, words[1:]))


def call_function(words: list[str]) -> Outcome:
    """Calls the user's function. If it raises, the process ends with a traceback and exit code 1."""
    from hydra.utils import get_object

    from scaleflow.errors import ConfigError, RunError
    from scaleflow.launcher.command_exit import Outcome
    from scaleflow.runs.folder import replace_text

    target, arguments, result, *config_dirs = words
    sys.path[1:1] = config_dirs  # after the current folder
    try:
        function = get_object(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"target: {target}: cannot be imported: {error}") from error
    keywords = json.loads(arguments)
    if not isinstance(keywords, dict):  # returned by another stage
        raise ConfigError(f"arguments: {keywords}: expected {{NAME: VALUE}}")
    returned = function(**keywords)
    try:
        text = json.dumps(returned, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RunError(
            f"target: {target}: returned a {type(returned).__name__}, which JSON cannot hold ({error}); return texts, "
            "numbers, lists and dicts of them, or nothing"
        ) from error
    replace_text(Path(result), text)
    return Outcome()


if __name__ == "__main__":
    main()
