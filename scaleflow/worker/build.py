"""Builds everything that a plan describes, in the order that TensorFlow requires.

Config groups meet only in this module. It also fills in the values that depend on the training split: `by_size`, and
the monitor of the best checkpoint.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.cluster.tasks import count_synchronous_workers, count_workers
from scaleflow.config.plan import find_batch_multiple, set_values
from scaleflow.config.targets import bind_target, locate_target
from scaleflow.config.words import TABLES
from scaleflow.errors import ConfigError, RunError
from scaleflow.interfaces import BY_SIZE, BySplit, Feed, LearnedState, Objective, Plan, Source
from scaleflow.interfaces.collector import pause_collector
from scaleflow.interfaces.config import Best
from scaleflow.interfaces.events import Emit, Note, PhaseBegan
from scaleflow.interfaces.hooks import EvaluatedSplit, TrainingData, WorkerHook
from scaleflow.runs import RunSpec
from scaleflow.runs.learned_state import write_learned_state
from scaleflow.worker.answer_rules import AnswerRules
from scaleflow.worker.data import (
    PreparedData,
    apply_debug_subset,
    check_batch_size,
    complete_record,
    find_example_location,
    make_feeds,
    make_run_objective,
    prepare_data,
    resolve_cache,
)
from scaleflow.worker.engine import (
    EngineMaker,
    ModelMaker,
    find_late_freeze_phases,
    find_table_warning,
    find_weight_doubts,
)
from scaleflow.worker.failures import explain_out_of_memory, is_out_of_memory
from scaleflow.worker.hooks import call_before_test, draw_examples
from scaleflow.worker.kept_predictions import KeptSplit, choose_kept_split
from scaleflow.worker.metadata import RunMetadata, collect_metadata
from scaleflow.worker.runtime import Runtime, StartupTimer, compute_peak, is_chief

if TYPE_CHECKING:
    from scaleflow.dataset import Splits
    from scaleflow.training import Engine, WorkerSync


#: The model function that replaces the default model of tables for keys that the default does not have.
MLP = "scaleflow.model.mlp.build"


def fill_sizes(plan: Plan, data: PreparedData) -> tuple[Plan, PreparedData, Mapping[str, Any]]:
    """Replaces `by_size` in the plan. All workers get the same numbers.

    Returns:
        The plan, the data in global batches of the new size, and the values for the `resolved.` params by key.

    Raises ConfigError if the model's function has no rule for an argument that is `by_size`.
    """
    from scaleflow import training

    examples = len(data.splits.train)
    batching = data.runtime.batching
    parts = batching.replicas * batching.accumulate * find_batch_multiple(plan)
    options = training.choose_length_by_size(plan.training, examples, parts)
    arguments = fill_arguments(plan, data)
    values: dict[str, Any] = {}
    sizes: dict[str, Any] = {}  # the values as text
    for key, value in arguments.items():
        values[f"model.{key}"] = value
        sizes[f"model.{key}"] = json.dumps(value)
    if plan.training.epochs == BY_SIZE:
        sizes["training.epochs"] = options.epochs
    if options.global_batch_size is not None and plan.training.global_batch_size is None:
        # The user types the batch size of one replica.
        sizes["training.batch_size"] = options.global_batch_size // (batching.replicas * batching.accumulate)
        data = data.divide(options)
    values |= {"training.epochs": options.epochs, "training.global_batch_size": options.global_batch_size}
    return set_values(plan, values), data, sizes


def describe_sizes(plan: Plan, sizes: Mapping[str, Any], splits: Splits) -> str:
    """Returns a note on a table's model, the values that `fill_sizes` chose, and the folds; "" if there is no such
    fact.
    """
    is_table = plan.choices.get("dataset") in TABLES
    chosen = plan.choices.get("model")
    settings = [f"{key}={value}" for key, value in sizes.items() if not str(value).startswith("{")]
    parts = []
    if settings:
        parts.append(f"{len(splits.train):,} training examples get {', '.join(settings)}")
    if splits.folds:
        parts.append(f"each member leaves out one of {splits.folds} parts of them, and is validated on that")
    if is_table and chosen == "mlp" and plan.model.target.path == MLP:
        parts = ["not model=tabular, the default of tables", *parts]
    text = "; ".join(parts)
    return f"model={chosen}: {text}" if is_table and text else text


def fill_arguments(plan: Plan, data: PreparedData) -> dict[str, Any]:
    """Returns values for the model's arguments that are `by_size`. The function's `choose_sizes` provides them.

    If the run takes the weights of another run, known sizes are kept, and sizes of new columns are added.
    """
    target = plan.model.target
    wanted = [name for name, value in target.arguments.items() if value == BY_SIZE]
    if not wanted:
        return {}
    known = choose_model_sizes(plan, data)
    for name in wanted:
        if name not in known:
            raise ConfigError(f"model.{name}={BY_SIZE}: {target.path} has no rule for it; set a number, or model=mlp")
        if isinstance(known[name], Mapping):
            known[name] = {**known[name], **data.sizes.get(name, {})}
        else:
            known[name] = data.sizes.get(name, known[name])
    return {name: known[name] for name in wanted}


def choose_model_sizes(plan: Plan, data: PreparedData) -> dict[str, Any]:
    """Returns the sizes from the `choose_sizes` of the model's function; empty without such a function."""
    choose = getattr(locate_target(plan.model.target), "choose_sizes", None)
    return {} if choose is None else dict(choose(data.splits.inputs, len(data.splits.train), data.splits.folds))


def choose_monitors(plan: Plan, validates: bool) -> Plan:
    """Replaces `auto` in `checkpoint.best` and `training.early_stopping`; without a validation
    split it turns them off.
    """
    best = plan.checkpoint.best
    stopping = plan.training.early_stopping
    if stopping is not None and stopping.monitor == "auto":
        chosen = {**vars(stopping), "monitor": Best.monitor} if validates else None
        plan = set_values(plan, {"training.early_stopping": chosen})
    if best is None or best.monitor != "auto":
        return plan
    if validates:
        return set_values(plan, {"checkpoint.best": {"monitor": Best.monitor, "mode": best.mode}})
    return set_values(plan, {"checkpoint.best": None, "checkpoint.export": "last"})


#: The resolved values that the analysis of a profile uses.
PROFILED = ("strategy", "precision", "hardware", "replicas", "global_batch_size", "cache")


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run before its first step."""

    resolved: dict[str, Any]  # the values that replace `auto` and similar words, for the `resolved.` params
    counts: dict[str, int]  # the number of examples, by split
    metadata: RunMetadata | None  # the description of the data and the model; None in processes other than the chief
    profile: dict[str, Any]
    #: The peak of all workers' devices in floating-point operations per second; None if unknown
    peak_flops: float | None
    learned: LearnedState  # learned from the data before training
    doubts: Mapping[str, str]  # warnings about the model, by their rule


@dataclass(frozen=True)
class TrainingSetup:
    """Everything that a run needs, checked and traced.

    Attributes:
        plan: the run's plan, in which numbers have replaced the words that depend on the data.
        splits: the splits after `debug.subset`.
        export: writes the trained model to a folder and returns the digest of its weights. With a second argument it
            writes the model in its present state.
        kept: the split whose predictions are kept; None if predictions are not kept.
        answers: learns from the validation rows; None if `evaluation` requests nothing.
        hooks: the hooks of the run's features, by feature name.
    """

    plan: Plan
    runtime: Runtime
    source: Source
    splits: Splits
    engine: Engine
    feeds: BySplit[Feed]
    export: Callable[..., str]
    callbacks: Sequence[Any]
    facts: RunFacts
    kept: KeptSplit | None = None
    answers: AnswerRules | None = None
    hooks: Mapping[str, WorkerHook] = field(default_factory=dict)

    def explain(self, error: Exception) -> Exception:
        """Converts an error of training to one that names the example that caused it, or how to save memory."""
        from scaleflow import dataset

        explained = dataset.explain_read_error(error, splits=self.splits.by_name())
        if is_out_of_memory(explained):
            return RunError(explain_out_of_memory(str(explained), self.plan, self.facts.resolved))
        return explained

    def learn_answers(self, worker_sync: WorkerSync, worker: int, emit: Emit) -> None:
        """Learns the answers of the trained model from the validation rows. All workers must call it."""
        if self.answers is not None:
            self.answers.learn(worker_sync, worker, emit)

    def take_answers(self, spec: RunSpec) -> TrainingSetup:
        """Returns the setup with the learned answers, and writes them into the run's record."""
        if self.answers is None:
            return self
        learned = replace(self.facts.learned, outputs=self.answers.outputs)
        if spec.records:
            write_learned_state(spec.folder, learned)
        kept = None if self.kept is None else replace(self.kept, outputs=learned.outputs)
        export = functools.partial(self.export, learned=learned)
        return replace(self, export=export, facts=replace(self.facts, learned=learned), kept=kept)


def build_training(
    plan: Plan, emit: Emit, startup_timer: StartupTimer | None = None, resumed: Path | None = None
) -> TrainingSetup:
    """Builds and traces everything, so that errors of a model or a dataset occur before the run exists.

    `resumed` is the folder of the run to resume. Raises ConfigError if the plan cannot work.
    """
    startup_timer = startup_timer or StartupTimer(time.time())
    data = prepare_data(plan, emit, startup_timer, resumed=resumed)
    setup = build_engine(plan, data, emit, startup_timer=startup_timer)
    for event in data.late:
        emit(event)
    return setup


@pause_collector()
def build_engine(plan: Plan, data: PreparedData, emit: Emit, startup_timer: StartupTimer) -> TrainingSetup:
    """Builds and traces the parts that depend on the batch size. Raises the errors of `build_training`."""
    builder = EngineBuilder(plan, data, emit)
    startup_timer.end_part("data")
    builder.build()
    startup_timer.end_part("build")
    builder.trace()
    startup_timer.end_part("trace")
    return builder.finish()


class EngineBuilder:
    """Builds the parts that depend on the batch size: first the feeds, then the model and the engine, then the rest."""

    def __init__(self, plan: Plan, data: PreparedData, emit: Emit) -> None:
        from scaleflow import dataset, training

        plan, data, self.sizes = fill_sizes(plan, data)
        self.plan = plan
        self.data = data
        self.emit = emit
        note = describe_sizes(plan, self.sizes, data.splits)
        if note:
            emit(Note(note))
        batching = data.runtime.batching
        examples = data.splits.train
        check_batch_size(plan.training, batching, len(examples))
        dataset.check_shards(plan.dataset, plan.training, examples, global_size=batching.global_size)
        self.splits = apply_debug_subset(data.splits, plan, data.runtime)
        self.training_data = TrainingData(plan=plan, splits=self.splits)
        self.drawing, self.drawn = draw_examples(data.hooks, self.training_data)
        order = None if self.drawn is None else self.drawn.order
        self.feeds = make_feeds(self.training_data, data.runtime, data.hooks, order)
        self.length = training.compute_length(plan.training, self.feeds.train)

    def build(self) -> None:
        """Builds the model and the engine, and the objects that keep and evaluate its outputs."""
        from scaleflow import model, training
        from scaleflow.objective import refuse_probabilities

        data = self.data
        splits = self.splits
        runtime = self.data.runtime
        self.emit(PhaseBegan("building the model"))
        reading = getattr(data.source, "reading", None) or {}
        model.check_preset_words(self.plan.model.target, data.source.inputs, reading)
        outputs = data.source.outputs if self.drawn is None else self.drawn.outputs
        objective = make_run_objective(self.plan, replace(splits, outputs=outputs), runtime, emit=self.emit)
        objective = refuse_probabilities(objective, splits.outputs)
        self.objective = objective
        validates = self.feeds.validation is not None
        plan = choose_monitors(self.plan, validates)
        self.plan = plan
        check_monitors(plan, objective, validates)
        train = self.feeds.train
        length = self.length
        folds = splits.folds
        maker = EngineMaker(plan, runtime, outputs, objective=objective, length=length, feed=train, folds=folds)
        make_model = ModelMaker(plan, splits.inputs, outputs, emit=self.emit, changes=data.changes)
        self.engine, self.division_notes = maker.make(make_model)
        if plan.optimizer.watched is not None:
            self.engine.plateau = training.PlateauRate(plan.optimizer, objective.modes)
        if plan.hardware.xla is True:
            training.check_xla(self.engine.model, splits.inputs, runtime.strategy)
        self.kept = self._keep_outputs()
        check_metric_names({} if self.kept is None else self.kept.metrics, objective)
        self.answers = self._find_answers()

    def trace(self) -> None:
        """Traces and compiles the training step and the evaluations."""
        self.emit(PhaseBegan("compiling the training step"))
        feeds = self.feeds.by_name().values()
        if not self.engine.begin_freeze_phase(0, *feeds):
            self.engine.trace(*feeds)
        self.engine.end_freeze_phase()

    def finish(self) -> TrainingSetup:
        """Emits notes for the user, and returns the complete setup."""
        plan = self.plan
        engine = self.engine
        runtime = self.data.runtime
        doubts = find_weight_doubts(plan, engine.model, self.length, runtime.batching, freezing=engine.freezing)
        if self.drawn is not None:
            doubts[self.drawing] = self.drawn.note
        for note in filter(None, (*self.division_notes, *self._find_warnings(), *doubts.values())):
            self.emit(Note(note))
        facts = self._collect_facts(doubts)
        return TrainingSetup(
            plan,
            runtime,
            self.data.source,
            splits=self.splits,
            engine=engine,
            feeds=self.feeds,
            export=self._make_export(facts.learned),
            callbacks=self._make_callbacks(),
            facts=facts,
            kept=self.kept,
            answers=self.answers,
            hooks=self.data.hooks,
        )

    def _collect_facts(self, doubts: Mapping[str, str]) -> RunFacts:
        """Returns the facts about the run that `ready` reports and that its records keep."""
        plan = self.plan
        splits = self.splits
        outputs = self.data.source.outputs
        resolved = {**self._list_values(), **self.sizes}
        metadata = None
        if is_chief(plan):
            metadata = collect_metadata(plan, outputs, splits, model=self.engine.model, objective=self.objective)
        sizes = choose_model_sizes(plan, self.data)
        known = {name: plan.model.target.arguments.get(name, size) for name, size in sizes.items()}
        more = {"input": find_example_location(splits.train), "shards": plan.dataset.shards}
        return RunFacts(
            resolved,
            dict(splits.counts()),
            metadata,
            profile={name: resolved[name] for name in PROFILED} | more,
            peak_flops=compute_peak(plan, self.data.runtime),
            learned=complete_record(self.data.splits.learned, metadata, known),
            doubts=doubts,
        )

    def _find_warnings(self) -> Iterator[str | None]:
        """Yields warnings about the model, the length and the data; None for each check that passed."""
        from scaleflow import dataset, model, optimizer
        from scaleflow.objective import find_mask_note

        plan = self.plan
        runtime = self.data.runtime
        splits = self.splits
        net = self.engine.model
        yield model.keras_file_doubt(net)
        yield find_mask_note(net, splits.outputs)
        yield from model.find_batch_norm_warnings(net, runtime.read_batching(runtime.batching))
        yield optimizer.find_warm_up_warning(plan.optimizer, self.length.total)
        yield find_late_freeze_phases(plan, self.length)
        yield find_table_warning(plan, runtime, self.engine)
        yield dataset.describe_shards(plan.dataset.shards, splits.train, count_synchronous_workers(plan))
        if plan.dataset.check != "none" and is_chief(plan):
            yield from find_order_warnings(plan, splits)

    def _list_values(self) -> dict[str, Any]:
        """Returns the values that the config leaves open and the run has chosen, for the `resolved.` params."""
        from scaleflow import optimizer

        plan = self.plan
        runtime = self.data.runtime
        engine = self.engine
        length = self.length
        values = {
            **runtime.to_values(),
            "workers": count_workers(plan),
            "learning_rate": optimizer.scale_to_batch(plan.optimizer, runtime.batching.global_size),
            "cache": resolve_cache(plan, self.splits),
            "xla": str(engine.xla),
            "remat": engine.remat,
            "steps": length.total,
            "steps_per_epoch": length.steps_per_epoch,
            "epochs": length.epochs,
            "parameters": engine.model.count_params(),
            "trainable_parameters": sum(math.prod(variable.shape) for variable in engine.model.trainable_variables),
        }
        if engine.freezing is not None:
            values["trainable_parameters_by_epoch"] = json.dumps(engine.freezing.parameters)
        return values

    def _make_callbacks(self) -> list[Any]:
        """Makes the callbacks of `training.callbacks`."""
        from scaleflow import training

        callbacks = []
        for target in self.plan.training.callbacks or ():
            callbacks.append(training.make_callback(bind_target(target), target.path))
        return callbacks

    def _make_export(self, learned: LearnedState) -> Callable[..., str]:
        """Makes the function that exports the model to a folder and returns the digest of its weights."""
        from scaleflow import model

        engine = self.engine
        runtime = self.data.runtime
        source = self.data.source
        splits = self.splits

        def export(folder: Path, is_trial: bool = False, learned: LearnedState = learned) -> str:
            trained = engine.gather_model() if is_trial else model.merge_lora(engine.finish_model())
            model.write_model(
                model.calibrate_outputs(trained, splits.inputs, learned.outputs),
                source.inputs,
                learned.outputs,
                batch=splits.sample,
                policy=runtime.policy,
                folder=folder,
                on_host=runtime.is_divided,
                raw=model.RawInputs(splits.preprocessing_layers, getattr(source, "decoders", {})),
            )
            write_learned_state(folder, learned)
            return model.digest_weights(trained)

        return export

    def _find_answers(self) -> AnswerRules | None:
        """Makes the rules that learn answers from the validation rows; None if `evaluation` requests nothing."""
        plan = self.plan
        outputs = self.data.source.outputs
        keys = [*plan.evaluation.learned, *(["evaluation.threshold"] if plan.evaluation.own_threshold else [])]
        if not keys and not plan.answers:
            return None
        if isinstance(outputs, Mapping) and keys:
            raise ConfigError(f"{keys[0]}: is for one output, and the dataset has {len(outputs)}; leave it out")
        assert not isinstance(outputs, Mapping)  # only a run with one output has such answers
        return AnswerRules(plan, self.engine, self.feeds, outputs=outputs, kept=self.kept)

    def _keep_outputs(self) -> KeptSplit | None:
        """Makes evaluations keep the predictions of the test split, as `evaluation` configures it."""
        if self.plan.evaluation.name == "none":
            return None
        if self.data.runtime.strategy_name == "tpu":
            why = "predictions are not kept, and there is no report of them; evaluate the model later"
            self.emit(Note(f"strategy=tpu: {why}"))
            return None
        kept = choose_kept_split(self.feeds, self.splits, self.data.source, plan=self.plan)
        if kept is not None:
            split = EvaluatedSplit(plan=self.plan, name=kept.name, rows=kept.reader.raw)
            call_before_test(self.data.hooks, split, self.emit)
            self.engine.keep_outputs(kept.feed, kept.keeper)
        return kept


def find_order_warnings(plan: Plan, splits: Splits) -> Iterator[str | None]:
    """Yields notes if data is ordered by its targets and the run reads only a part of it."""
    from scaleflow import dataset

    if not plan.debug.overfit:
        yield dataset.describe_stream_order(splits.train, splits.outputs, plan.dataset.shuffle)
    limits = {"dataset.limit": (plan.dataset.limit, {"train": splits.train})}
    if splits.validation is not None:
        validated = plan.training.validate_examples
        limits["training.validate_examples"] = validated, {"validation": splits.validation}
    for key, (limit, limited) in limits.items():
        for name, examples in limited.items():
            if limit is not None:
                yield dataset.describe_first_examples(f"{key}={limit}", name, examples, splits.outputs)


def check_metric_names(own: Mapping[str, Any], objective: Objective) -> None:
    """Raises ConfigError if a function of `evaluation.metrics` has the same name as a metric of training."""
    names = {"loss"}
    for measure in (*objective.measures, *objective.evaluation_measures):
        names.update(measure.names)
    twice = own.keys() & names
    if twice:
        raise ConfigError(f"evaluation.metrics: the run has a metric {min(twice)} already; rename the function")


def check_monitors(plan: Plan, objective: Objective, validates: bool) -> None:
    """Raises ConfigError if a monitor names a metric that the run does not have."""
    from scaleflow import training

    monitors = {
        "training.early_stopping": plan.training.early_stopping,
        "checkpoint.best": plan.checkpoint.criterion,
        "optimizer.plateau": plan.optimizer.watched,
    }
    for key, monitor in monitors.items():
        training.check_monitor(
            key, monitor, objective, validates=validates, has_callbacks=bool(plan.training.callbacks)
        )
