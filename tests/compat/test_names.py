"""Each private name that `compat` uses exists in the installed libraries. A failure says what the name is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scaleflow import compat
from scaleflow.interfaces.versions import to_series
from tests.test_architecture import PUBLIC, is_private

FILES = {path.stem: path for path in Path(*compat.__path__).glob("[a-z]*.py")}

#: The distribution of a module of `compat`, where its name is another one.
DISTRIBUTIONS = {"hydra": "hydra-core"}

#: Attribute -> an expression for what has it; several where it is one of several things.
OWNERS = {
    "keras": {
        "_flatten_layers _get_own_losses _get_call_context _untrack_variable": "keras.layers.Layer",
        "_convert_input_args _losses": "keras.layers.Layer()",
        "_trainable": "keras.layers.Layer(), keras.Variable([0.0])",
        "_trainable_variables": "keras.layers.Layer(), keras.optimizers.Adam()",
        "_functional": "keras.Sequential()",
        "_nodes_by_depth _standardize_inputs": "MODEL",
        "_keras_history": "TENSOR",
        "_inbound_nodes": "TENSOR._keras_history.operation",
        "_kernel": "build(keras.layers.Dense(1)), build(keras.layers.EinsumDense('ab,bc->ac', 1))",
        "_embeddings": "build(keras.layers.Embedding(2, 1))",
        "_default_save_signature": "keras.Model",
        "_value _initialize _maybe_autocast": "keras.Variable([0.0])",
        "_apply_weight_decay _update_model_variables_moving_average": "keras.optimizers.Adam()",
        "_all_reduce_sum_gradients _distribution_strategy _get_variable_index": "keras.optimizers.Adam()",
        "_learning_rate _iterations": "keras.optimizers.Adam()",
        "_stateful_handle_finite_grads": "keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())",
        "_use_weight_decay _overwrite_variable_with_gradient": "keras.optimizers.Adam()",
        "_should_use_adamw": "keras.optimizers.Muon()",
        "_momentums _velocities": "build(keras.optimizers.Adam())",
        "_accumulators": "build(keras.optimizers.Adagrad())",
        "_model_variables_moving_average": "build(keras.optimizers.Adam(use_ema=True))",
        "_direction": "keras.metrics.BinaryAccuracy()",
        "_set_monitor_op": "keras.callbacks.EarlyStopping()",
        "_loss_tracker _compile_loss _compile_metrics _distribute_strategy": "compile(MODEL)",
        "_maybe_symbolic_build _symbolic_build": "MODEL",
        "_clip_gradients": "keras.optimizers.Adam()",
        "_initial_epoch": "MODEL",
        "__internal__": "tf",
    },
    "tensorflow": {
        "_initialized": "import_module('tensorflow.python.eager.context').context()",
        "_rng": "seeded_context()",
        "_get_function": "tf.Graph()",
        "_primary": "mirrored()",
        "_distributed_container": "mirrored().values[0].handle",
    },
    "hydra": {
        "_apply_overrides_to_config": "import_module('hydra._internal.config_loader_impl').ConfigLoaderImpl",
        "_return_value": "import_module('hydra.core.utils').JobReturn",
        "_initialize": "import_module('hydra.core.plugins').Plugins",
    },
    "optuna": {"_trial_id": "import_module('optuna').trial.create_trial(value=1.0)"},
    "python": {"_actions": "import_module('argparse').ArgumentParser()"},
}

#: Names that older versions lack, with a version that has them. What needs them is refused there (`pipeline`, Muon).
SINCE = {"_should_use_adamw": "3.12", "_overwrite_variable_with_gradient": "3.12"}


def list_names(library: str) -> Iterator[tuple[str, str]]:
    """Yields (a private name in a module of `compat`, the sentence that says what it is for)."""
    source = FILES[library].read_text()
    lines = source.splitlines()
    for statement in ast.parse(source).body:
        sentence = find_sentence(statement, lines)
        for node in ast.walk(statement):
            for name in list_mentioned(node):
                if is_private(name) and name not in PUBLIC:
                    yield name, sentence


def find_sentence(statement: ast.stmt, lines: list[str]) -> str:
    """Returns the first line of a function, the comment above an assignment, or the one after an import."""
    if isinstance(statement, ast.FunctionDef):
        return f"{statement.name}: {str(ast.get_docstring(statement)).splitlines()[0]}"
    above = []
    while isinstance(statement, ast.Assign) and lines[statement.lineno - 2 - len(above)].startswith("#:"):
        above.insert(0, lines[statement.lineno - 2 - len(above)][3:])
    after = re.sub(r".*(import .*)", r"\1", lines[statement.lineno - 1])
    return " ".join(above) or after


def list_mentioned(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [f"{getattr(node, 'module', '')}.{each.name}" for each in node.names]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    is_name = isinstance(node, ast.Constant) and re.fullmatch(r"_[a-z]\w+", str(node.value))
    return [str(node.value)] if isinstance(node, ast.Constant) and is_name else []


def find_missing(names: list[tuple[str, str, str]]) -> list[str]:
    """Returns the sentences of (owner, name, sentence) whose owner has no such name; run it in a process of its own."""
    import keras
    import tensorflow as tf

    def build(part: Any) -> Any:
        part.build([keras.Variable([0.0])] if isinstance(part, keras.optimizers.Optimizer) else (1, 1))
        return part

    def compile(model: Any) -> Any:
        model.compile(loss="mse")
        return model

    def mirrored() -> Any:
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            return tf.Variable(0.0)

    def seeded_context() -> Any:
        tf.random.set_seed(0)
        return import_module("tensorflow.python.eager.context").context()

    given = keras.Input((1,))
    known = {"keras": keras, "tf": tf, "TENSOR": given, "MODEL": keras.Model(given, keras.layers.Dense(1)(given))}
    known |= {
        "build": build,
        "compile": compile,
        "mirrored": mirrored,
        "seeded_context": seeded_context,
        "import_module": import_module,
    }
    missing = []
    for owner, name, sentence in names:
        module, _, last = name.rpartition(".")
        found = eval(f"({owner},)", known) if owner else (import_module(module),)
        if not all(hasattr(each, last) or is_module(f"{module}.{last}") for each in found):
            missing.append(f"{owner or module}: {last} is gone ({sentence})")
    return missing


def is_module(name: str) -> bool:
    return not name.startswith(".") and find_spec(name) is not None


@pytest.mark.parametrize("library", FILES)
def test_each_entry_says_what_it_is_for(library: str) -> None:
    sentences = dict(list_names(library))
    assert sentences
    assert {name: said for name, said in sentences.items() if "." not in name and len(said) < 20} == {}


@pytest.mark.parametrize("library", FILES)
def test_the_names_in_a_module_are_those_that_are_looked_for(library: str) -> None:
    attributes = {name for name, _ in list_names(library) if "." not in name}
    assert attributes == {name for names in OWNERS.get(library, {}) for name in names.split()}


def test_every_private_name_still_exists(isolated: Callable[..., Any]) -> None:
    owners = {name: owner for each in OWNERS.values() for names, owner in each.items() for name in names.split()}
    asked = []
    for library in filter(find_spec, set(FILES) - {"python"}):
        installed = to_series(version(DISTRIBUTIONS.get(library, library)))
        names = {name: said for name, said in list_names(library) if installed >= to_series(SINCE.get(name, "0.0"))}
        asked += [(owners.get(name, ""), name, f"compat/{library}.py, {said}") for name, said in names.items()]
    asked += [(owners.get(name, ""), name, f"compat/python.py, {said}") for name, said in list_names("python")]
    assert "\n".join(isolated(find_missing, asked)) == ""
