"""Defines export formats and finds the formats of `export.formats`.

A format is an object in the tuple `FORMATS` of a module in `runtimes/`.
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

#: Folder of the formats, next to the SavedModel of an exported model.
FOLDER = "formats"

#: Computes outputs by name from inputs by name, [b, ...] each.
Compute = Callable[[Mapping[str, "Array"]], Mapping[str, "Array"]]


@dataclass(frozen=True)
class PortableModel:
    """A SavedModel for converters. Its signature `portable` has one tensor per argument and output."""

    folder: Path
    function: Any  # concrete function of the signature
    specs: Mapping[str, Any]  # specs of the arguments, by name


#: Yields examples of the training split, [1, ...] each, by argument name.
Calibration = Callable[[], Iterator[Mapping[str, "Array"]]]


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """A format of a trained model, and the runtime that checks it.

    Attributes:
        file: name of its (main) file, in its folder.
        extra: the extra of scaleflow that installs `modules`.
        convert: writes the file, in a process with TensorFlow; None: each export already has the file.
        open: loads the file in its runtime with one thread, in a separate process. Raises the runtime's own errors.
        unsupported: pattern of the converter's or runtime's message about operations that it cannot express, with a
            group for their names.
        is_quantized: whether outputs may differ. Then metrics are compared instead.
        takes_raw: whether it takes the same inputs as the SavedModel. Otherwise the caller preprocesses texts.
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
        """Returns the path of the format's file in the folder of an exported model."""
        return exported / self.file if self.convert is None else exported / FOLDER / self.name / self.file

    def find_unsupported(self, text: str) -> Sequence[str]:
        """Returns the names of the unsupported operations in an error of the converter or the runtime."""
        names: set[str] = set()
        for match in re.finditer(self.unsupported, text):
            listed = match[match.lastindex or 0].split(",")
            names |= {name.strip() for name in listed}
        return sorted(names)


@functools.cache
def list_formats() -> Mapping[str, ExportFormat]:
    """Returns the formats in the modules of `runtimes/`, by name."""
    formats = {}
    for entry in pkgutil.iter_modules(runtimes.__path__):
        module = import_module(f"{runtimes.__name__}.{entry.name}")
        for form in getattr(module, "FORMATS", ()):
            formats[form.name] = form
    return formats


def check_plan(plan: Plan) -> None:
    """Checks `export.formats` of a plan as `check_formats` does."""
    check_formats(plan.of(ExportOptions).formats)


def check_formats(names: Sequence[str] | None) -> None:
    """Raises ConfigError if a format of `export.formats` does not exist, is repeated, or lacks a package."""
    known = list_formats()
    for n, name in enumerate(names or ()):
        if name not in known:
            similar = find_similar(name, known)
            hint = f"; did you mean {similar}?" if similar else ""
            raise ConfigError(f"export.formats: there is no format {name}{hint} ({', '.join(known)})")
        if name in (names or ())[:n]:
            raise ConfigError(f"export.formats: {name} is there twice; leave one of them out")
        missing = [module for module in known[name].modules if importlib.util.find_spec(module) is None]
        if missing:
            raise ConfigError(
                f"export.formats: {name} needs {' and '.join(missing)}, which is not installed; pip install "
                f"'scaleflow[{known[name].extra}]', or leave {name} out"
            )
