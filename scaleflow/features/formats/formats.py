"""Defines what an export format is, and finds the formats of `export.formats`.

A format is an object in the tuple `FORMATS` of a module of `runtimes/`.
"""

from __future__ import annotations

import functools
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ConfigError, find_similar
from scaleflow.features.formats import runtimes
from scaleflow.features.formats.feature import ExportOptions
from scaleflow.interfaces import Plan

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

#: The folder of the formats beside the SavedModel of an exported model.
FOLDER = "formats"

#: Computes outputs by name from inputs by name, [b, ...] each.
Compute = Callable[[Mapping[str, "Array"]], Mapping[str, "Array"]]


@dataclass(frozen=True)
class PortableModel:
    """A SavedModel for converters: its signature `portable` has one tensor for each argument and each output."""

    folder: Path
    function: Any  # the concrete function of its signature
    specs: Mapping[str, Any]  # of the arguments, by their names


#: Yields examples of the training split, by the names of the arguments: [1, ...] each.
Calibration = Callable[[], Iterator[Mapping[str, "Array"]]]


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """A format of a trained model, and the runtime that proves it.

    Attributes:
        file: the name of its file, or of its main file, in its folder.
        extra: of scaleflow's packages, with these modules.
        convert: writes the file, in a process with TensorFlow; None: it is there already, beside the SavedModel.
        open: loads the file in its runtime, with one thread, in a process of its own; raises what the runtime raises.
        unsupported: the pattern of what its converter or its runtime writes of operations that it cannot express, with
            a group for their names.
        is_quantized: whether its outputs may differ; its metric counts instead.
        takes_raw: whether it takes what the SavedModel takes; otherwise its texts are preprocessed elsewhere.
    """

    name: str
    file: str
    modules: Sequence[str] = ()
    extra: str = ""
    convert: Callable[[PortableModel, Path, Calibration], None] | None = None
    open: Callable[[Path], Compute]
    unsupported: str = "(?!)"
    is_quantized: bool = False
    takes_raw: bool = False

    def locate(self, exported: Path) -> Path:
        """Returns the path of the file in the folder of an exported model."""
        return exported / self.file if self.convert is None else exported / FOLDER / self.name / self.file

    def find_unsupported(self, text: str) -> Sequence[str]:
        """Returns the names of the operations that an error of the converter or of the runtime is about."""
        found = re.finditer(self.unsupported, text)
        return sorted({name.strip() for match in found for name in match[match.lastindex or 0].split(",")})


@functools.cache
def list_formats() -> Mapping[str, ExportFormat]:
    """Returns the formats in the modules of `runtimes/` by their names."""
    modules = [import_module(f"{runtimes.__name__}.{each.name}") for each in pkgutil.iter_modules(runtimes.__path__)]
    return {each.name: each for module in modules for each in getattr(module, "FORMATS", ())}


def check_plan(plan: Plan) -> None:
    """Raises ConfigError if a format of a plan does not exist, is there twice, or cannot be made here."""
    check_formats(plan.of(ExportOptions).formats)


def check_formats(names: Sequence[str] | None) -> None:
    """Raises ConfigError if a format of `export.formats` does not exist, is there twice, or cannot be made here."""
    known = list_formats()
    for n, name in enumerate(names or ()):
        if name not in known:
            similar = find_similar(name, known)
            hint = f"; did you mean {similar}?" if similar else ""
            raise ConfigError(f"export.formats: there is no format {name}{hint} ({', '.join(known)})")
        if name in (names or ())[:n]:
            raise ConfigError(f"export.formats: {name} is there twice; leave one of them out")
        if missing := [module for module in known[name].modules if importlib.util.find_spec(module) is None]:
            raise ConfigError(
                f"export.formats: {name} needs {' and '.join(missing)}, which is not installed; pip install "
                f"'scaleflow[{known[name].extra}]', or leave {name} out"
            )
