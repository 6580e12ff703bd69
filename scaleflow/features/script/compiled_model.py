"""Plans `scaleflow.run(model=..., data=...)` with a compiled Keras model: Keras trains it in a worker, as compiled.

The model travels in a Keras file, which has what it is compiled with, and the data in an npz file. A script
(`compiled/train_compiled.py`) reads both and calls `fit`. What such files cannot hold exactly is refused.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleflow.config.words import make_override
from scaleflow.errors import ConfigError
from scaleflow.features.script.words import read_key, translate_word
from scaleflow.interfaces.features import CompiledTraining
from scaleflow.launcher.objects import hash_parts

#: The script that trains the model.
SCRIPT = Path(__file__).parent / "compiled" / "train_compiled.py"

#: Groups of words that mean the same as in other runs.
SHARED_GROUPS = ("strategy", "hardware", "tracking", "hydra", "fit")

#: Words of other runs, and what they are here.
OTHER_WORDS = {"training.epochs": "fit.epochs", "epochs": "fit.epochs", "seed": "script.SEED"}

#: The way out, at the end of each refusal.
INSTEAD = "; scaleflow.fit(model, x, y) trains it in this process"

#: The arguments of `fit` by the name of the data's part.
PARTS = {
    "x": "x",
    "y": "y",
    "weights": "sample_weight",
    "x_train": "x",
    "y_train": "y",
    "w_train": "sample_weight",
}
VALIDATION_PARTS = ("x_val", "y_val", "w_val")

#: The name of the structure of the arguments in the npz file.
STRUCTURE = "structure"

#: Names in this structure of values that Keras does not always load from a file: of the random generators, such as
#: those of Dropout, and of an optimizer that has trained.
RANDOM_STATES = "random_states"
OPTIMIZER_STATES = "optimizer_states"

#: Methods that only a model's own class, or the user, replaces.
TRAINING_METHODS = ("train_step", "test_step", "compute_loss", "compute_metrics", "fit", "make_train_function")


def plan_compiled(model: Any, data: Any, words: Sequence[str]) -> CompiledTraining:
    """Plans the training of a compiled model.

    Args:
        model: the compiled Keras model.
        data: (x, y), (x, y, sample_weight), or parts by name: x_train, y_train, w_train, x_val, y_val, w_val. Each part
            is an array, or a list or dict of arrays.
        words: the words of the run, as the user typed them.

    Raises:
        ConfigError: if a file cannot hold the model or the data exactly, or if a word cannot apply.
    """
    check_model(model)
    leaves: list[Any] = []
    structure = {name: number_leaves(part, name, leaves) for name, part in read_arguments(data).items()}
    translated = [make_override("script.path", SCRIPT)]
    for word in words:
        translated.append(translate(word))
    if any(read_key(word).partition(".")[0] == "strategy" for word in words):
        translated.append("script.typed=[strategy]")
    structure[RANDOM_STATES] = number_states(list_random_states(model), leaves)
    if model.optimizer.built:
        structure[OPTIMIZER_STATES] = number_states(model.optimizer.variables, leaves)
    content = json.dumps(structure)
    described = [f"{leaf.dtype}{leaf.shape}" for leaf in leaves]
    data_digest = hash_parts([content, *described, *leaves])
    model_digest = hash_parts([model.to_json(), json.dumps(model.get_compile_config()), *model.get_weights()])
    files = {
        f"model-{model_digest}.keras": model.save,
        f"data-{data_digest}.npz": functools.partial(save_arguments, content, leaves),
    }
    return CompiledTraining(translated, files, key="script.arguments")


def translate(word: str) -> str:
    """Returns a word of the user as Hydra gets it. Raises ConfigError if it cannot apply."""
    key = read_key(word)
    value = word.partition("=")[2]
    if key in OTHER_WORDS:
        word = f"{OTHER_WORDS[key]}={value}"
    elif key.partition(".")[0] not in SHARED_GROUPS and key != "optimizer.learning_rate":
        raise ConfigError(
            f"{word}: the model is compiled, so Keras trains it with its own loss, metrics and optimizer, and with "
            f"fit.NAME=VALUE, such as fit.batch_size=64; leave {key} out, or leave out model.compile(...)"
        )
    return translate_word(word, "the compiled model")


def check_model(model: Any) -> None:
    """Raises ConfigError if a Keras file cannot hold the model, and all that it is compiled with."""
    kind = type(model)
    if not kind.__module__.startswith("keras."):
        raise ConfigError(f"run(model={kind.__name__}): another process cannot load your own class of a model{INSTEAD}")
    for name in TRAINING_METHODS:
        if name in vars(model):
            raise ConfigError(f"run(model=...): the model has its own {name}, which another process lacks{INSTEAD}")
    if not model.built:
        raise ConfigError("run(model=...): the model has no weights yet; begin it with keras.Input, or call it once")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns of lambdas, which are refused below
            parts = [json.loads(model.to_json()), json.loads(json.dumps(model.get_compile_config()))]
    except Exception as error:  # a part of the user's may raise anything
        raise ConfigError(
            f"run(model=...): Keras cannot write what the model consists of: {type(error).__name__}: {error}{INSTEAD}"
        ) from error
    for name in list_own_parts(parts):
        raise ConfigError(f"run(model=...): another process cannot load {name}, which is your own code{INSTEAD}")
    for part, lost in find_lost_values(model):
        raise ConfigError(f"run(model=...): a Keras file of this version lacks {lost} of {part}{INSTEAD}")


def find_lost_values(model: Any) -> Iterator[tuple[str, str]]:
    """Yields the compiled losses and metrics that Keras does not load as they were, such as `Huber(delta=2.0)` in some
    versions, each with a value that it loses.
    """
    for part in list_compiled_parts([model.loss, model.metrics], set()):
        kind = type(part)
        if kind.__module__.endswith("compile_utils"):  # Keras's own containers of the compiled parts
            continue
        loaded = vars(kind.from_config(part.get_config()))
        for name, value in vars(part).items():
            if "built" not in name and "name" not in name and is_plain(value) and loaded.get(name) != value:
                yield kind.__name__, f"{name.lstrip('_')}={value}"


def list_compiled_parts(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the losses and metrics in a structure, and in each other."""
    import keras

    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, keras.losses.Loss | keras.metrics.Metric):
        yield value
        yield from list_compiled_parts(vars(value), seen)
    elif isinstance(value, Mapping):
        for each in list(value.values()):
            yield from list_compiled_parts(each, seen)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from list_compiled_parts(each, seen)


def is_plain(value: Any) -> bool:
    """Returns whether a value is a number, text or None, or a dict, list or tuple of these."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, int | float | str)


def list_own_parts(config: Any) -> Iterator[str]:
    """Yields the names of the parts of a serialized model that are not Keras's own."""
    if isinstance(config, Mapping):
        name = config.get("class_name")
        module = config.get("module")
        if name == "__lambda__":
            yield "a lambda"
        elif name is not None and "config" in config and not str(name).startswith("__"):
            function = config["config"]
            if str(module).partition(".")[0] != "keras":
                yield str(function if name == "function" and isinstance(function, str) else name)
        for value in config.values():
            yield from list_own_parts(value)
    elif isinstance(config, list):
        for value in config:
            yield from list_own_parts(value)


def read_arguments(data: Any) -> dict[str, Any]:
    """Returns the data as arguments of `fit`: x, y, sample_weight, validation_data. Raises ConfigError for others."""
    expected = "give (x, y), (x, y, sample_weight) or {'x_train': x, 'y_train': y, 'x_val': a, 'y_val': b}"
    if isinstance(data, tuple) and len(data) in (2, 3):
        return {name: part for name, part in zip(("x", "y", "sample_weight"), data, strict=False) if part is not None}
    if not isinstance(data, Mapping):
        raise ConfigError(f"run(data={type(data).__name__}) with a compiled model: {expected}{INSTEAD}")
    arguments: dict[str, Any] = {}
    validation = [data[name] for name in VALIDATION_PARTS if name in data]
    for name, part in data.items():
        if name in PARTS:
            arguments[PARTS[name]] = part
        elif name not in VALIDATION_PARTS:
            raise ConfigError(f"run(data=...): {name!r} is no argument of a compiled model's fit; {expected}")
    if "x" not in arguments or "y" not in arguments or (validation and not {"x_val", "y_val"} <= set(data)):
        raise ConfigError(f"run(data=...): {', '.join(map(str, data))}: parts are missing; {expected}")
    if validation:
        arguments["validation_data"] = validation
    return arguments


def number_leaves(part: Any, name: str, leaves: list[Any]) -> Any:
    """Returns the structure of an argument, with a number in place of each array, and adds the arrays to `leaves`.

    Raises ConfigError for a leaf that is no array of numbers or texts.
    """
    import numpy as np

    if isinstance(part, Mapping):
        return {str(key): number_leaves(value, f"{name}[{key!r}]", leaves) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [number_leaves(value, f"{name}[{place}]", leaves) for place, value in enumerate(part)]
    is_tensor = hasattr(part, "numpy") and hasattr(part, "shape")
    array = part.numpy() if is_tensor else part
    if not isinstance(array, np.ndarray) or array.dtype == object:
        raise ConfigError(
            f"run(data=...): {name} is a {type(part).__name__}; a compiled model needs NumPy arrays of numbers or "
            f"texts{INSTEAD}"
        )
    leaves.append(array)
    return len(leaves) - 1


def list_random_states(model: Any) -> list[Any]:
    """Returns the variables of a model's random generators."""
    return [variable for variable in model.variables if variable.path.endswith("seed_generator_state")]


def number_states(variables: Sequence[Any], leaves: list[Any]) -> Any:
    """Returns the numbers of the values of variables, and adds these values to `leaves`."""
    import numpy as np

    return [number_leaves(np.asarray(variable.numpy()), variable.path, leaves) for variable in variables]


def set_states(variables: Sequence[Any], states: Sequence[Any]) -> None:
    for variable, state in zip(variables, states, strict=True):
        variable.assign(state)


def save_arguments(structure: str, leaves: Sequence[Any], path: Path) -> None:
    """Writes the arguments of `fit` to an npz file."""
    import numpy as np

    arrays = {f"array_{number}": leaf for number, leaf in enumerate(leaves)}
    np.savez(path, **{STRUCTURE: np.array(structure), **arrays})


def load_fit_arguments(path: str, model: Any) -> dict[str, Any]:
    """Reads the arguments of `fit` from an npz file, and sets the states of a loaded model to those in the file."""
    import numpy as np

    with np.load(path) as file:
        structure = json.loads(str(file[STRUCTURE]))
        arrays = {name: file[name] for name in file.files if name != STRUCTURE}
    arguments = {name: place_leaves(part, arrays) for name, part in structure.items()}
    set_states(list_random_states(model), arguments.pop(RANDOM_STATES))
    if OPTIMIZER_STATES in arguments:
        set_states(model.optimizer.variables, arguments.pop(OPTIMIZER_STATES))
    if "validation_data" in arguments:
        arguments["validation_data"] = tuple(arguments["validation_data"])
    return arguments


def place_leaves(part: Any, arrays: Mapping[str, Any]) -> Any:
    """Returns a structure with the arrays in place of their numbers."""
    if isinstance(part, dict):
        return {key: place_leaves(value, arrays) for key, value in part.items()}
    if isinstance(part, list):
        return [place_leaves(value, arrays) for value in part]
    return arrays[f"array_{part}"]
