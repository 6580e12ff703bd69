"""Uses a program's objects as the data and the model of a run: `scaleflow.run(..., data=frame, model=network)`.

The worker is another process, and a resumed run needs the objects again. So tables, arrays and Keras models are written
to files in the run's folder, whose names contain a hash of the content. pyarrow and NumPy are imported inside the
functions, because only runs with such objects need them.
"""

import functools
import hashlib
import io
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from scaleflow.config.compose import ComposedConfig
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.config import Model
from scaleflow.runs.folder import MAX_LOGGED_BYTES, RunFolder
from scaleflow.runs.objects import KERAS_FILE

TABLE = "scaleflow.dataset.table.Table"
NPZ = "scaleflow.dataset.npz.Npz"

#: The names of the arrays in a tuple.
ARRAYS = ("x", "y", "w")

#: The number of rows in a record batch, which is read at once.
BATCH_ROWS = 65_536


@dataclass(frozen=True)
class ObjectFile:
    """An object that a run reads from a file in its folder."""

    option: tuple[str, str]  # the config group and its option that reads such a file
    target: str  # the `_target_` of that option
    name: str  # the name of the file
    write: Callable[[Path], object]  # writes the file
    more: Mapping[str, str] = field(default_factory=dict)  # more keys of the group, with their values


def plan_data_file(data: Any) -> ObjectFile:
    """Returns the file for `run(data=...)`. Raises ConfigError for an object that is neither a table nor arrays."""
    if isinstance(data, tuple | Mapping):
        arrays = name_arrays(data)
        parts = []
        for name, array in arrays.items():
            parts += [f"{name}{array.dtype}{array.shape}", array]
        digest = hash_parts(parts)
        more = {"weights": "w"} if isinstance(data, tuple) and "w" in arrays else {}
        save = functools.partial(save_arrays, arrays)
        return ObjectFile(("dataset", "npz"), NPZ, f"data-{digest}.npz", write=save, more=more)
    table = to_arrow(data)
    write = functools.partial(write_feather, table)
    return ObjectFile(("dataset", "table"), TABLE, f"data-{hash_table(table)}.feather", write=write)


def name_arrays(data: tuple[Any, ...] | Mapping[Any, Any]) -> dict[str, Any]:
    """Returns arrays by their names in a `dataset=npz` file. Raises ConfigError if they cannot be written there."""
    import numpy as np

    if isinstance(data, tuple) and len(data) not in (2, 3):
        raise ConfigError(f"run(data=...): a tuple of {len(data)}; give (x, y), or (x, y, weights)")
    has_parts = isinstance(data, tuple) and isinstance(data[0], tuple | list)
    if has_parts and any(hasattr(part, "shape") for part in data[0]):
        raise ConfigError(
            "run(data=...): the first part is a tuple of arrays; give splits by name, data={'x_train': x, 'y_train': "
            "y, 'x_val': a, 'y_val': b}, and several inputs by name with dataset.inputs=[NAME, NAME]"
        )
    named = zip(ARRAYS, data, strict=False) if isinstance(data, tuple) else data.items()
    arrays = {str(name): np.asarray(array) for name, array in named}
    for name, array in arrays.items():
        if array.dtype == object:
            raise ConfigError(f"run(data=...): {name} is no array of numbers or texts of one shape; convert it to one")
    return arrays


def save_arrays(arrays: Mapping[str, Any], path: Path) -> None:
    import numpy as np

    np.savez(path, **arrays)


def plan_model_file(model: Any) -> ObjectFile | None:
    """Returns the file for a Keras model; None for any other object.

    Raises ConfigError if the model is compiled, or has no weights.
    """
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(model, keras.Model):
        return None
    if is_compiled(model):
        raise ConfigError(refuse_compiled(model))
    if not model.built:
        raise ConfigError("run(model=...): the model has no weights yet; begin it with keras.Input, or call it once")
    digest = hash_parts((model.to_json(), *model.get_weights()))
    return ObjectFile(("model", "keras_file"), KERAS_FILE, f"model-{digest}.keras", write=model.save)


def is_compiled(model: Any) -> bool:
    """Returns whether an object is a Keras model that the user has compiled. KerasHub compiles its own models."""
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(model, keras.Model):
        return False
    return bool(model.compiled) and not type(model).__module__.startswith("keras_hub.")


def refuse_compiled(model: Any) -> str:
    """Returns why `run` does not take a compiled model: it would train another objective than the user has compiled."""
    parts = [f"the loss {describe_compiled(model.loss)}", f"the optimizer {describe_compiled(model.optimizer)}"]
    return (
        f"run(model=...): the model is compiled with {' and '.join(parts)}, and `run` trains with a loss, metrics and "
        "an optimizer of its own; scaleflow.fit(model, x, y) and `scaleflow train.py` train with what is compiled\n"
        "to train with those of `run`, leave out model.compile(...) and write words such as objective.loss=mse and "
        "optimizer=adam"
    )


def describe_compiled(part: Any) -> str:
    """Returns the name of a compiled loss or optimizer, or of several losses in their structure."""
    if part is None or isinstance(part, str):
        return str(part)
    if isinstance(part, Mapping):
        return f"{{{', '.join(f'{name}: {describe_compiled(inner)}' for name, inner in part.items())}}}"
    if isinstance(part, list | tuple):
        return f"[{', '.join(describe_compiled(inner) for inner in part)}]"
    return str(getattr(part, "__name__", type(part).__name__))


def use_function(composed: ComposedConfig, model: Any) -> ComposedConfig:
    """Returns the config of a run whose model is built by a function. It keeps the keys that all models share.

    Raises ConfigError if the worker, another process, could not import the function.
    """
    is_partial = isinstance(model, functools.partial)
    function, arguments = (model.func, model.keywords) if is_partial else (model, {})
    path = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', '<none>')}"
    if not callable(function) or "<" in path or (is_partial and model.args):
        raise ConfigError(
            f"run(model={type(model).__name__}): expected a Keras model, or a function of a module that builds one, or "
            "functools.partial of it with arguments by name"
        )
    shared = {field.name for field in fields(Model)}
    kept = {key: value for key, value in composed.raw["model"].items() if key in shared}
    changed = composed.set({"model": {"_target_": path, **arguments, **kept}})
    return replace(changed, choices={**composed.choices, "model": function.__name__})


def keep_model_file(plan: Plan, files: RunFolder) -> None:
    """Copies a run's initial Keras file into its folder, unless the file is already there or too large.

    Raises ConfigError if it cannot be copied.
    """
    path = Path(str(plan.model.target.arguments.get("path")))
    if plan.model.target.path != KERAS_FILE or not path.is_file() or path.parent == files.path:
        return
    if path.stat().st_size > MAX_LOGGED_BYTES:
        return
    target = files.source_model(path.suffix)
    try:
        shutil.copyfile(path, target)
    except OSError as error:
        raise ConfigError(f"model.path={path}: cannot be copied to {target}: {error.strerror}") from error


def list_size_notes(files: RunFolder) -> list[str]:
    """Returns notes on files that are too large to be logged with the run."""
    notes = []
    for path in files.list_objects():
        size = path.stat().st_size
        if size > MAX_LOGGED_BYTES:
            notes.append(
                f"note: {path.name} has {size / 2**30:.1f} GiB, more than 1 GiB, so it is not logged with the run; "
                "rerun and evaluate need it in the run's folder"
            )
    return notes


def hash_parts(parts: Any) -> str:
    """Returns 16 hexadecimal digits, a hash of texts and arrays."""
    import numpy as np

    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def add_options(words: Sequence[str], files: Sequence[ObjectFile]) -> list[str]:
    """Returns the words of a run, with the options that read the files unless other options are typed."""
    typed = {word.partition("=")[0] for word in words}
    if "resume" in typed:
        return list(words)
    return [*(f"{file.option[0]}={file.option[1]}" for file in files if file.option[0] not in typed), *words]


def place_file(composed: ComposedConfig, file: ObjectFile) -> tuple[ComposedConfig, Path]:
    """Returns the config of a run that reads a file in its folder, and the path of the file.

    Raises ConfigError if the config already names something else.
    """
    group, option = file.option
    argument, key = ("data", "data_dir") if group == "dataset" else ("model", "path")
    said = f"run({argument}=...)"
    section = composed.config.get(group) or OmegaConf.create({})
    if composed.config.get("resume"):
        raise ConfigError(f"{said}: a resumed run reads what is in its folder; leave out {argument}")
    if section.get("_target_") != file.target:
        raise ConfigError(f"{said}: the {group} is {section.get('_target_')}; add {group}={option}")
    if not OmegaConf.is_missing(section, key):
        raise ConfigError(f"{said}: there is also {group}.{key}={section[key]}; leave out one of the two")
    path = composed.folder.absolute() / file.name
    return composed.set({f"{group}.{name}": value for name, value in {**file.more, key: str(path)}.items()}), path


def to_arrow(data: Any) -> Any:
    """Converts a pandas DataFrame, without its index, to a `pyarrow.Table`. A `pyarrow.Table` is returned unchanged.

    Raises ConfigError for other types, and for columns whose values have no common type.
    """
    import pyarrow

    if isinstance(data, pyarrow.Table):
        return data
    module = type(data).__module__
    name = type(data).__qualname__
    if name != "DataFrame" or module.partition(".")[0] != "pandas":
        raise ConfigError(f"run(data={name}): expected a pandas DataFrame or a pyarrow Table; convert it to one")
    other = next((column for column in data.columns if not isinstance(column, str)), None)
    if other:
        raise ConfigError(f"run(data=DataFrame): the column {other!r} needs a name that is a string; rename it")
    try:
        return pyarrow.Table.from_pandas(data, preserve_index=False)
    except pyarrow.ArrowException as error:
        raise ConfigError(
            f"run(data=DataFrame): a column has values of several types: {'; '.join(map(str, error.args))}; give it "
            "one type, or drop it"
        ) from error


def write_feather(table: Any, path: Path) -> None:
    """Writes a table as a Feather file in batches."""
    import pyarrow

    try:
        with pyarrow.OSFile(str(path), "wb") as file:
            write_batches(table, pyarrow.ipc.new_file(file, table.schema))
    except OSError as error:
        raise ConfigError(f"run(data=...): the table cannot be written to {path}: {error}") from error


def write_batches(table: Any, writer: Any) -> None:
    with writer:
        writer.write_table(table.unify_dictionaries(), max_chunksize=BATCH_ROWS)


class HashFile(io.RawIOBase):
    """A file that only hashes the written content."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=8)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)


def hash_table(table: Any) -> str:
    """Returns 16 hexadecimal digits, a hash of the names, types and values of a table."""
    import pyarrow

    file = HashFile()
    plain = table.replace_schema_metadata(None).combine_chunks()
    write_batches(plain, pyarrow.ipc.new_stream(pyarrow.PythonFile(file, "w"), plain.schema))
    return file.digest.hexdigest()
