"""A model with more words, columns and classes computes what the saved model computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Inputs, LearnedChanges, LearnedPreprocessing, LearnedState, Outputs
from tests.training.fake_engine import spread_over

CATEGORY = "scaleflow.dataset.tables.columns.Category"
TWO, THREE = Outputs("binary", (1,), ("no", "yes")), Outputs("classification", (3,), ("no", "yes", "maybe"))
FLAT = {"age": Inputs((1,)), "town": Inputs((3,)), "zip": Inputs((2,))}
WIDE = {"size": Inputs((1,)), "age": Inputs((2,)), "town": Inputs((4,)), "zip": Inputs((2,))}
IDS = {"age": Inputs((1,)), "town": Inputs((), "int32", vocabulary=3), "zip": Inputs((), "int32", vocabulary=2)}
MORE_IDS = {"zip": IDS["zip"], "town": Inputs((), "int32", vocabulary=4), "age": IDS["age"]}


def learn(inputs: Any, outputs: Outputs, words: Mapping[str, Any]) -> LearnedState:
    named: Mapping[str, Inputs] = inputs if isinstance(inputs, Mapping) else {"": inputs}
    learned = {name: LearnedPreprocessing(CATEGORY, {}, words.get(name, [])) for name in named}
    return LearnedState(inputs, outputs, learned)


def fill(inputs: Mapping[str, Inputs], wider: Mapping[str, Inputs]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Old features and, for the wider model, the same ones: what is new is 0."""
    draw = np.random.default_rng(0)
    old = {
        name: draw.integers(each.vocabulary, size=(4, *each.shape))
        if each.vocabulary
        else draw.normal(size=(4, *each.shape))
        for name, each in inputs.items()
    }
    new = {name: np.zeros((4, *each.shape), each.dtype) for name, each in wider.items()}
    for name, values in old.items():
        new[name][..., : values.shape[-1]] = values
    old = {name: values.astype(inputs[name].dtype) for name, values in old.items()}
    return old, new


def extend(folder: Path) -> dict[str, Any]:
    """By model: what it computed, what the extended one computes on two replicas, and the note."""
    import keras

    from scaleflow.model import dlrm, initialize_from, linear, make_model, mlp, read_weights, text
    from scaleflow.model import transformer as encoder

    tokens, more = Inputs((5,), "int32", vocabulary=6), Inputs((5,), "int32", vocabulary=8)
    cases = {
        "mlp": (mlp.build, FLAT, WIDE),
        "linear": (linear.build, FLAT, WIDE),
        "dlrm": (dlrm.build, IDS, MORE_IDS),
        "text": (text.build, tokens, more),
        "transformer": (encoder.build, tokens, more),
    }
    strategy, found = spread_over(2), {}
    for name, (build, inputs, wider) in cases.items():
        is_dict = isinstance(inputs, Mapping)
        before, after = fill(inputs, wider) if is_dict else fill({"": inputs}, {"": inputs})  # type: ignore[arg-type, dict-item]
        keras.utils.clear_session()
        first = make_model(build, inputs, TWO)
        for variable in first.variables:
            variable.assign(np.random.default_rng(len(found)).normal(size=variable.shape))
        first.save(folder / f"{name}.keras")
        old = learn(inputs, TWO, {"town": ["a", "b"]})
        changes = LearnedChanges(old, learn(wider, THREE, {"town": ["a", "b", "c"]}), is_anew=False, maps_rows=True)
        keras.utils.clear_session()
        saved = read_weights(str(folder / f"{name}.keras"), "saved", changes.grown_inputs)
        with strategy.scope():
            net = make_model(build, wider, THREE)
            note = initialize_from(net, saved, changes)
        outputs = (np.asarray(m(x if is_dict else x[""])) for m, x in ((first, before), (net, after)))
        found[name] = (*outputs, note, changes.describe())
    return found


def test_known_rows_and_classes_keep_their_weights_in_every_model(isolated: Callable[..., Any], tmp_path: Path) -> None:
    for name, (old, new, note, differences) in isolated(extend, tmp_path).items():
        np.testing.assert_allclose(new[:, 1] - new[:, 0], old[:, 0], rtol=1e-4, atol=1e-4, err_msg=name)
        assert (new.argmax(axis=1) == (old[:, 0] > 0)).all(), name
        assert "new weights" not in note, name
        assert differences.endswith("outputs: 1 new class (maybe)"), name
        if name == "mlp":
            assert differences.startswith("size: new; town: 1 new category (c); ")
            assert note.endswith("; extended: dense, outputs")


#: Layers of `model=tabular` whose weights have a row for each column of numbers.
BY_COLUMN = ("frequencies", "periodic", "piecewise", "straight")


def extend_tabular(folder: Path) -> dict[str, Any]:
    """By how the outputs change: what `model=tabular` computed, what the extended one computes, and the note."""
    import keras

    from scaleflow.model import initialize_from, make_model, read_weights, tabular

    quantiles = tuple(np.linspace(-2, 2, 49).tolist())
    skewed = tuple((np.linspace(0, 2, 49) ** 3).tolist())
    inputs = {
        "age": Inputs((1,), quantiles=quantiles),
        "rent": Inputs((1,), quantiles=skewed),
        "when": Inputs((7,), quantiles=skewed),
        "town": Inputs((9,)),
        "street": Inputs((30,)),
        "user": Inputs((), "int32", vocabulary=15),
        "shop": Inputs((), "int32", vocabulary=4),
    }
    wider = {
        "shop": Inputs((), "int32", vocabulary=14),
        "user": Inputs((), "int32", vocabulary=40),
        "kind": Inputs((3,)),
        "street": Inputs((90,)),
        "town": Inputs((14,)),  # one-hot codes, and more than those of a new run would be
        "when": Inputs((8,), quantiles=skewed),
        "rent": Inputs((1,), quantiles=skewed),
        "age": Inputs((2,), quantiles=quantiles),
    }
    before, after = fill(inputs, wider)
    cases = {
        "same": (TWO, TWO),
        "classes": (TWO, THREE),
        "more classes": (THREE, Outputs("classification", (4,), ("maybe", "yes", "no", "late"))),
        "scaling": (Outputs("regression", (1,), None, scaling=(10.0, 2.0)), Outputs("regression", (1,))),
    }
    found = {}
    for name, (output, other) in cases.items():
        sizes = {"units": [6, 6], "members": 3, "embeddings": tabular.choose_sizes(inputs, 100)["embeddings"]}
        build = functools.partial(tabular.build, **sizes)
        keras.utils.clear_session()
        first = make_model(build, inputs, output)
        for variable in first.variables:
            variable.assign(np.random.default_rng(len(found)).normal(size=variable.shape) / 3)
        first.save(folder / "saved.keras")
        states = learn(inputs, output, {}), learn(wider, other, {})
        changes = LearnedChanges(*states, is_anew=False, maps_rows=True)
        keras.utils.clear_session()
        saved = read_weights(str(folder / "saved.keras"), "saved", changes.grown_inputs)
        net = make_model(build, wider, other)
        note = initialize_from(net, saved, changes)
        found[name] = np.asarray(first(before)), np.asarray(net(after)), note
        if name == "same":  # a further column of numbers, between two others
            net = make_model(build, {**wider, "bonus": Inputs((1,), quantiles=quantiles)}, other)
            initialize_from(net, saved, changes)
            layers = [[np.asarray(each.get_layer(layer).kernel) for layer in BY_COLUMN] for each in (first, net)]
            kernels = [*zip(*layers, strict=True)]
    return found | {"kernels": kernels}


def test_a_model_of_tables_keeps_bins_embeddings_scales_and_classes(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    found = isolated(extend_tabular, tmp_path)
    for old, new in found.pop("kernels"):  # age, (bonus,) rent, when
        np.testing.assert_array_equal(new[[0, 2, 3]], old)
        assert new.shape[0] == 4
    for old, new, note in found.values():
        assert "loaded the weights of 12 of 12 layers" in note
        assert "extended: street_embedding, user_embedding, scales_periodic" in note
        assert old.std() > 0.05
        assert np.isfinite(new).all()
    for name in ("same", "scaling"):
        np.testing.assert_allclose(*found[name][:2], rtol=1e-4, atol=1e-5, err_msg=name)
    old, new, _ = found["classes"]
    assert (new.argmax(axis=1) == (old[:, 0] > 0)).all()
    old, new, _ = found["more classes"]
    assert (np.array([2, 1, 0])[new.argmax(axis=1)] == old.argmax(axis=1)).all()


def learn_anew(folder: Path) -> list[Any]:
    """With new words in the same number: which layers are new."""
    import keras

    from scaleflow.model import initialize_from, make_model, mlp, read_weights

    make_model(mlp.build, FLAT, TWO).save(folder / "saved.keras")
    keras.utils.clear_session()
    net = make_model(mlp.build, FLAT, TWO)
    old = learn(FLAT, TWO, {"town": ["a", "b"]})
    states = {
        "same": old,
        "words": learn(FLAT, TWO, {"town": ["a", "c"]}),
        "classes": learn(FLAT, Outputs("binary", (1,), ("yes", "no")), {"town": ["a", "b"]}),
    }
    saved, found = read_weights(str(folder / "saved.keras"), "saved"), []
    for new in states.values():
        changes = LearnedChanges(old, new, is_anew=True, maps_rows=False)
        found.append((initialize_from(net, saved, changes).partition("; ")[2], changes.describe()))
    return found


def test_layers_of_what_was_learned_anew_are_new(isolated: Callable[..., Any], tmp_path: Path) -> None:
    same, words, classes = isolated(learn_anew, tmp_path)
    assert same == ("", "")
    assert words == ("new weights: dense", "town: learned anew")
    assert classes == ("new weights: outputs", "outputs: learned anew")


def map_rows() -> list[Any]:
    """The arithmetic alone."""
    from scaleflow.model.weight_mapping import copy_columns, match_classes, match_rows

    moves = match_rows((("words a", 2), ("b", 1), ("c", 2)), (("c", 3), ("b", 1), ("words a", 4), ("d", 1)))
    labels = Outputs("multi_label", (2,), ("x", "y")), Outputs("multi_label", (3,), ("y", "z", "x"))
    columns = match_classes(*labels)
    assert columns is not None
    renamed = copy_columns(np.array([[1.0, 2.0]]), np.array([[7.0, 8.0, 9.0]]), False, *labels, columns)
    old, new = (Outputs("regression", (1,), scaling=each) for each in ((10.0, 2.0), (4.0, 4.0)))
    bias = copy_columns(np.array([1.0]), np.zeros(1), True, old, new, {0: 0})
    pixels = [Outputs("classification", (2, n), tuple("pqr"[:n])) for n in (2, 3)]
    spread = copy_columns(np.array([1.0, 3.0, 5.0, 7.0]), np.zeros(6), True, *pixels, match_classes(*pixels) or {})
    others = match_classes(TWO, Outputs("classification", (2,), ("a", "b"))), match_classes(TWO, old)
    return [moves, renamed.tolist(), bias.tolist(), spread.tolist(), others]


def test_rows_and_columns_are_matched_by_name(isolated: Callable[..., Any]) -> None:
    moves, renamed, bias, spread, others = isolated(map_rows)
    assert moves == [(2, 3, 1), (0, 4, 2)]  # c has another size, and is no vocabulary
    assert renamed == [[2.0, 8.0, 1.0]]
    assert bias == [2.0]  # 1 x 2 + 10 = 2 x 4 + 4
    assert spread == pytest.approx([1.0, 3.0, 1.9, 5.0, 7.0, 5.9])
    assert others == (None, None)
