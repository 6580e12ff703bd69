"""The worker's half of `scaleflow.evaluate`: a saved model on a split of a dataset, every example once.

The model is the Keras file of a tracked run, which takes raw inputs. It is loaded in Keras's safe mode: what in it is
code (a Lambda, a layer that loads something) is refused, and classes of the user's are found only if their module is
trusted, which is imported for that.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.config.targets import bind_target
from scaleflow.config.trust import check_origins
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Emit, Plan, Source
from scaleflow.worker.build import find_example_location, make_evaluation_batching, setup_runtime
from scaleflow.worker.metadata import describe_data, report_confusion

if TYPE_CHECKING:
    import keras

#: The splits that a run has, in the order in which one is taken where none is named.
SPLITS = ("test", "validation", "train")

#: The folder of what a profile is made of.
PROFILE = "profile"

FLOATS = ("float32", "mixed_float16", "mixed_bfloat16")


@dataclass(frozen=True)
class EvaluationSpec:
    """What is evaluated.

    Attributes:
        model: the path of a Keras file.
        origin: what the user knows it by.
        split: `test`, `validation` or `train`; None: the first of these that there is.
        precision: compute as the plan says, not as the model was trained.
    """

    model: str
    origin: str
    split: str | None
    precision: bool


def evaluate_model(plan: Plan, measure: EvaluationSpec, folder: Path, emit: Emit) -> None:
    """Evaluates, and tells of it: `ready`, `data`, `metrics`, for classes `read_confusion`, and `profile` where asked
    for.

    Raises:
        ConfigError: if the model can't be loaded, or does not take what the dataset gives.
    """
    sys.path[:0] = [each for each in plan.search if each not in sys.path]
    from scaleflow import dataset, training
    from scaleflow.profiler.tracer import StepTracer

    runtime = setup_runtime(plan, emit)
    check_origins(plan.config, plan.trusted_modules or ())
    source = bind_target(plan.dataset.target)()
    splits = dataset.prepare_splits(source, plan.dataset, plan.seed, runtime.worker_sync, emit, preprocesses=False)
    split, examples = choose_split(splits.by_name(), measure.split)
    with runtime.strategy.scope():
        model = load_model(measure, plan.trusted_modules or ())
        check_dataset_fits(model, source, plan, measure)
        if measure.precision:
            set_precision(model, runtime.policy)
    feed = dataset.make_feed(
        examples, make_evaluation_batching(runtime.batching), runtime.strategy, threads=plan.dataset.threads
    )
    objective = training.objective_for(source.outputs)
    evaluate = training.Evaluation(runtime.strategy, functools.partial(compute_outputs, model), objective)
    evaluate.trace(feed)
    data = describe_data(plan, source.outputs, splits)
    emit("ready", split=split, resolved=runtime.to_values(), examples=len(examples))
    emit("data", **{**data, "splits": {split: data["splits"][split]}})
    try:
        values = evaluate(feed)
    except Exception as error:
        raise dataset.explain_read_error(error, splits=splits.by_name()) from error
    emit("metrics", step=0, values=dict(values))
    report_confusion(evaluate, {"test": feed}, source.outputs, folder, emit)
    if plan.profiler.windows:
        facts = {**runtime.to_values(), "input": find_example_location(examples), "memory": training.measure_peaks()}
        tracer = StepTracer(plan.profiler, folder / PROFILE, "worker-0", emit, lambda: facts)
        evaluate.profile(feed, tracer)


def choose_split(there: Any, split: str | None) -> tuple[str, Any]:
    """The split that is asked for, by its name."""
    names = [name for name in SPLITS if name in there]
    if split is not None and split not in names:
        more = "; dataset.validation=NAME makes one of the dataset's own splits the validation split"
        raise ConfigError(f"--split {split}: there is no such split; there is {', '.join(names)}{more}")
    name = split or names[0]
    return name, there[name]


def load_model(measure: EvaluationSpec, trusted: Sequence[str]) -> keras.Model:
    """The saved model, in the strategy's scope."""
    import keras

    for name in trusted:
        with contextlib.suppress(ImportError):  # the name of a class in a module
            importlib.import_module(name)
    try:
        return keras.models.load_model(measure.model, compile=False, safe_mode=True)
    except Exception as error:  # whatever zipfile, h5py and Keras raise
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"{measure.origin}: its model can't be loaded ({type(error).__name__}: {reason[:300]}); a class of your "
            "own is found if it is decorated with keras.saving.register_keras_serializable and --trust names its module"
        ) from error


def check_dataset_fits(model: keras.Model, source: Source, plan: Plan, measure: EvaluationSpec) -> None:
    """Refuses a dataset that gives something else than the model takes, or has other targets."""
    name = f"dataset={plan.choices.get('dataset') or plan.dataset.target.path}"
    of_model = model.inputs[0]
    takes, gives = tuple(of_model.shape[1:]), tuple(source.inputs.shape)
    both = (
        f"{format_shape(gives, source.inputs.dtype)}, and the model of {measure.origin} takes "
        f"{format_shape(takes, of_model.dtype)}"
    )
    is_text = "string" in (of_model.dtype, source.inputs.dtype) and of_model.dtype != source.inputs.dtype
    if is_text or len(takes) != len(gives) or any(a not in (None, b) for a, b in zip(takes, gives, strict=True)):
        raise ConfigError(f"{name}: gives inputs of {both}")
    returns, wants = tuple(model.output_shape[1:]), tuple(source.outputs.shape)
    if returns != wants:
        raise ConfigError(
            f"{name}: its {source.outputs.kind} targets need outputs of shape {add_batch_dimension(wants)}, and "
            "the model of "
            f"{measure.origin} returns {add_batch_dimension(returns)}"
        )


def format_shape(shape: tuple[int | None, ...], dtype: str) -> str:
    return f"shape {add_batch_dimension(shape)}, {dtype}"


def add_batch_dimension(shape: tuple[int | None, ...]) -> str:
    return "(batch" + "".join(f", {size}" for size in shape) + ")"


def set_precision(model: keras.Model, policy: str) -> None:
    """Has a model compute in another precision, but for its preprocessing and its outputs, which stay float32."""
    layers = [layer for layer in list_computing_layers(model) if layer.dtype_policy.name in FLOATS]
    for layer in layers[:-1]:
        layer.dtype_policy = policy
    for layer in layers[-1:]:
        layer.dtype_policy = "float32"


def list_computing_layers(model: keras.Model) -> list[Any]:
    """The layers of a model that come behind its preprocessing, in their order."""
    import keras

    found = []
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            found += [] if layer.name.endswith("_preprocessing") else list_computing_layers(layer)
        else:
            found.append(layer)
    return found


def compute_outputs(model: keras.Model, inputs: Any) -> Any:
    """Traced, in a replica: the outputs [b, ...] float32."""
    import tensorflow as tf

    return tf.cast(model(inputs, training=False), tf.float32)
