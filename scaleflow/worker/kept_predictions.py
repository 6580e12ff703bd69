"""Keeps the model's outputs for the examples of a split, and writes the record of predictions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.config.targets import bind_metrics
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    FOLD,
    BySplit,
    DivisionKeys,
    EvaluationOptions,
    Feed,
    Inputs,
    InputStructure,
    OutputStructure,
    Plan,
    Rows,
    Source,
    Split,
    map_leaves,
    name_leaves,
)
from scaleflow.interfaces.events import ArtifactWritten, Emit, Note

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

    from scaleflow.dataset import Splits
    from scaleflow.evaluation.predictions import Predictions
    from scaleflow.training import WorkerSync

    Array = np.ndarray[Any, Any]

ID_KEY = "evaluation.id"
DIVISION_KEY = "dataset.split.column"


class PredictionKeeper:
    """Collects the values from which predictions are made. It is an `OutputKeeper`.

    Args:
        feed: the feed of the split, not shuffled.
        is_raw: whether to keep targets and outputs unchanged, instead of the form that the record of predictions uses.

    Attributes:
        is_raw: whether targets and outputs are kept unchanged.
    """

    def __init__(self, outputs: OutputStructure, feed: Feed, is_raw: bool = False) -> None:
        from scaleflow.evaluation.collector import PredictionCollector, choose_form

        self._outputs = name_leaves(outputs)
        self._forms = {}
        for name, output in self._outputs.items():
            self._forms[name] = "values" if is_raw else choose_form(output)
        self.is_raw = not {"positions", "best"} & set(self._forms.values())
        self._feed = feed
        self.collector = PredictionCollector(outputs, feed.examples)

    def reduce(self, targets: Any, outputs: Any) -> Mapping[str, tf.Tensor]:
        """Returns the values to keep of a batch, by `OUTPUT/NAME`. Called while tracing."""
        from scaleflow import objective

        reduced: dict[str, tf.Tensor] = {}
        named_targets = name_leaves(targets)
        named_outputs = name_leaves(outputs)
        for name, described in self._outputs.items():
            pair = (named_targets[name], named_outputs[name])
            form = self._forms[name]
            if form == "positions":
                values = objective.sum_positions(described, *pair)
            elif form == "best":
                values = objective.rank_classes(described, *pair)
            else:
                values = dict(zip(("target", "output"), pair, strict=True))
            reduced |= {f"{name}/{key}": value for key, value in values.items()}
        return reduced

    def begin(self) -> None:
        self.collector.clear()

    def add(self, step: int, replica: int, mask: Array, values: Mapping[str, Any]) -> None:
        from scaleflow import dataset

        is_valid = mask > 0
        share = self._feed.batching.share
        if is_valid.any():
            places = dataset.find_places(self._feed, step)[replica * share : (replica + 1) * share]
            self.collector.add(places[is_valid], {name: value[is_valid] for name, value in values.items()})


@dataclass(frozen=True)
class ExampleReader:
    """Reads the raw inputs of examples of a split by their places, [n] int64, ascending."""

    raw: Rows  # the split before its preprocessing
    inputs: InputStructure
    #: Functions that read further columns
    more: Sequence[Callable[[Array], Mapping[str, Any]]] = ()
    #: The preprocessing, by input names
    transforms: Mapping[tuple[str, ...], Callable[[Any], Any]] = field(default_factory=dict)
    has_folds: bool = False  # whether the model also takes a fold number during training; here it is -1

    def read_examples(self, examples: Array) -> tuple[Any, Any]:
        """Returns the raw inputs and the targets, [n, ...] each."""

        inputs, targets, *_ = self.raw.read(examples)
        return inputs, targets

    def preprocess(self, inputs: Any) -> Any:
        """Converts raw inputs to inputs of the model, as arrays."""
        import numpy as np

        from scaleflow import dataset

        plain = map_leaves(lambda values: values.astype(object) if values.dtype.kind in "SU" else values, inputs)
        converted = map_leaves(np.asarray, dataset.preprocess_inputs(plain, self.transforms))
        if not self.has_folds:
            return converted
        return {**converted, FOLD: np.full(len(next(iter(converted.values()))), -1, np.int32)}

    def read_columns(self, examples: Array) -> Mapping[str, Array]:
        """Returns the inputs with one value per example, and the added columns, by name: [n]."""

        columns: dict[str, Any] = {}
        if any(not spec.shape for spec in name_leaves(self.inputs).values()):
            for name, values in name_leaves(self.raw.read(examples)[0]).items():
                if values.ndim == 1:
                    columns[name or "input"] = values
        for read in self.more:
            columns |= read(examples)
        for name, values in columns.items():
            if hasattr(values, "to_numpy"):
                columns[name] = values.to_numpy()
        return columns

    def add_columns(self, read: Callable[[Array], Mapping[str, Any]]) -> ExampleReader:
        """Returns a reader with further columns, which `read` returns by name, [n] each."""
        return replace(self, more=(*self.more, read))

    def read_pictures(self, examples: Array) -> Array | None:
        """Returns the first input that is a picture, [n, height, width, channels] uint8; None if no input is one."""

        for name, described in name_leaves(self.inputs).items():
            if has_pixels(described):
                return to_pixels(name_leaves(self.raw.read(examples)[0])[name], described.scale)
        return None


def has_pixels(described: Inputs) -> bool:
    """Returns whether an input is a picture that people can look at."""
    from scaleflow.serving.reasons import is_picture_shape

    return is_picture_shape(described.shape)


def to_pixels(values: Array, scale: float | None) -> Array:
    """Converts pictures to uint8. `scale` maps values to [0, 1]; None: the range from minimum to maximum is used."""
    import numpy as np

    if values.dtype == np.uint8:
        return values
    if scale is None:
        low = float(values.min())
        high = float(values.max())
        values = values - low
        scale = 1 / ((high - low) or 1.0)
    return np.asarray(np.clip(values * (255 * scale), 0, 255), np.uint8)


@dataclass(frozen=True)
class KeptSplit:
    """The split whose predictions are kept."""

    name: str  # `test`, `validation`, `train` or `all`
    feed: Feed
    keeper: PredictionKeeper
    outputs: OutputStructure
    reader: ExampleReader
    #: Reads the column `evaluation.id` of examples; None without such a column
    read_id: Callable[[Array], Mapping[str, Any]] | None
    rule: Split  # `dataset.split` of the run
    options: EvaluationOptions  # `evaluation` of the run
    #: the functions of `evaluation.metrics` by name
    metrics: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def collect(self, worker_sync: WorkerSync, worker: int, described: Mapping[str, Any]) -> Predictions | None:
        """Returns the predictions of the last evaluation on the chief; None on other workers. All workers must call it.

        `described` has the digests of splits, as in `LearnedState.splits`.
        """
        from scaleflow.evaluation.predictions import Predictions, make_predictions_table

        collector = self.keeper.collector
        contents = worker_sync.gather(b"" if worker == 0 else collector.to_bytes(), worker)
        if worker:
            return None
        for content in contents:
            collector.merge(content)
        table = self._add_identity(make_predictions_table(self.outputs, collector))
        positions = {}
        for name, sums in collector.positions.items():
            positions[name] = {key: values.tolist() for key, values in sums.items()}
        return Predictions(
            table,
            self.outputs,
            self.name,
            examples=self.feed.examples,
            digest=described.get(self.name, {}).get("digest", ""),
            positions=positions,
            divided_by=self.rule.column or "",
        )

    def _add_identity(self, table: Any) -> Any:
        """Inserts columns after the first one that identify the examples: file, row, id, group and time."""
        import numpy as np
        import pyarrow

        from scaleflow.evaluation.collector import EXAMPLE
        from scaleflow.evaluation.predictions import FILE, ID, ROW

        places = table[EXAMPLE].to_numpy()
        raw = self.reader.raw
        files, rows = raw.locate(places)
        columns = {}
        if files is not None:
            columns[FILE] = pyarrow.array(files, pyarrow.string()).dictionary_encode()
        if rows is not None:
            columns[ROW] = pyarrow.array(rows.astype(np.int64))
        if self.read_id is not None:
            (values,) = self.read_id(places).values()
            columns[ID] = pyarrow.array(values) if isinstance(values, np.ndarray) else values
        columns |= {name: pyarrow.array(values) for name, values in read_division(self.rule, raw, places).items()}
        for place, (name, values) in enumerate(columns.items(), 1):
            table = table.add_column(place, name, values)
        return table


def choose_kept_split(feeds: BySplit[Feed], splits: Splits, source: Source, plan: Plan) -> KeptSplit | None:
    """Returns the split whose predictions are kept: test, or validation if there is no test split or it is a fold.

    Returns None if that split does not exist, or if its examples are not the raw ones, as with `debug=overfit`. Raises
    ConfigError if the data lacks the column that `evaluation.id` names.
    """
    name = "test" if feeds.test is not None and plan.dataset.fold is None else "validation"
    feed = feeds.by_name().get(name)
    if feed is None or name not in splits.raw:
        return None
    kept = make_kept_split(name, feed, splits.raw[name], source=source, plan=plan)
    return replace(kept, reader=replace(kept.reader, transforms=splits.transforms, has_folds=splits.folds > 0))


def make_kept_split(name: str, feed: Feed, raw: Rows, source: Source, plan: Plan) -> KeptSplit:
    """Makes the objects that keep the predictions of a split. Raises ConfigError if the data lacks `evaluation.id`."""
    from scaleflow.dataset.reading.division import encode_keys

    options = plan.evaluation
    rule = plan.dataset.split
    encode_keys(rule, DivisionKeys.of(raw), len(raw))  # raises an error if the keys do not fit the examples
    read_id = None if options.id is None else raw.open_columns([options.id], ID_KEY)
    return KeptSplit(
        name,
        feed,
        PredictionKeeper(source.outputs, feed),
        outputs=source.outputs,
        reader=ExampleReader(raw, source.inputs),
        read_id=read_id,
        rule=rule,
        options=options,
        metrics=bind_metrics(options.metrics or ()),
    )


def read_division(rule: Split, raw: Rows, places: Array) -> dict[str, Array]:
    """Returns the groups or times of examples as columns, if the split rule uses them and the data has them.

    New data is not divided: its groups or times are read from the column of the rule.
    """
    from scaleflow.dataset.reading.division import read_keys
    from scaleflow.evaluation.predictions import GROUP, TIME

    if rule.by not in ("group", "hash", "time"):
        return {}
    keys = DivisionKeys.of(raw).select(places)
    if keys.groups is None and keys.times is None and rule.column is not None:
        with contextlib.suppress(ConfigError):  # new data may lack the column
            read = raw.open_columns([rule.column], DIVISION_KEY)
            keys = read_keys(replace(rule, stratum=None), lambda name: read(places)[name], str)
    columns = {}
    if keys.groups is not None:
        columns[GROUP] = keys.groups
    if keys.times is not None:
        columns[TIME] = keys.times
    return columns


def keep_predictions(
    kept: KeptSplit, folder: Path, worker_sync: WorkerSync, described: Mapping[str, Any], emit: Emit, worker: int = 0
) -> Predictions | None:
    """Writes the record of the last evaluation into a folder, and reports it. All workers must call it.

    Returns the predictions on the chief. If they cannot be written, a note gives the reason, and the run continues.
    """
    from scaleflow.evaluation.predictions import PREDICTIONS, save_predictions

    predictions = kept.collect(worker_sync, worker, described)
    if predictions is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_predictions(folder / PREDICTIONS, predictions)
    except OSError as error:
        emit(Note(f"evaluation={folder}: the predictions cannot be written ({error.strerror or error})"))
        return predictions
    emit(ArtifactWritten(str(folder / PREDICTIONS), folder.name))
    return predictions
