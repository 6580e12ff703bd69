"""The `scaleflow` command: Hydra composes the config, then a job or a sweep runs. `main` returns the exit code.

Modules that only a job needs are imported when it starts. So `--cfg`, `--help` and wrong overrides answer quickly.
"""

import errno
import os
import sys
import time
from collections.abc import Sequence
from functools import partial

import hydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scaleflow import __version__
from scaleflow.commands.completion import LINE, complete_line
from scaleflow.commands.frame import run_command
from scaleflow.commands.hydra_task import HydraTask, JobFailed, compose_once, raise_hydra_errors
from scaleflow.commands.table import (
    check_first_word,
    describe_commands,
    find_command,
    run_named_command,
    translate_file_word,
)
from scaleflow.config.compose import (
    CONF,
    CommandWords,
    check_flags,
    check_overrides,
    explain_error,
    find_own_modules,
    parse_config_dirs,
)
from scaleflow.config.synonyms import translate_words
from scaleflow.config.words import RUN_FLAGS, split_flags, split_overrides
from scaleflow.errors import ConfigError
from scaleflow.interfaces.secret_masking import find_environment_secrets, find_typed_secrets, remember_secrets
from scaleflow.launcher.command_exit import FAILED, Outcome
from scaleflow.launcher.display import end_greeting
from scaleflow.runs.folder_use import FolderRefused

#: Error numbers of a full disk, if the standard output is a file.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None, began: float | None = None) -> int:
    """Runs a named command such as `evaluate`, or else a job or a sweep. Returns the exit code.

    Args:
        argv: the words after `scaleflow`; None: the words in `sys.argv`.
        began: the start of the command, in seconds since the epoch; None: now.

    Returns:
        0 finished, 1 failed, 2 rejected, 130 or 143 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = find_command(words)
    if command:
        words.remove(command.name)  # `--json` may stand before it
        return run_named_command(command, words)
    return run_command(partial(run_words, began=began or time.time()), words)


def run_words(words: list[str], began: float) -> Outcome:
    """Runs a job or a sweep. Raises ConfigError if its words cannot work."""
    if words[:1] in (["-sc"], ["--shell-completion"]) and LINE in os.environ and complete_line():
        return Outcome()
    flags, overrides = split_flags(translate_words(split_overrides(translate_file_word(words)), RUN_FLAGS))
    check_first_word(overrides)
    if "--version" in flags:  # Hydra would print its own version
        print(f"scaleflow {__version__}")
        return Outcome()
    remember_secrets([*find_environment_secrets(), *find_typed_secrets(flags)])
    check_flags(flags)
    command_words = CommandWords(overrides, parse_config_dirs(flags), bool({"-m", "--multirun"} & set(flags))).prepare()
    words = [*flags, *command_words.overrides]  # Hydra's parser accepts no flag between two overrides
    OmegaConf.register_new_resolver("scaleflow.commands", describe_commands, replace=True)  # for the help page
    task = HydraTask(began, f"scaleflow {__version__}")
    app = hydra.main(version_base="1.3", config_path=f"pkg://{CONF}", config_name="config")(task)
    sys.argv = ["scaleflow", *words]
    try:
        if command_words.is_sweep:
            check_overrides(command_words)  # before Hydra creates a folder for the sweep
        with raise_hydra_errors(), compose_once(words), find_own_modules(command_words.config_dirs), task:
            app()
    except JobFailed:
        return task.outcome if task.outcome.code else Outcome(FAILED)  # the job was in another process
    except FolderRefused as refusal:
        raise ConfigError(str(refusal)) from refusal
    except (ConfigError, BrokenPipeError):
        raise  # `run_command` and `end_with` handle them
    except Exception as error:  # Hydra raises arbitrary exceptions for unexpected words
        if isinstance(error, OSError) and error.filename is None and error.errno in FULL_DISK:
            return task.outcome  # the log file is full; the exit code still shows the outcome
        is_from_hydra = isinstance(error, HydraException | OmegaConfBaseException) or not task.has_begun
        if "HYDRA_FULL_ERROR" in os.environ or not is_from_hydra:
            raise  # the user asked for the traceback, or the error is not Hydra's
        raise ConfigError(explain_error(error, command_words)) from error
    finally:
        end_greeting()
    return task.outcome
