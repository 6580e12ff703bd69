"""Finds the config keys that name a file with a program's data or model, or the run's initial Keras file.

The run's folder and the store have copies of these files, so later commands work after the original is gone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleflow.runs.folder import RunFolder, is_object_file

KERAS_FILE = "scaleflow.model.keras_file.build"


@dataclass(frozen=True)
class ObjectKey:
    """A key of a config that names such a file."""

    section: str
    key: str
    value: str  # the path in the config
    name: str  # the name of the copy in the run's folder, and among the artifacts of the run

    @property
    def path(self) -> str:
        """The key with its section, such as `model.path`."""
        return f"{self.section}.{self.key}"


def list_object_keys(config: Mapping[str, Any]) -> Iterator[ObjectKey]:
    """Yields the config keys that name files copied into the run's folder."""
    for section, key in (("dataset", "data_dir"), ("model", "path")):
        options = config.get(section)
        value = options.get(key) if isinstance(options, Mapping) else None
        if not isinstance(options, Mapping) or not isinstance(value, str) or "://" in value or "${" in value:
            continue
        path = Path(value)
        if is_object_file(path.name):
            yield ObjectKey(section, key, value, name=path.name)
        elif options.get("_target_") == KERAS_FILE and path.suffix:
            yield ObjectKey(section, key, value, name=RunFolder(path.parent).source_model(path.suffix).name)
