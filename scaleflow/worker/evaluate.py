"""Runs `scaleflow.evaluate`: evaluates a saved model on a split of a dataset, every example once.

The model is the Keras file of a tracked run, which takes raw inputs. It is loaded in Keras's safe mode, which refuses
code (a Lambda, a layer that loads files). User classes come only from trusted modules, which are imported first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.config.targets import bind_target, locate_target
from scaleflow.config.trust import check_origins
from scaleflow.errors import ConfigError, RunError, read_reason
from scaleflow.interfaces import (
    EarlierState,
    Inputs,
    Objective,
    Outputs,
    OutputStructure,
    Plan,
    Rows,
    Source,
    Workers,
    describe_keys,
    label_leaf,
    map_leaves,
    name_leaves,
)
from scaleflow.interfaces.data import add_batch_dimension
from scaleflow.interfaces.events import (
    DatasetDescribed,
    Emit,
    EvaluationReady,
    MetricsLogged,
    Note,
    PhaseBegan,
    RunEnded,
)
from scaleflow.interfaces.hooks import EvaluatedSplit, KeptPredictions, ReadData, WorkerHook
from scaleflow.runs import RunFolder, Task, WorkerProcess
from scaleflow.runs.data_digest import list_split_changes
from scaleflow.runs.learned_state import read_learned_state
from scaleflow.runs.run_name import describe_data_name
from scaleflow.worker.analysis_thread import AnalysisThread
from scaleflow.worker.data import find_example_location, find_folds
from scaleflow.worker.earlier import open_source, take_whole
from scaleflow.worker.failures import guard
from scaleflow.worker.hooks import (
    call_after_data,
    call_after_test,
    call_before_test,
    call_finish_test,
    explain_no_folds,
    load_hooks,
)
from scaleflow.worker.kept_predictions import KeptSplit, keep_predictions, make_kept_split
from scaleflow.worker.metadata import describe_data, report_confusion
from scaleflow.worker.runtime import Runtime, make_evaluation_batching, setup_runtime

if TYPE_CHECKING:
    import keras

    from scaleflow.dataset import Splits
    from scaleflow.interfaces.training import Feed
    from scaleflow.training import Evaluation

#: The splits of a run, in order of preference. Without `--split`, the first that exists is evaluated.
SPLITS = ("test", "validation", "train")

#: The split name for all examples of a dataset.
ALL = "all"

#: The target of an example whose class the model does not have.
UNKNOWN_CLASS = -1

FLOATS = ("float32", "mixed_float16", "mixed_bfloat16")


@dataclass(frozen=True)
class EvaluateModel(Task):
    """Evaluates a tracked model."""

    model: str  # the path of a Keras file
    origin: str  # the model's name in messages
    #: `test`, `validation`, `train` or `all`. None: for new data without splits all examples, otherwise the first split
    #: of `SPLITS` that the dataset has
    split: str | None
    precision: bool  # whether the plan's precision replaces the model's
    command: str = ""  # the command that trusts the user code of the run
    is_new: bool = False  # whether the data differs from the run's data
    counts_unknown: bool = False  # whether an example of an unknown class counts as wrong; otherwise it is an error
    is_shown: bool = True  # whether features get the predictions, for example to make a report

    def run(self, process: WorkerProcess) -> None:
        evaluate_model(process.spec.plan, self, process.spec.files, emit=process.emit)
        process.emit(RunEnded("FINISHED"))

    def look_at_rows(
        self, rows: Rows, plan: Plan, earlier: EarlierState, workers: Workers, files: RunFolder, emit: Emit
    ) -> None:
        """Receives the rows to evaluate, before preprocessing. Features with such a task find more about them.

        Args:
            earlier: the learned state of the run that trained the model.
            files: the folder of the evaluation.
        """


@dataclass(frozen=True)
class EvaluationData:
    """The opened data of an evaluation, and the split to evaluate."""

    plan: Plan  # the plan that describes the data
    source: Source
    splits: Splits
    split: str  # the name of the evaluated split, or `ALL`
    examples: Any  # its examples
    rows: Rows  # its examples before preprocessing
    facts: DatasetDescribed  # describes the evaluated split only


def evaluate_model(plan: Plan, task: EvaluateModel, files: RunFolder, emit: Emit) -> None:
    """Evaluates a model on a split, and reports the dataset, the metrics, the confusion matrix and the profile.

    Raises ConfigError if the model cannot be loaded, or does not accept the dataset.
    """
    sys.path[:0] = [folder for folder in plan.search if folder not in sys.path]
    from scaleflow import dataset, training
    from scaleflow.objective import count_as_wrong

    emit(PhaseBegan("setting up the devices"))
    runtime = setup_runtime(plan, emit)
    check_origins(plan.config, plan.trusted_modules or ())

    emit(PhaseBegan(f"reading {describe_data_name(plan)}"))
    earlier = read_record(task)
    rule = plan.dataset.split
    hooks = load_hooks(plan, emit)
    no_folds = explain_no_folds(hooks, plan, emit)
    data = open_evaluation_data(plan, task, earlier, runtime=runtime, no_folds=no_folds, emit=emit)
    plan = data.plan
    if data.split != ALL and not task.is_new:
        emit_change(data.split, earlier, data.facts.splits[data.split], emit=emit)
    call_after_data(hooks, to_read_data(data, earlier, runtime, emit))

    emit(PhaseBegan("loading the model"))
    model = open_model(plan, task, data.source, runtime=runtime)
    task.look_at_rows(data.rows, plan, earlier, runtime.worker_sync, files, emit)
    batching = make_evaluation_batching(runtime.batching, runtime.devices.kind)
    feed = dataset.make_feed(data.examples, batching, runtime.strategy, threads=plan.dataset.threads)
    objective = make_evaluation_objective(plan, task, data.source, splits=data.splits, earlier=earlier)
    evaluate = training.Evaluation(runtime.strategy, functools.partial(compute_outputs, model), objective)
    kept = None
    if plan.evaluation.name != "none":
        kept = make_kept_split(data.split, feed, data.rows, source=data.source, plan=plan)
        kept = replace(kept, rule=rule, outputs=earlier.take_answers(data.source.outputs))
        if task.is_shown:
            call_before_test(hooks, EvaluatedSplit(plan=plan, name=data.split, rows=data.rows), emit)
        evaluate.keep_outputs(feed, kept.keeper)

    emit(PhaseBegan("evaluating all examples" if data.split == ALL else f"evaluating the {data.split} split"))
    evaluate.trace(feed)
    emit(EvaluationReady(data.split, runtime.to_values(), len(data.examples)))
    emit(data.facts)
    with hint_at_counting(task), explain_read_errors(data.splits):
        values = evaluate(feed)
    counted = count_as_wrong(values, plan.objective.loss_weights or {})
    emit(MetricsLogged(0, counted))
    with guard("the confusion matrix", emit):
        report_confusion(evaluate, {"test": feed}, data.source.outputs, files=files, emit=emit)
    if kept is not None:
        # An analysis has no examples of unknown classes, so it gives no interval to a metric that counts them.
        comparable = {name: value for name, value in values.items() if counted.get(name) == value}
        analyse_kept(kept, data, task, hooks, files, runtime, comparable, emit)
    if plan.profiler.windows:
        profile_evaluation(evaluate, feed, data, runtime, files, emit)


def open_evaluation_data(
    plan: Plan, task: EvaluateModel, earlier: EarlierState, runtime: Runtime, no_folds: str, emit: Emit
) -> EvaluationData:
    """Opens and divides the data as the run did, and chooses the split to evaluate.

    `no_folds` is the reason why no member of the model has left out a fold.
    """
    from scaleflow import dataset

    with hint_at_counting(task):
        plan, source, is_whole = open_data(plan, task, earlier)
        folds = find_folds(plan, earlier.state.sizes)
        splits = dataset.prepare_splits(
            source,
            plan.dataset,
            plan.seed,
            workers=runtime.worker_sync,
            emit=emit,
            preprocesses=False,
            folds=folds,
            no_folds=no_folds,
        )
    if is_whole:  # all examples are read as a training split
        split = ALL
        split_in_source = "train"
        examples = splits.train
    else:
        split, examples = choose_split(splits.by_name(), task.split)
        split_in_source = split
    facts = describe_data(plan, source.outputs, splits)
    facts = replace(facts, splits={split: facts.splits[split_in_source]})
    rows = splits.raw[split_in_source]
    return EvaluationData(plan, source, splits, split=split, examples=examples, rows=rows, facts=facts)


def to_read_data(data: EvaluationData, earlier: EarlierState, runtime: Runtime, emit: Emit) -> ReadData:
    """Returns the data as the hooks of features take them."""
    return ReadData(
        plan=data.plan,
        source=data.source,
        splits={data.split: data.rows},
        raw_sample=data.splits.sample,
        earlier=earlier.state.schema,
        workers=runtime.worker_sync,
        emit=emit,
        emit_late=emit,
    )


def analyse_kept(
    kept: KeptSplit,
    data: EvaluationData,
    task: EvaluateModel,
    hooks: Mapping[str, WorkerHook],
    files: RunFolder,
    runtime: Runtime,
    metrics: Mapping[str, float],
    emit: Emit,
) -> None:
    """Writes the kept predictions, passes them to features, and reports the intervals of `metrics`."""
    described = data.facts.splits
    predictions = keep_predictions(kept, files.evaluation, runtime.worker_sync, described=described, emit=emit)
    if predictions is None:
        return
    thread = AnalysisThread(predictions, kept, files)
    if task.is_shown:
        shown = KeptPredictions(
            plan=data.plan,
            folder=files.path,
            title=f"{task.origin} on {describe_data_name(data.plan)}",
            predictions=predictions,
            analyse=thread.wait,
            reader=kept.reader,
            emit=emit,
        )
        call_after_test(hooks, shown)
    thread.start()
    if task.is_shown:
        call_finish_test(hooks, emit)
    with guard("the figures of the test", emit):
        thread.finish(0, metrics, "", emit=emit)


def profile_evaluation(
    evaluate: Evaluation, feed: Feed, data: EvaluationData, runtime: Runtime, files: RunFolder, emit: Emit
) -> None:
    """Traces some batches of the evaluation."""
    from scaleflow import training
    from scaleflow.profiler.tracer import StepTracer

    facts = {
        **runtime.to_values(),
        "input": find_example_location(data.examples),
        "memory": training.measure_peaks(),
    }
    tracer = StepTracer(data.plan.profiler, files.profile, "worker-0", emit=emit, facts=lambda: facts)
    evaluate.profile(feed, tracer)


def open_model(plan: Plan, task: EvaluateModel, source: Source, runtime: Runtime) -> keras.Model:
    """Loads the model on the devices. Raises ConfigError if it cannot be loaded, or does not accept the dataset."""
    with runtime.strategy.scope():
        model = load_model(task, plan.trusted_modules or ())
        check_dataset_fits(model, source, plan, task=task)
        if task.precision:
            set_precision(model, runtime.policy)
    return model


def make_evaluation_objective(
    plan: Plan, task: EvaluateModel, source: Source, splits: Splits, earlier: EarlierState
) -> Objective:
    """Makes the loss and the metrics. With `counts_unknown` they count the examples of unknown classes."""
    from scaleflow.objective import Loader, add_unknown_count, make_objective

    loader = Loader(locate_target, bind_target)
    weighted = splits.is_weighted  # without class weights, which are for training
    objective = make_objective(source.outputs, plan.objective, is_weighted=weighted, loader=loader)
    unknown = find_counted_outputs(source.outputs, earlier) if task.counts_unknown else {}
    return add_unknown_count(objective, unknown)


def read_record(task: EvaluateModel) -> EarlierState:
    """Returns what the run of the model learned from its data."""
    state = read_learned_state(Path(task.model).parent)
    return EarlierState(state, unknown_class=UNKNOWN_CLASS if task.counts_unknown else None)


def open_data(plan: Plan, task: EvaluateModel, earlier: EarlierState) -> tuple[Plan, Source, bool]:
    """Opens the dataset. Returns the plan used, the source, and whether all examples are evaluated.

    All examples of new data are evaluated if its splits have no names and the user names no split.
    """
    from scaleflow import dataset

    is_whole = task.split == ALL
    if not is_whole and not (task.is_new and task.split is None):
        return plan, open_source(plan, earlier), False
    whole = take_whole(plan)
    source = open_source(whole, earlier)
    if is_whole or set(source.splits) == {"train"}:
        return whole, dataset.WholeSource(source), True
    return plan, source, False


def emit_change(split: str, earlier: EarlierState, described: Mapping[str, Any], emit: Emit) -> None:
    """Emits a note if a split differs from the run's split of this name."""
    before = earlier.state.splits.get(split)
    if before is not None and list_split_changes({split: before}, {split: described}):
        emit(Note(f"the {split} split is not that of the run: its data, or the options of the dataset, have changed"))


@contextlib.contextmanager
def explain_read_errors(splits: Splits) -> Iterator[None]:
    """Converts read errors to errors that name the example that caused them."""
    from scaleflow import dataset

    try:
        yield
    except Exception as error:
        raise dataset.explain_read_error(error, splits=splits.by_name()) from error


@contextlib.contextmanager
def hint_at_counting(task: EvaluateModel) -> Iterator[None]:
    """Adds to an error about an unknown class how to count such examples."""
    try:
        yield
    except (ConfigError, RunError) as error:
        if "class of the training split" not in str(error) or task.counts_unknown:
            raise
        raise type(error)(f"{error}; --unknown-classes count counts such examples as wrong") from error


def find_counted_outputs(outputs: OutputStructure, earlier: EarlierState) -> dict[str, Outputs]:
    """Returns the outputs, by name, whose examples of unknown classes are counted.

    Raises ConfigError if there is no such output.
    """
    known = name_leaves(earlier.state.outputs)
    counted = {}
    for name, described in name_leaves(outputs).items():
        if described.ignore == UNKNOWN_CLASS and name in known and known[name].ignore is None:
            counted[name] = described
    if not counted:
        raise ConfigError("--unknown-classes count: no target of the dataset is one class for each example")
    return counted


def choose_split(available: Any, split: str | None) -> tuple[str, Any]:
    """Returns the name and the examples of the split that the user chose."""
    names = [name for name in SPLITS if name in available]
    if split is not None and split not in names:
        hint = "; dataset.validation=NAME makes one of the dataset's own splits the validation split"
        raise ConfigError(f"--split {split}: there is no such split; the splits are {', '.join(names)}{hint}")
    name = split or names[0]
    return name, available[name]


def load_model(task: EvaluateModel, trusted: Sequence[str]) -> keras.Model:
    """Loads the saved model. Call it in the scope of the strategy."""
    import keras

    for name in trusted:
        with contextlib.suppress(ImportError):  # the name may be a class in a module
            importlib.import_module(name)
    try:
        return keras.models.load_model(task.model, compile=False, safe_mode=True)
    except Exception as error:  # zipfile, h5py and Keras raise many types
        from scaleflow.model import explain_load_error

        reason = explain_load_error(error, takes_trust=True)
        such = f", such as\n{task.command}" if task.command and "--trust" in reason else ""
        raise ConfigError(f"{task.origin}: its model cannot be loaded: {reason}{such}") from error


def check_dataset_fits(model: keras.Model, source: Source, plan: Plan, task: EvaluateModel) -> None:
    """Raises ConfigError if the model does not accept the dataset's inputs, or has no outputs for its targets."""
    from scaleflow.model import find_graph, make_inputs

    name = f"dataset={plan.choices.get('dataset') or plan.dataset.target.path}"
    graph = find_graph(model)
    if graph is None:  # a subclass shows its inputs only when it is called
        model_inputs = make_inputs(source.inputs)
        try:
            model_outputs = model(model_inputs)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{name}: the model of {task.origin} does not accept its inputs: {read_reason(error)}"
            ) from error
    else:
        model_inputs, model_outputs = map(to_single, graph)
    named_model_inputs = name_leaves(model_inputs)
    named_inputs = name_leaves(source.inputs)
    if set(named_model_inputs) != set(named_inputs):
        raise ConfigError(
            f"{name}: its inputs {describe_keys(source.inputs)}, but those of the model of {task.origin} "
            f"{describe_keys(model_inputs)}"
        )
    for key, inputs in named_inputs.items():
        check_input_fits(f"{name}: has {label_leaf('inputs', key)} of", named_model_inputs[key], inputs, task=task)
    named_model_outputs = name_leaves(model_outputs)
    named_outputs = name_leaves(source.outputs)
    if set(named_model_outputs) != set(named_outputs):
        raise ConfigError(
            f"{name}: its targets {describe_keys(source.outputs)}, but the outputs of the model of {task.origin} "
            f"{describe_keys(model_outputs)}"
        )
    for key, outputs in named_outputs.items():
        output_shape = tuple(named_model_outputs[key].shape[1:])
        target_shape = outputs.model_shape
        if output_shape != target_shape:
            raise ConfigError(
                f"{name}: its {outputs.kind} {label_leaf('targets', key)} need outputs of shape "
                f"{add_batch_dimension(target_shape)}, but the model of {task.origin} returns "
                f"{add_batch_dimension(output_shape)}"
            )


def to_single(structure: Any) -> Any:
    """Returns the tensor of a one-element list. Keras describes a model with a single input by such a list."""
    return structure[0] if isinstance(structure, list | tuple) and len(structure) == 1 else structure


def check_input_fits(label: str, model_input: Any, inputs: Inputs, task: EvaluateModel) -> None:
    """Rejects an input whose shape differs from the model's, and text instead of numbers or the reverse.

    `label` begins the message.
    """
    expected = tuple(model_input.shape[1:])
    shape = tuple(inputs.shape)
    mixes_text = "string" in (model_input.dtype, inputs.dtype) and model_input.dtype != inputs.dtype
    if mixes_text or not is_shape_accepted(shape, expected):
        raise ConfigError(
            f"{label} {format_shape(shape, inputs.dtype)}, but the model of {task.origin} needs "
            f"{format_shape(expected, model_input.dtype)}"
        )


def is_shape_accepted(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    """Returns whether a shape fits one in which None stands for any size."""
    if len(shape) != len(expected):
        return False
    return all(wanted in (None, size) for size, wanted in zip(shape, expected, strict=True))


def format_shape(shape: tuple[int | None, ...], dtype: str) -> str:
    return f"shape {add_batch_dimension(shape)}, {dtype}"


def set_precision(model: keras.Model, policy: str) -> None:
    """Sets the precision of a model's layers. Preprocessing keeps its precision; output layers compute in float32."""
    layers = [layer for layer in list_computing_layers(model) if layer.dtype_policy.name in FLOATS]
    last = list_output_layers(model)
    for layer in layers:
        layer.dtype_policy = "float32" if layer in last else policy


def list_output_layers(model: keras.Model) -> list[Any]:
    """Lists the layers that compute a model's outputs, including those in nested models."""
    import keras

    from scaleflow.compat.keras import find_node

    layers: list[Any] = []
    for tensor in keras.tree.flatten(model.output):
        layer = find_node(tensor)[0].operation
        if isinstance(layer, keras.Model):
            layers += list_output_layers(layer)
        else:
            layers.append(layer)
    return layers


def list_computing_layers(model: keras.Model) -> list[Any]:
    import keras

    from scaleflow.model.export import PREPROCESSING

    layers = []
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            layers += [] if layer.name.endswith(PREPROCESSING) else list_computing_layers(layer)
        else:
            layers.append(layer)
    return layers


def compute_outputs(model: keras.Model, inputs: Any) -> Any:
    """Computes the outputs in a replica: [batch, ...], float32 or float64. Called while tracing."""
    import tensorflow as tf

    return map_leaves(
        lambda tensor: tensor if tensor.dtype == tf.float64 else tf.cast(tensor, tf.float32),
        model(inputs, training=False),
    )
