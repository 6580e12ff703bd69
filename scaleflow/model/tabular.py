"""A thin ensemble of dense networks for tables, after RealMLP and TabM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, InputStructure, Outputs, OutputStructure, label_leaf, map_named, name_leaves
from scaleflow.interfaces.options import Positive, Widths, check_options
from scaleflow.model.layers import average, make_inputs, to_label, to_list
from scaleflow.model.members import average_members, limit_values, name_members

#: More categories than that, and words, are embedded.
MOST_ONE_HOT = 9

#: Each member leaves out one of so many folds of a small training split.
FOLDS = 8

#: Periodic functions of a number, and the numbers that they become.
FREQUENCIES, EMBEDDING = 16, 3


def choose_sizes(inputs: InputStructure, examples: int) -> Mapping[str, Any]:
    """Returns the arguments that are `by_size`, from the features and the number of training examples."""
    return {"units": [64, 64, 64], "members": 8}


def count_folds(arguments: Mapping[str, Any]) -> int:
    """Returns how many folds the members can leave out, one each; 0 if there is a single member."""
    members = arguments.get("members")
    count = min(FOLDS, members) if isinstance(members, int) else FOLDS
    return count if count > 1 else 0


@check_options("model")
def build(
    inputs: InputStructure,
    outputs: OutputStructure,
    units: Widths = (64, 64, 64),
    members: Positive = 8,
) -> keras.Model:
    raw = make_inputs(inputs)
    numbers, features = [], []
    specs = name_leaves(inputs)
    for name, tensor in name_leaves(raw).items():
        spec = specs[name]
        check_column(name, spec)
        if spec.quantiles is None:
            features.append(encode(name, tensor, spec))
            continue
        numbers.append((tensor[:, :1], spec.quantiles))
        if spec.shape[0] > 1:
            features.append(tensor[:, 1:])
    if numbers:
        features.insert(0, embed_numbers([x for x, _ in numbers], [quantiles for _, quantiles in numbers]))
    x = keras.layers.Concatenate()(features) if len(features) > 1 else features[0]
    x = weigh(x, "scales")
    described = name_leaves(outputs)
    activation = "mish" if all(each.kind == "regression" for each in described.values()) else "selu"
    for number, width in enumerate(to_list(units), 1):
        equation = "bkd,kdw->bkw" if number > 1 else "bd,kdw->bkw"
        x = add_layer(x, equation, (members, width), f"hidden{number}", activation, bias_initializer="random_normal")

    def add_head(name: str, each: Outputs) -> keras.KerasTensor:
        shape = (members, math.prod(each.shape))
        each_member = add_layer(x, "bkd,kdc->bkc", shape, name_members(name), dtype="float32")
        return limit_values(average_members(each_member, each), each, is_scaled=True)

    return keras.Model(raw, map_named(add_head, outputs), name="tabular")


def check_column(name: str, spec: Inputs) -> None:
    if spec.dtype == "string":
        raise ConfigError(f"model=tabular: needs numbers, but the dataset's {label_leaf('inputs', name)} are text")


def encode(name: str, x: Any, spec: Inputs) -> Any:
    """Converts categories, words and other features to numbers [b, n]."""
    if spec.vocabulary is None:
        x = keras.layers.Flatten()(x) if len(spec.shape) != 1 else x
        x = x if spec.scale is None else keras.layers.Rescaling(spec.scale)(x)
        count = x.shape[-1]
        if count <= MOST_ONE_HOT + 1:
            return x
        return keras.layers.Dense(embedding_width(count), use_bias=False, name=f"{to_label(name)}_embedding")(x)
    if spec.vocabulary <= MOST_ONE_HOT + 1 and not spec.shape:
        return ops.one_hot(x, spec.vocabulary)
    embedded = keras.layers.Embedding(
        spec.vocabulary, embedding_width(spec.vocabulary), name=f"{to_label(name)}_embedding"
    )(x)
    return average(embedded, x) if spec.shape else embedded


def embedding_width(count: int) -> int:
    return min(64, round(1.6 * math.pow(count, 0.56)))


def embed_numbers(numbers: Sequence[Any], quantiles: Sequence[Sequence[float]]) -> Any:
    """Scales numbers [b, 1] each, and adds periodic functions of them: [b, numbers x (1 + EMBEDDING)]."""
    scales, offsets = zip(*(find_scaling(each) for each in quantiles), strict=True)
    x = keras.layers.Concatenate()(list(numbers)) if len(numbers) > 1 else numbers[0]
    x = keras.layers.Rescaling(list(scales), offset=list(offsets))(x)
    x = x / ops.sqrt(1 + ops.square(x / 3))
    n = len(numbers)
    angle = keras.layers.EinsumDense(
        "bn,nf->bnf",
        (n, FREQUENCIES),
        bias_axes="nf",
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.1 * 2 * math.pi),
        bias_initializer=keras.initializers.RandomUniform(-math.pi, math.pi),
        name="frequencies",
    )(x)
    periodic = keras.layers.EinsumDense(
        "bnf,nfe->bne",
        (n, EMBEDDING),
        bias_axes="ne",
        kernel_initializer=keras.initializers.RandomUniform(-(FREQUENCIES**-0.5), FREQUENCIES**-0.5),
        bias_initializer=keras.initializers.RandomUniform(-(FREQUENCIES**-0.5), FREQUENCIES**-0.5),
        name="periodic",
    )(ops.cos(angle))
    return keras.layers.Flatten()(ops.concatenate([ops.expand_dims(x, -1), periodic], axis=-1))


def find_scaling(quantiles: Sequence[float]) -> tuple[float, float]:
    """Returns scale and offset such that the median becomes 0 and the interquartile range 1."""
    middle = len(quantiles) // 2
    median, spread = quantiles[middle], quantiles[-1 - middle // 2] - quantiles[middle // 2]
    if not spread:
        spread = (quantiles[-1] - quantiles[0]) / 2
    scale = 1 / spread if spread else 0.0
    return scale, -median * scale


def weigh(x: Any, name: str) -> Any:
    """Multiplies each feature by a learned weight, which begins as 1."""
    return keras.layers.EinsumDense("bd,d->bd", x.shape[1:], kernel_initializer="ones", name=name)(x)


def add_layer(x: Any, equation: str, shape: tuple[int, int], name: str, activation: Any = None, **options: Any) -> Any:
    """Adds a dense layer for each member, [b, k, width]."""
    return keras.layers.EinsumDense(
        equation,
        shape,
        bias_axes=equation[-2:],
        activation=activation,
        kernel_initializer=keras.initializers.RandomNormal(stddev=x.shape[-1] ** -0.5),
        name=name,
        **options,
    )(x)


build.choose_sizes, build.count_folds = choose_sizes, count_folds  # type: ignore[attr-defined]
