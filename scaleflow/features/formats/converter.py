"""Exports a trained model in further formats, and checks each format in its own runtime on the test split.

Converters take a portable form of the run's SavedModel: numbers in, numbers out, and a name for each tensor.
"""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.config.targets import bind_target, locate_target
from scaleflow.errors import ExportError, read_reason
from scaleflow.features.formats.events import FormatExported
from scaleflow.features.formats.feature import ExportOptions
from scaleflow.features.formats.formats import ExportFormat, PortableModel, list_formats
from scaleflow.features.formats.runtime import RuntimeProcess, start_runtime
from scaleflow.features.formats.runtimes.keras_file import IS_SAFE, MODULES
from scaleflow.interfaces import EarlierState, LearnedState, Plan, map_leaves, map_named, name_leaves
from scaleflow.interfaces.data import ANSWERS
from scaleflow.interfaces.events import Emit, PhaseBegan
from scaleflow.model import TOLERANCE, label_leaves
from scaleflow.runs.learned_state import read_learned_state
from scaleflow.runs.run_name import describe_data_name
from scaleflow.serving.layers import read_specs
from scaleflow.worker.earlier import open_source
from scaleflow.worker.evaluate import choose_split
from scaleflow.worker.kept_predictions import PredictionKeeper
from scaleflow.worker.runtime import make_evaluation_batching, setup_runtime

if TYPE_CHECKING:
    from scaleflow.evaluation.predictions import Predictions
    from scaleflow.worker.runtime import Runtime


#: File next to a format's file that describes its tensors.
DESCRIPTION = "model.json"

#: Version of the description's layout.
VERSION = 1


class SavedParts:
    """A SavedModel and its portable part, which takes and returns only numbers (`model/export.py`).

    Attributes:
        specs: specs of the portable part's arguments, by input name.
        outputs: name of each output, and of its tensor.
        wide: outputs of float64. The portable part returns them before their scaling.
    """

    def __init__(self, folder: Path) -> None:
        self._loaded = tf.saved_model.load(str(folder))
        self.serve = self._loaded.serve
        self._raw = read_specs(self.serve)
        self._preprocess = getattr(self._loaded, "preprocess", None)
        self._portable = getattr(self._loaded, "portable", None)
        specs = name_leaves(read_specs(self._portable or self.serve))
        names = label_leaves(specs)
        self.specs = {name: tf.TensorSpec(spec.shape, spec.dtype, names[name]) for name, spec in specs.items()}
        outputs = name_leaves(self.serve.concrete_functions[0].structured_outputs)
        self.outputs = {name: f"output_{n}" for n, name in enumerate(outputs)}
        self.wide = {name for name, tensor in outputs.items() if tensor.dtype == tf.float64}

    def decode_pictures(self, pictures: Any) -> Any:
        return self._loaded.decode(pictures)

    def split_off(self, raw: Any) -> dict[str, tf.Tensor]:
        """Returns the portable part's arguments for raw inputs, by input name. Traced."""
        return name_leaves(raw) if self._preprocess is None else dict(self._preprocess(raw))

    def nest_raw(self, named: Mapping[str, Any]) -> Any:
        """Returns raw inputs in the structure that `serve` takes."""
        return map_named(lambda name, _: named[name], self._raw)

    def compute(self, features: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns the outputs by tensor name. Traced."""
        if self._portable is None:
            outputs = self.serve(self.nest_raw(features))
        else:
            outputs = self._portable(dict(features))
        return {self.outputs[name]: tensor for name, tensor in name_leaves(outputs).items()}

    def write(self, folder: Path) -> PortableModel:
        """Writes a SavedModel of the portable part, with one signature of flat arguments."""
        names = list(self.specs)
        module = tf.Module()
        module.loaded = self._loaded  # keeps the variables alive
        module.portable = tf.function(
            lambda *arguments: self.compute(dict(zip(names, arguments, strict=True))),
            input_signature=list(self.specs.values()),
            autograph=False,
        )
        tf.saved_model.save(module, str(folder), {"portable": module.portable.get_concrete_function()})
        return PortableModel(folder, module.portable, {spec.name: spec for spec in self.specs.values()})

    def describe(self, state: LearnedState, takes_raw: bool) -> str:
        """Returns the text of `model.json`: what the tensors mean, and how to preprocess texts and float64 numbers."""
        learned = {} if takes_raw else state.preprocessing
        described = name_leaves(state.outputs)
        raw = name_leaves(self._raw)
        inputs = []
        for name, spec in self.specs.items():
            entry = {"name": name, "tensor": spec.name, "shape": [None, *spec.shape[1:]], "dtype": spec.dtype.name}
            if raw[name].dtype in (tf.string, tf.float64) and name in learned:
                entry["preprocessing"] = asdict(learned[name])
            inputs.append(entry)
        outputs = []
        for name, tensor in self.outputs.items():
            output = described[name]
            facts = {"kind": output.kind, "names": output.names}
            if name in self.wide and not takes_raw:
                facts["scaling"] = output.scaling
            for key in ANSWERS:
                value = getattr(output, key)
                if value is not None:
                    facts[key] = value
            outputs.append({"name": name, "tensor": tensor, **facts})
        return json.dumps({"version": VERSION, "inputs": inputs, "outputs": outputs}, indent=1)


def measure_difference(expected: Any, computed: Any) -> tuple[float, float]:
    """Returns the largest difference between two outputs, and the largest absolute value (at least 1).

    The difference is NaN if NaNs are in different places.
    """
    before = np.asarray(expected, np.float64)
    now = np.asarray(computed, np.float64)
    is_nan = np.isnan(before)
    if not np.array_equal(is_nan, np.isnan(now)):
        return float("nan"), 1.0
    known = ~is_nan
    difference = float(np.max(np.abs(before - now)[known], initial=0.0))
    return difference, float(np.max(np.abs(before[known]), initial=1.0))


Array = np.ndarray[Any, Any]

#: Number of examples for measuring time.
TIMED = 100

#: Metrics that judge a quantized format. The first one that an output has counts. Only a larger accuracy is better.
JUDGED = ("accuracy", "mae", "loss")


@dataclass(frozen=True)
class Proof:
    """The examples for comparing formats, and how to evaluate a format on them."""

    split: str  # name of the split; empty for a few examples before training
    count: int
    sample: Mapping[str, Array]  # raw inputs of some examples, [b, ...] by name
    calibration: Mapping[str, Array]  # raw inputs of training examples, [b, ...] by name
    #: Returns metrics and predictions, over the whole split, of a function from raw inputs to outputs.
    evaluate: Any = None


def convert_to_formats(plan: Plan, exported: Path, formats: Sequence[str], is_trial: bool, emit: Emit) -> None:
    """Exports the model of a folder in the given formats, and reports each result, good or not.

    An `is_trial` uses a few examples, before training.
    """
    sys.path[:0] = [folder for folder in plan.search if folder not in sys.path]
    emit(PhaseBegan("loading the model"))
    runtime = setup_runtime(plan, emit)
    state = read_learned_state(exported)
    parts = SavedParts(exported / "saved_model")
    if is_trial:
        proof = read_example_proof(exported, parts, state)
    else:
        proof = read_split(plan, state, runtime, parts=parts, emit=emit)
    reference, predictions = ({}, None) if proof.evaluate is None else proof.evaluate(parts.serve)
    converter = Converter(plan, exported, parts, state=state, proof=proof, reference=reference, predictions=predictions)
    with tempfile.TemporaryDirectory(prefix="scaleflow-portable-") as folder:
        portable = parts.write(Path(folder))
        for name in formats:
            emit(PhaseBegan(f"{'trying to export' if is_trial else 'exporting'} the model as {name}"))
            emit(converter.convert(list_formats()[name], portable))


@dataclass(frozen=True)
class Converter:
    """Converts one model to formats."""

    plan: Plan
    exported: Path
    parts: SavedParts
    state: LearnedState  # learned state of its run
    proof: Proof
    reference: Mapping[str, float]  # metrics of the SavedModel on the proof's split
    predictions: Predictions | None = None  # predictions of the SavedModel on that split

    def convert(self, form: ExportFormat, portable: PortableModel) -> FormatExported:
        """Exports one format. If it fails its checks, the result has the reason and its files are deleted."""
        path = form.locate(self.exported)
        values = dict[str, float]()
        try:
            if form.convert is not None:
                shutil.rmtree(path.parent, ignore_errors=True)
                path.parent.mkdir(parents=True)
                form.convert(portable, path, self._read_calibration)
                (path.parent / DESCRIPTION).write_text(self.parts.describe(self.state, form.takes_raw))
            elif not path.is_file():
                raise ExportError("Keras cannot write this model as a Keras file")
            if form.convert is None and self.proof.evaluate is None:
                return FormatExported(form.name, str(path))  # before training, the existence of the file is enough
            measured, predictions = self._prove(form, path)
            values |= measured
            error = self._find_fault(form, values) or self._find_lost_skill(form, predictions)
        except Exception as failed:  # converters and runtimes raise many types
            error = explain_format_error(form, failed)
        if error and form.convert is not None:
            shutil.rmtree(path.parent, ignore_errors=True)
        proof = self.proof
        return FormatExported(form.name, str(path), values, split=proof.split, examples=proof.count, error=error)

    def _read_calibration(self) -> Iterator[Mapping[str, Array]]:
        """Yields the portable part's arguments for one example at a time."""
        features = self._to_arguments(self.proof.calibration)
        for n in range(len(next(iter(features.values())))):
            yield {name: values[n : n + 1] for name, values in features.items()}

    def _to_tensors(self, named: Mapping[str, Array]) -> Any:
        """Returns raw inputs in the structure that the model takes."""
        return self.parts.nest_raw({name: tf.constant(values) for name, values in named.items()})

    def _to_arguments(self, named: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the portable part's arguments for raw inputs, by tensor name."""
        arguments = {}
        for name, tensor in self.parts.split_off(self._to_tensors(named)).items():
            arguments[str(self.parts.specs[name].name)] = tensor.numpy()
        return arguments

    def _prove(self, form: ExportFormat, path: Path) -> tuple[dict[str, float], Predictions | None]:
        """Computes the examples with the format in its own runtime.

        Returns metrics with size, time and largest difference, and the predictions for the split.
        """
        if form.convert is None:
            files = [path]
        else:
            files = [file for file in path.parent.iterdir() if file.name != DESCRIPTION]
        trusted = self.plan.trusted_modules
        modules: Sequence[str] = trusted or ()
        if trusted is None:
            module = self.plan.model.target.path.rpartition(".")[0]
            modules = [] if module.startswith(("scaleflow.", "keras")) else [module]
        environment = {
            MODULES: ",".join(modules),
            IS_SAFE: "no" if trusted is None else "yes",
            "PYTHONPATH": ":".join(filter(None, sys.path)),
        }
        with start_runtime(form, path, environment) as runtime:
            measured, predictions = self._measure(form, runtime)
            sample = self.proof.sample
            timed = dict(sample) if form.takes_raw else self._to_arguments(sample)
            measured["ms"] = runtime.measure_ms(timed)
        measured["mb"] = sum(file.stat().st_size for file in files) / 1e6
        return measured, predictions

    def _measure(self, form: ExportFormat, runtime: RuntimeProcess) -> tuple[dict[str, float], Predictions | None]:
        """Returns the metrics and the largest difference of a format, and its predictions for the split."""
        outputs = {} if self.state is None else name_leaves(self.state.outputs)
        scalings: Any = {self.parts.outputs[name]: outputs[name].scaling for name in self.parts.wide}
        comparison = RuntimeComparison(self.parts, form, runtime, scalings=scalings)
        if self.proof.evaluate is None:
            comparison.compare(self._to_tensors(self.proof.sample))
            metrics = {}
            predictions = None
        else:
            try:
                metrics, predictions = self.proof.evaluate(comparison.compare)
            except tf.errors.OpError:
                if comparison.error is not None:
                    raise comparison.error from None
                raise
        return {**metrics, "difference": comparison.difference}, predictions

    def _find_fault(self, form: ExportFormat, values: Mapping[str, float]) -> str:
        """Returns why a format fails its checks; empty if it passes."""
        options = self.plan.of(ExportOptions)
        difference = values["difference"]
        if not math.isfinite(difference):
            return "its outputs are NaN or infinite where those of the model are not"
        if not form.is_quantized:
            allowed = options.tolerance or TOLERANCE[keras.config.dtype_policy().name]
            if difference <= allowed:
                return ""
            return f"its outputs differ by {difference:.3g} of the largest one; export.tolerance allows {allowed:.3g}"
        for key, loss in find_losses(self.reference, values).items():
            if not loss <= options.int8_loss:
                what = f"{key} is {values[key]:.4g}, and {self.reference[key]:.4g} in float32"
                return f"its {what}; export.int8_loss allows {options.int8_loss:g}"
        return ""

    def _find_lost_skill(self, form: ExportFormat, predictions: Predictions | None) -> str:
        """Returns the skill that a quantized format lost although its metrics are as good; empty if none.

        For example, a constant answer has a high accuracy if one class is rare.
        """
        if not form.is_quantized or predictions is None or self.predictions is None:
            return ""
        from scaleflow.evaluation.skills import find_constant_parts, find_lost_skills, measure_skills

        known = find_constant_parts(self.predictions)
        for part in find_constant_parts(predictions):
            if part not in known:
                where = f" for {part}" if part else ""
                return f"it gives every example the same answer{where}"
        allowed = self.plan.of(ExportOptions).int8_loss
        lost = find_lost_skills(measure_skills(self.predictions), measure_skills(predictions), allowed)
        for name, (now, before) in lost.items():
            return f"its {name} is {now:.4g}, and {before:.4g} in float32; export.int8_loss allows {allowed:g}"
        return ""


class RuntimeComparison:
    """Computes in another runtime inside TensorFlow's graph, and tracks the largest difference from the SavedModel."""

    def __init__(
        self, parts: SavedParts, form: ExportFormat, runtime: RuntimeProcess, scalings: Mapping[str, Any]
    ) -> None:
        self._parts = parts
        self._form = form
        self._runtime = runtime
        self._scalings = scalings
        self._differences: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self.error: ExportError | None = None

    @property
    def difference(self) -> float:
        """The largest difference of an output, relative to this output's largest value (at least 1).

        Outputs may differ in scale, so each is measured by itself.
        """
        shares = [difference / self._largest[tensor] for tensor, difference in self._differences.items()]
        return math.nan if any(map(math.isnan, shares)) else max(shares, default=0.0)

    def compare(self, raw: Any) -> Any:
        """Returns the runtime's outputs for raw inputs, in the structure of the model's outputs. Traced."""
        expected = name_leaves(self._parts.serve(raw))
        if self._form.takes_raw:
            inputs = name_leaves(raw)
            input_names = list(inputs)
            output_names = list(expected)
        else:
            inputs = self._parts.split_off(raw)
            input_names = [str(self._parts.specs[name].name) for name in inputs]
            output_names = [self._parts.outputs[name] for name in expected]

        def compute(*arrays: Array) -> list[Array]:
            arguments = dict(zip(input_names, arrays[: len(input_names)], strict=True))
            of_model = dict(zip(output_names, arrays[len(input_names) :], strict=True))
            values = self._compute_outputs(arguments, of_model)
            return [values[name] for name in output_names]

        arguments = [*inputs.values(), *expected.values()]
        dtypes = [tensor.dtype for tensor in expected.values()]
        computed = tf.numpy_function(compute, arguments, dtypes, stateful=True)
        if not isinstance(computed, list | tuple):
            computed = [computed]
        named = {}
        for (name, tensor), values in zip(expected.items(), computed, strict=True):
            named[name] = tf.ensure_shape(values, tensor.shape)
        return named.get("", named)

    def _compute_outputs(self, arguments: Mapping[str, Array], of_model: Mapping[str, Array]) -> dict[str, Array]:
        """Computes the outputs in the runtime, and measures how much they differ from those of the model.

        Outputs with a scaling are compared before it, and returned after it.
        """
        try:
            of_runtime = self._runtime.compute(arguments)
        except ExportError as error:
            self.error = error
            raise
        values = {name: np.asarray(of_runtime[name], expected.dtype) for name, expected in of_model.items()}
        compared = dict(values)
        expected_values = dict(of_model)
        for name, (mean, deviation) in self._scalings.items():
            if self._form.takes_raw:
                compared[name] = (values[name] - mean) / deviation
            else:
                values[name] = values[name] * deviation + mean
            expected_values[name] = (of_model[name] - mean) / deviation
        for name in values:
            difference, largest = measure_difference(expected_values[name], compared[name])
            before = self._differences.get(name, 0.0)
            is_lost = math.isnan(difference) or math.isnan(before)
            self._differences[name] = math.nan if is_lost else max(before, difference)
            self._largest[name] = max(self._largest.get(name, 1.0), largest)
        return values


def find_losses(reference: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    """Returns how much metrics are worse than the reference: absolute for an accuracy, relative for an error.

    For each output, the first metric of `JUDGED` that it has counts.
    """
    losses: dict[str, float] = {}
    for output in dict.fromkeys(key.rpartition("/")[0] for key in reference):
        keys = [f"{output}/{name}" if output else name for name in JUDGED]
        existing = [key for key in keys if key in reference]
        if not existing:
            continue
        key = existing[0]
        increase = values[key] - reference[key]
        losses[key] = -increase if key.endswith("accuracy") else increase / max(abs(reference[key]), 1e-12)
    return losses


def explain_format_error(form: ExportFormat, error: Exception) -> str:
    """Returns why a format cannot be made."""
    text = str(error)
    operations = form.find_unsupported(text)
    if operations:
        return f"it cannot express {', '.join(operations)}, which this model computes"
    return re.sub(r"\s+", " ", read_reason(error))[:300]


def read_example_proof(exported: Path, parts: SavedParts, state: LearnedState) -> Proof:
    """Returns the two examples stored with an exported model. Before training they show whether it can be converted."""
    single = exported / "input_example.npy"
    if single.is_file():
        named = {"": np.load(single)}
    else:
        with np.load(exported / "input_example.npz") as arrays:
            named = dict(arrays)
    pictures = {}
    for name in state.pictures:
        pictures[name] = list(map(base64.b64decode, named[name]))
    if pictures:
        decoded = parts.decode_pictures(map_leaves(tf.constant, pictures.get("", pictures)))
        for name, tensor in name_leaves(decoded).items():
            named[name] = tensor.numpy()
    for name, values in named.items():
        if values.dtype.kind == "U":
            named[name] = values.astype(object)
    return Proof("", len(next(iter(named.values()))), named, calibration=named)


def read_split(plan: Plan, state: LearnedState, runtime: Runtime, parts: SavedParts, emit: Emit) -> Proof:
    """Returns the proof on the test split of the plan's dataset, or on its first other split.

    Raises ConfigError if the dataset cannot be read.
    """
    from scaleflow import dataset, training
    from scaleflow.evaluation.predictions import Predictions, make_predictions_table
    from scaleflow.objective import Loader, make_objective

    emit(PhaseBegan(f"reading {describe_data_name(plan)}"))
    earlier = EarlierState(state)
    source = open_source(plan, earlier)
    splits = dataset.prepare_splits(
        source, plan.dataset, plan.seed, workers=runtime.worker_sync, emit=emit, preprocesses=False
    )
    split, examples = choose_split(splits.by_name(), None)
    batching = make_evaluation_batching(runtime.batching, runtime.devices.kind)
    feed = dataset.make_feed(examples, batching, runtime.strategy, threads=plan.dataset.threads)
    loader = Loader(locate_target, bind_target)
    objective = make_objective(source.outputs, plan.objective, is_weighted=splits.is_weighted, loader=loader)

    outputs = earlier.take_answers(source.outputs)

    def evaluate(forward: Any) -> tuple[Mapping[str, float], Predictions]:
        evaluation = training.Evaluation(runtime.strategy, forward, objective)
        keeper = PredictionKeeper(outputs, feed)
        evaluation.keep_outputs(feed, keeper)
        metrics = evaluation(feed)
        table = make_predictions_table(outputs, keeper.collector)
        return metrics, Predictions(table, outputs, split, feed.examples)

    def read(chosen: str, places: Array) -> dict[str, Array]:
        inputs, *_ = splits.raw[chosen].read(places)
        return {name: np.asarray(values) for name, values in name_leaves(inputs).items()}

    count = min(plan.of(ExportOptions).calibration_examples, len(splits.train))
    drawn = np.random.default_rng([plan.seed, 0x18]).choice(len(splits.train), count, replace=False, shuffle=False)
    emit(PhaseBegan(f"evaluating the {split} split"))
    sample = read(split, np.arange(min(TIMED, len(examples))))
    calibration = read("train", np.sort(drawn))
    return Proof(split, len(examples), sample, calibration=calibration, evaluate=evaluate)
