"""Finds variables of the environment that a script sets too late.

A worker has imported TensorFlow and Keras before the script begins. With `python train.py`, a script can set variables
before its own import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from scaleflow.features.script.interruptions import ScriptRefused
from scaleflow.interfaces.events import Emit, Note

#: Variables that TensorFlow, Keras or their libraries read when they are imported.
READ_AT_IMPORT = re.compile(r"(TF|XLA|CUDA|KERAS|OMP|MKL|NVIDIA|NCCL|TPU)_\w+")

#: The variable with the library that Keras computes with.
BACKEND = "KERAS_BACKEND"

#: Variables that only change what TensorFlow prints.
ABOUT_LOGS = ("TF_CPP_MIN_LOG_LEVEL", "TF_CPP_MAX_VLOG_LEVEL", "TF_CPP_VMODULE")


class EnvironmentCheck:
    """Compares the environment with the one in which the script began."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._before = read_variables(os.environ)
        self._is_done = False

    def run(self) -> None:
        """Reports, once, which variables the script has set without effect. Call it when the script trains.

        Raises ScriptRefused if the script asks for another library than TensorFlow.
        """
        if self._is_done:
            return
        self._is_done = True
        now = read_variables(os.environ)
        backend = now.get(BACKEND, "tensorflow")
        if backend != "tensorflow":
            raise ScriptRefused(f"{BACKEND}={backend}: the script sets it, and scaleflow runs TensorFlow only")
        changed = [name for name, value in now.items() if self._before.get(name) != value and name not in ABOUT_LOGS]
        if changed:
            self._emit(
                Note(
                    f"the script sets {', '.join(sorted(changed))} after TensorFlow is imported, which may have no "
                    "effect; set it in the shell, before the command"
                )
            )


def read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if READ_AT_IMPORT.fullmatch(name)}
