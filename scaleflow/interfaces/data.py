"""The classes that a user's own dataset returns, and the protocols that it implements.

Inputs, targets and outputs are structures: a value, or a dict of values or further dicts. `tf.nest` handles tensors in
the same way. The functions here need no TensorFlow, and name each value: its keys joined with `/`, or "" for a single
value. Names have `tf.nest`'s order: dicts by sorted keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeVar

from scaleflow.errors import ConfigError

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

Part = TypeVar("Part")


def name_leaves(structure: Any) -> dict[str, Any]:
    """Returns the values of a structure by name."""
    leaves: dict[str, Any] = {}
    map_named(leaves.__setitem__, structure)
    return {name: leaves[name] for name in sorted(leaves, key=lambda name: name.split("/"))}


def map_leaves(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """Calls `function` with the values of structures that have the same keys. Returns the structure of the results."""
    if not isinstance(structure, Mapping):
        return function(structure, *others)
    mapped = {}
    for key, value in structure.items():
        mapped[key] = map_leaves(function, value, *(other[key] for other in others))
    return mapped


def map_named(function: Callable[[str, Any], Any], structure: Any, prefix: str = "") -> Any:
    """Calls `function` with the name and the value of each leaf. Returns the structure of the results."""
    if not isinstance(structure, Mapping):
        return function(prefix, structure)
    start = f"{prefix}/" if prefix else ""
    return {key: map_named(function, value, f"{start}{key}") for key, value in structure.items()}


def apply_layer(layer: Callable[[Any], Any], inputs: Sequence[Any]) -> list[Any]:
    """Applies the preprocessing of one input, or of several inputs together. Returns the result for each input."""
    return list(layer(list(inputs))) if len(inputs) > 1 else [layer(inputs[0])]


def describe_keys(structure: Any) -> str:
    """Describes a structure's keys for a message: `are one tensor`, or `have the keys a, b`."""
    names = list(name_leaves(structure))
    if names == [""]:
        return "are one tensor"
    if not names:
        return "have no keys"
    return f"have the key{'s' if len(names) > 1 else ''} {', '.join(names)}"


def label_leaf(what: str, name: str) -> str:
    """Names a leaf in a message: `inputs` for a single value, `inputs['age']` in a dict."""
    return f"{what}['{name}']" if name else what


def name_metric(output: str, metric: str) -> str:
    """Names a metric of an output: `price/mae`; a single output has no name."""
    return f"{output}/{metric}" if output else metric


def add_batch_dimension(shape: tuple[int | None, ...]) -> str:
    """Formats the shape of a batch: `(batch, 8, 8)`. `shape` is the shape of an example."""
    return "(batch" + "".join(f", {size}" for size in shape) + ")"


#: The kind of target, which determines the loss and the metrics. `Outputs` describes each kind.
Kind = Literal["classification", "binary", "multi_label", "regression"]

#: How a text is normalized before it is split at white space into words: options of `keras.layers.TextVectorization`.
Standardize = Literal["unicode", "lower_and_strip_punctuation", "lower", "strip_punctuation", "none"]

#: With more classes, a run has neither `balanced_accuracy` nor a confusion matrix, whose size is their number squared.
MAX_CONFUSION_CLASSES = 1000


#: Half the spacing of float32 numbers near 1: the maximum relative rounding error.
ROUNDING = 2.0**-24

#: Maximum change of a value by rounding to float32 within a run, in standard deviations of its column.
MAX_ROUNDING = 1e-6

#: The key of an input that exists only in training and evaluations: the fold of an example, from 0; -1: no fold.
FOLD = "__fold__"


@dataclass(frozen=True)
class Inputs:
    """The description of one example's input, as the dataset returns it and the saved model takes it.

    Attributes:
        shape: the shape without the batch dimension.
        dtype: the name of a TensorFlow dtype, such as `uint8` or `string`.
        scale: the factor that brings raw values near [0, 1]; None if they already are. The model multiplies by it, so
            the saved model takes raw values.
        vocabulary: for text as numbers (dtype int32, 0 is padding): every number is below this. None: no such text.
            Numbers that are in memory before training are checked. Numbers of a stream that is read during training, or
            of a mapped
            file, are not: XLA replaces a number that is too large with the last one.
        quantiles: quantiles of the first number of `shape` in the training split, at evenly spaced shares from minimum
            to maximum. None: unknown, or not a quantity.
        kind: the kind of the column in checks of data: `number`, `category`, `text`, `date`, `picture` or `array`.
            None: it follows from the values.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    scale: float | None = None
    vocabulary: int | None = None
    quantiles: tuple[float, ...] | None = None
    kind: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Outputs:
    """The description of the model's output for one example, and of the example's target.

    Attributes:
        kind: `classification`: the target is a class, an integer from 0, of shape ();
            `binary`: the target is 0 or 1, of shape (1,);
            `multi_label`: the target is 0 or 1 for each label, of the output's shape;
            `regression`: the target is real values, of the output's shape.
        shape: the shape of the model's output without the batch dimension: (classes,) logits for `classification`, (1,)
            logit for `binary`, logits for `multi_label`, values for `regression`. `classification` may have more
            dimensions before the last one, such as (tokens, vocabulary) or (height, width, classes): then the target
            has a class for each position, (tokens,) or (height, width).
        names: names of the classes, labels or values, in order; for `binary` the names of 0 and 1. None: no names.
        ignore: targets with this value, such as -1 for an unlabelled pixel, do not count in the loss and metrics. None:
            all targets count.
        scaling: for `regression`: (mean, deviation) of the targets. The model then learns values with mean 0 and
            deviation 1, and a last layer without weights returns them in the unit of the targets. The default loss is
            computed on the scaled values, both for training and for reports. Metrics such as `mae` and `rmse` are in
            the unit of the targets. None: no scaling.
        logit_shift: for one class per example: a constant that a last layer without weights adds to the logits. The
            loss is minimised on the logits without it. None: no shift.
        limits: for `regression`: the minimum and maximum target of the training split, for a model that predicts
            nothing beyond them. None: unknown.
        calibration: (factor, shift) that the last layer of the exported model applies to logits, learned from the
            validation rows (`evaluation.calibrate`). None: no calibration.
        threshold: for two classes: the minimum probability at which the second class is predicted
            (`evaluation.threshold`). None: the more likely class is predicted.
        margins: for `regression`: the distance of an interval's bounds from each value (`evaluation.interval`). None:
            no intervals.
        set_threshold: for one class: the minimum probability of a class in an example's set (`evaluation.sets`). None:
            no sets.
        levels: for `regression`: the quantile levels of the values that the model returns for each target, ascending;
            one of them is 0.5 (`objective.levels`). None: the model returns one value per target.
    """

    kind: Kind
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None
    ignore: int | None = None
    scaling: tuple[float, float] | None = None
    limits: tuple[float, float] | None = None
    logit_shift: tuple[float, ...] | None = field(default=None, compare=False)
    calibration: tuple[float, float] | None = field(default=None, compare=False)
    threshold: float | None = field(default=None, compare=False)
    margins: tuple[float, ...] | None = field(default=None, compare=False)
    set_threshold: float | None = field(default=None, compare=False)
    levels: tuple[float, ...] | None = field(default=None, compare=False)

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The shape of one example's target."""
        return tuple(self.shape[:-1] if self.kind == "classification" else self.shape)

    @property
    def model_shape(self) -> tuple[int, ...]:
        """The shape of a trained model's output for one example. With levels it has a value for each level."""
        return (*self.shape, len(self.levels)) if self.levels else self.shape

    @property
    def target_dtype(self) -> str:
        """The dtype to which a source converts targets. Values are float64, because float32 would round them."""
        return {"classification": "int32", "regression": "float64"}.get(self.kind, "float32")

    @property
    def dtype(self) -> str:
        """The dtype of the model's output.

        It is float64 for values that float32 cannot distinguish, such as seconds since 1970, where float32 numbers are
        128 apart. For all others it is float32.
        """
        if self.scaling is None:
            return "float32"
        mean, deviation = self.scaling
        largest = max(map(abs, (mean, *(self.limits or ()))))
        return "float32" if largest * ROUNDING <= MAX_ROUNDING * deviation else "float64"

    @property
    def is_one_class(self) -> bool:
        """Whether the target of each example is one class out of two or more."""
        is_single = self.kind == "classification" and len(self.shape) == 1
        return is_single or (self.kind == "binary" and self.shape == (1,))


#: Fields of `Outputs` that belong to a model, not to its training data.
ANSWERS = ("threshold", "margins", "set_threshold", "levels")


#: One tensor, or a dict from name to `Inputs` or to further dicts.
InputStructure = Inputs | Mapping[str, "InputStructure"]

#: One tensor, or a dict from name to `Outputs`.
OutputStructure = Outputs | Mapping[str, Outputs]


@dataclass(frozen=True)
class DivisionKeys:
    """The keys that `dataset.split` uses to divide the examples of a split, [n] each; None: unknown or not needed."""

    groups: np.ndarray[Any, Any] | None = None  # group numbers, or hashes (uint64)
    times: np.ndarray[Any, Any] | None = None  # in seconds, or in the unit of a column of numbers
    strata: np.ndarray[Any, Any] | None = None  # numbers of classes, or of ranges of a target, from 0

    @classmethod
    def of(cls, examples: Examples | Rows) -> DivisionKeys:
        """Returns the keys of a split."""
        return cls(examples.groups, examples.times, examples.strata)

    def select(self, chosen: Any) -> DivisionKeys:
        """Returns the keys of the chosen examples: indices, a slice, or a mask."""
        selected = {}
        for name, keys in vars(self).items():
            selected[name] = None if keys is None else keys[chosen]
        return DivisionKeys(**selected)


@dataclass(frozen=True)
class Arrays:
    """A split that fits in memory.

    Attributes:
        inputs: [n, *Inputs.shape] of Inputs.dtype, or a dict of such arrays with the keys of `Source.inputs`. Text is
            numpy's `str`, or objects that are `str` or `bytes`.
        targets: [n, *Outputs.target_shape], integers for `classification`, otherwise numbers; or a dict of such arrays
            with the keys of `Source.outputs`.
        weights: [n] numbers from 0 up: how much each example counts in the loss and the metrics. None: all count
            equally.
        rows: [n] int64: the index of each example in its file, from 0, for kept predictions. None: examples are in the
            order of their file.
        groups: [n] of any dtype: the group of each example, such as a customer, for a `dataset.split` by group or hash.
            None: unknown.
        times: [n] dates or numbers, for a `dataset.split` by time. None: unknown.
        strata: [n] classes or numbers. Each split gets the same proportions of them. None: the targets.
    """

    inputs: Any
    targets: Any
    weights: np.ndarray[Any, Any] | None = None
    rows: np.ndarray[Any, Any] | None = None
    groups: np.ndarray[Any, Any] | None = None
    times: np.ndarray[Any, Any] | None = None
    strata: np.ndarray[Any, Any] | None = None

    def __len__(self) -> int:
        return len(next(iter(name_leaves(self.inputs).values()), ()))

    @property
    def parts(self) -> tuple[Any, ...]:
        """(inputs, targets), or (inputs, targets, weights)."""
        return (self.inputs, self.targets) if self.weights is None else (self.inputs, self.targets, self.weights)

    @property
    def nbytes(self) -> int:
        """The size of all arrays."""
        total = 0
        for part in self.parts:
            total += sum(array.nbytes for array in name_leaves(part).values())
        return total

    def map(self, function: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Self:
        """Returns the split with `function`, which selects or copies examples, applied to each array."""
        inputs, targets, *weights = (map_leaves(function, part) for part in self.parts)
        others = {"rows": self.rows, **vars(DivisionKeys.of(self))}
        changed = {name: None if array is None else function(array) for name, array in others.items()}
        return replace(self, inputs=inputs, targets=targets, weights=weights[0] if weights else None, **changed)


@dataclass(frozen=True)
class Stream:
    """A split that is read during training.

    Attributes:
        dataset: yields single examples, not batched, the same ones in the same order at each iteration: (input, target)
            or (input, target, weight), where input and target are tensors, or dicts as in `Arrays`, and weight is a
            scalar. With `decode` it instead yields records that are cheap to read and to keep in memory: a path and a
            label, a line, a serialized example.
        length: the number of examples of an epoch. A stream that ends earlier is rejected before training, or ends the
            run as FAILED. Additional examples are not used.
        decode: a function that `tf.data.Dataset.map` traces: the components of a record as arguments -> an example with
            the source's keys, shapes and dtypes. It runs in parallel, after shuffling and after the records are divided
            among workers, so each worker decodes only its own. None: `dataset` yields examples.
        name: a function that names an example in messages by a file, or a file and a row: the components of its record
            as numpy values (strings as `bytes`), as arguments -> str. None: the position in the split.
        faults: messages about the first examples that the source already knows it cannot decode.
        at_once: the number of records for one call of `decode`; the last call may have fewer. Small records need it for
            speed. `decode` then takes components [b, ...] and returns (inputs [b, ...], targets [b, ...]), or with
            weights [b]. One bad record fails the call. None: one record, without a batch dimension.
        groups, times, strata: the keys of each example, [length], as in `Arrays`.
    """

    dataset: tf.data.Dataset
    length: int
    decode: Callable[..., tuple[Any, ...]] | None = None
    name: Callable[..., str] | None = None
    faults: Sequence[str] = ()
    at_once: int | None = None
    groups: np.ndarray[Any, Any] | None = None
    times: np.ndarray[Any, Any] | None = None
    strata: np.ndarray[Any, Any] | None = None

    def __len__(self) -> int:
        return self.length


#: The examples of a split, as a source returns them.
Examples = Arrays | Stream


class Rows(Protocol):
    """The examples of a split, accessed by index. The input pipeline makes it from `Examples`.

    Code that chooses examples (a limit, a hold-out, folds, a sample) computes indices, and need not know the form of
    the examples. Parts of examples are (inputs, targets), or with weights: arrays [n, ...], or dicts of them.
    """

    def __len__(self) -> int: ...

    @property
    def groups(self) -> np.ndarray[Any, Any] | None:
        """The keys that `dataset.split` uses, [n], as in `Arrays`; also `times` and `strata`."""

    @property
    def times(self) -> np.ndarray[Any, Any] | None: ...

    @property
    def strata(self) -> np.ndarray[Any, Any] | None: ...

    @property
    def is_random_access(self) -> bool:
        """Whether examples are read by index. Otherwise, reading one also reads all examples before it."""

    @property
    def spec(self) -> tuple[Any, ...]:
        """The parts of one example, with a `tf.TensorSpec` for each value."""

    @property
    def place(self) -> Literal["memory", "file", "stream"]:
        """Where a step gets the examples: in memory, in memory-mapped arrays, or from a stream."""
        return "stream"

    @property
    def blocks(self) -> int:
        """The number of blocks of rows that workers can divide among them; 0: the split has no blocks."""
        return 0

    @property
    def is_spread(self) -> bool:
        """Whether `read_spread` returns examples from the whole split."""
        return self.is_random_access

    @property
    def drawn_together(self) -> int:
        """The number of consecutive examples that form a unit: a draw takes the same share of each unit."""
        return len(self)

    @property
    def is_weighted(self) -> bool:
        """Whether the examples have weights."""
        return len(self.spec) == 3

    @property
    def paths(self) -> tuple[str, ...]:
        """The known files from which the split is read."""
        return ()

    @property
    def faults(self) -> Sequence[str]:
        """Messages about the first examples that the source already knows it cannot decode."""
        return ()

    @property
    def records(self) -> Sequence[np.ndarray[Any, Any]]:
        """The components of all records, if they are in memory before decoding."""
        return ()

    def select(self, chosen: np.ndarray[Any, Any]) -> Rows:
        """Returns the chosen examples: ascending indices, [n] int64, or [length] bool."""

    def limit(self, count: int) -> Self:
        """Returns the first `count` examples."""

    def repeat(self, times: int) -> Rows:
        """Returns the examples repeated `times` times."""

    def read(self, places: np.ndarray[Any, Any]) -> tuple[Any, ...]:
        """Returns the parts of examples. Text is `bytes` or `str`. `places` are ascending indices, [n] int64."""

    def stream(self) -> tf.data.Dataset:
        """Returns the parts of all examples one by one, in order."""

    def read_first(self, count: int) -> Any:
        """Returns the inputs of the first `count` examples, or fewer."""

    def read_spread(self, count: int, reads_all: bool = False) -> tuple[np.ndarray[Any, Any], tuple[Any, ...]]:
        """Returns the ascending indices, and the parts, of up to `count` examples drawn from the whole split.

        From a stream that is not in memory it returns the first examples, unless the command `reads_all` of it.
        """

    def iterate(self, pick: Callable[..., Any]) -> Iterator[Any]:
        """Yields what `pick` selects from the parts of all examples, in order, [b, ...] as numpy arrays.

        `pick` is traced. Parts that it does not select are not decoded.
        """

    def read_to_learn(self, name: str) -> Iterator[np.ndarray[Any, Any]]:
        """Yields the raw input with this name, [b, ...], of the examples to learn from (all, or a part)."""

    def recall(self, what: str, options: Any, learn: Callable[[], Any]) -> Any:
        """Returns the result of `learn`, or an earlier run's result with equal `options`.

        `what` is a word for the result. All values must be plain values that JSON can hold.
        """
        return learn()

    def open_columns(self, names: Sequence[str], key: str) -> Callable[[np.ndarray[Any, Any]], Mapping[str, Any]]:
        """Returns a function from ascending indices, [n] int64, to columns of these examples (pyarrow or numpy).

        A table has all columns of its files, another dataset has its inputs with one value each. Raises ConfigError,
        which names `key`, if there is no such column.
        """
        single = [name for name, spec in name_leaves(self.spec[0]).items() if name and tuple(spec.shape) == ()]
        for name in names:
            if name not in single:
                there_are = f"; there are {', '.join(single)}" if single else ", because its inputs have no names"
                raise ConfigError(f"{key}={name}: the dataset has no input of that name with one value{there_are}")
        return lambda places: {name: name_leaves(self.read(places)[0])[name] for name in names}

    def read_cheap_targets(self) -> tuple[Any, np.ndarray[Any, Any] | None] | None:
        """Returns all targets and the weights; None if reading them is slow or needs the whole split."""

    def read_to_digest(self) -> tuple[str, Iterator[tuple[Any, ...]]]:
        """Returns a description of the examples that a digest covers, and their parts in portions."""

    def locate(self, places: np.ndarray[Any, Any]) -> tuple[list[str | None] | None, np.ndarray[Any, Any] | None]:
        """Returns the file of each example and its row there, counted as in messages: from 1 in a table, otherwise from
        0.

        Returns:
            Files [n], None without files; rows [n], masked if an example has no row. Both are None if the source does
            not name examples, or if reading their names is slow.
        """

    def name_rows(self, places: Sequence[int]) -> list[str]:
        """Returns the names of examples, such as a file and a row, from their ascending indices."""
        return [f"example {place}" for place in places]

    def find_unreadable(self) -> Iterator[int]:
        """Yields the indices of examples that cannot be read, in ascending order."""
        return iter(())

    def describe_unreadable(self, places: Sequence[int]) -> Sequence[Any]:
        """Returns the index, the name and the reason for each of these examples, from their ascending indices."""
        return ()

    def check_targets(self, outputs: OutputStructure, split: str = "") -> Rows:
        """Rejects invalid targets and weights, or returns rows that reject them while they are read."""

    def check_cached(self, inputs: InputStructure, split: str) -> None:
        """Rejects preprocessed values in memory that the model cannot take."""
        return

    def map_targets(self, convert: Callable[[Any], Any]) -> Rows:
        """Returns the examples with converted targets. `convert` is traced."""


@dataclass(frozen=True)
class BySplit(Generic[Part]):
    """A value for each split of a run, for example its rows or its feed. Only `train` is always there."""

    train: Part
    validation: Part | None
    test: Part | None

    def by_name(self) -> Mapping[str, Part]:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in parts.items() if part is not None}


class Source(Protocol):
    """A dataset as a user writes it: its examples and their description.

    `dataset._target_` names the class; the other keys of `dataset` are its arguments. Each worker makes one object, and
    all objects must return the same examples. The source does not shuffle, batch, repeat or shard: the input pipeline
    does.

    It may have more attributes:

    - `preprocessing`: a `Preprocessing`, a dict from an input's name to its `Preprocessing`, or None. The name of an
    input in a nested dict is its keys joined with `/`; - `notes`: lines to show before anything is read, for example
    that the data must be downloaded first; - `decoders`: for inputs that are pictures, by name ("" for a single one): a
    traced function from the bytes of a picture's file, a string of shape (), to one example of the input. The served
    model then takes such bytes; - `reading`: how it reads its files, as values that JSON can hold. They are recorded in
    the learned state.

    If its class has an argument `earlier`, it gets the `EarlierState` of the run that is evaluated, resumed or
    fine-tuned (None for a new run), and takes classes, columns and scales from it instead of learning them.
    """

    @property
    def inputs(self) -> InputStructure:
        """The description of one example's input: one tensor, or a dict (whose values may be dicts)."""

    @property
    def outputs(self) -> OutputStructure:
        """The description of the model's output and the target of one example: one tensor, or a dict."""

    @property
    def splits(self) -> Collection[str]:
        """The names of the splits: `train`, usually `test`, and any that `dataset.validation` may name."""

    def load(self, split: str) -> Examples:
        """Returns the examples of a split: the same ones in the same order at every call and in every worker."""


class Preprocessing(Protocol):
    """Converts raw inputs (`Source.inputs`, or one of its dict) to features, if a factor (`Inputs.scale`) is not
    enough.

    The chief learns it once, from the training split. The input pipeline applies it in training. The saved model begins
    with it, so it takes raw inputs: a string, a row.

    It may have a method `extend(learned, new)`. It returns the values that an earlier run learned, extended by new
    entries from `learn` on other data, with the known ones first. Without it, fine-tuning uses the earlier values. It
    may have a method `layer_of_all`, which makes one layer from the learned values of several inputs: the layer
    converts a list of raw inputs to a list of features.
    """

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> Any:
        """Learns from the training split: a vocabulary, or means and deviations.

        Args:
            batches: raw inputs in the order of the split, each [b, *Source.inputs.shape], without the examples that are
                held out for validation. Text from a stream is `bytes`. Can be iterated once.

        Returns:
            Plain values that JSON can hold. The other methods get them after a round trip through JSON: tuples become
            lists, and keys become text.
        """

    def features(self, learned: Any) -> Inputs:
        """Describes the result of `layer`. The model factory receives the description."""

    def layer(self, learned: Any) -> keras.Layer:
        """Makes a layer: raw inputs [b, *Source.inputs.shape] -> features [b, *features.shape] of features.dtype.

        Use only Keras's own layers and operations, so that the saved model loads without this class; a `keras.Model` of
        several layers is fine. The layer has no trainable weights and treats each example independently. It is made
        more than once, for the input pipeline and for the saved model, and computes in float32 regardless of
        `precision`.
        """
