"""Writes and reads `learned_state.json`, the record of what a run learned from its data.

The run's folder, each checkpoint and each exported model contain the file. Long lists of numbers are stored in
`learned_state.npz` next to it; in the JSON, `{"array": NAME}` replaces each of them.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import LEARNED_ARRAYS, LEARNED_STATE, LearnedState
from scaleflow.interfaces.secret_masking import mask_secrets

#: Longer lists of numbers are stored as arrays.
MAX_NUMBERS = 1000

#: The key of the reference to an array.
ARRAY = "array"


def to_files(state: LearnedState) -> dict[str, bytes]:
    """Returns the contents of the record's files by file name."""
    arrays: dict[str, Any] = {}
    record = take_arrays(mask_options(state.to_json()), arrays)
    files = {LEARNED_STATE: json.dumps(record, indent=1).encode()}
    if arrays:
        import numpy as np

        content = io.BytesIO()
        np.savez(content, **arrays)
        files[LEARNED_ARRAYS] = content.getvalue()
    return files


def mask_options(record: dict[str, Any]) -> dict[str, Any]:
    """Masks secrets in values from the config. Learned values stay unchanged, because weights depend on them."""
    preprocessing = {}
    for name, step in record["preprocessing"].items():
        preprocessing[name] = {**step, "options": mask_secrets(step["options"])}
    reading = {}
    for key, value in record["reading"].items():
        reading[key] = value if key == "learned" else mask_secrets(value, key)
    return {**record, "preprocessing": preprocessing, "reading": reading}


def write_learned_state(folder: Path, state: LearnedState) -> None:
    """Writes the record into a folder. Raises OSError if it cannot be written."""
    for name, content in to_files(state).items():
        (folder / name).write_bytes(content)


def find_learned_state(folder: Path) -> LearnedState | None:
    """Reads the record in a folder that scaleflow may not have written; None if there is no record.

    Raises ConfigError if the record cannot be read.
    """
    if not (folder / LEARNED_STATE).is_file():
        return None
    return read_learned_state(folder)


def read_learned_state(folder: Path) -> LearnedState:
    """Reads the record in a folder. Raises ConfigError if it cannot be read."""
    path = folder / LEARNED_STATE
    try:
        record = json.loads(path.read_bytes())
        return LearnedState.from_json(put_arrays(record, read_arrays(folder / LEARNED_ARRAYS)))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: this record of what a run learned cannot be read: {error}") from error


def read_arrays(path: Path) -> dict[str, Any]:
    """Reads the arrays next to a record, as lists by name; empty without the file."""
    if not path.is_file():
        return {}
    import numpy as np

    with np.load(path, allow_pickle=False) as arrays:
        return {name: values.tolist() for name, values in arrays.items()}


def take_arrays(value: Any, arrays: dict[str, Any]) -> Any:
    """Returns a JSON value with references to arrays instead of long lists of numbers. Adds the lists to `arrays`."""
    if isinstance(value, Mapping):
        return {key: take_arrays(item, arrays) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        return value
    is_long = len(value) > MAX_NUMBERS
    if is_long and all(type(item) is float for item in value):
        name = str(len(arrays))
        arrays[name] = value
        return {ARRAY: name}
    return [take_arrays(item, arrays) for item in value]


def put_arrays(value: Any, arrays: Mapping[str, Any]) -> Any:
    """Returns a JSON value with the arrays instead of their references."""
    if isinstance(value, Mapping):
        if list(value) == [ARRAY] and isinstance(value[ARRAY], str):
            return arrays[value[ARRAY]]
        return {key: put_arrays(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [put_arrays(item, arrays) for item in value]
    return value
