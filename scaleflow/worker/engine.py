"""Makes the model, the optimizer and the engine of a run, in the scope of its strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scaleflow.cluster.tasks import count_workers
from scaleflow.config.targets import bind_target, is_class_target, locate_target
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Batching,
    Feed,
    ForwardBackward,
    FreezePhase,
    InputStructure,
    LearnedChanges,
    MakeOptimizer,
    Objective,
    OutputStructure,
    Plan,
    Target,
)
from scaleflow.interfaces.config import Optimizer
from scaleflow.interfaces.events import Emit, Note
from scaleflow.runs.objects import KERAS_FILE
from scaleflow.worker.compiled import check_compiled
from scaleflow.worker.runtime import Runtime

if TYPE_CHECKING:
    import keras

    from scaleflow.model import SavedWeights
    from scaleflow.training import Engine, FitEngine, FreezePhases, Length, Loop


class ModelMaker:
    """Makes the model of a run: calls its factory, checks the model, and prepares its weights.

    Call the object in the strategy's scope. The model has its initial weights, frozen layers and LoRA. The coordinator
    of parameter servers makes the model twice.

    Args:
        inputs, outputs: the dataset's description.
        emit: takes notes for the user. Each note is emitted once.
        changes: what the run learned from its data other than the run whose weights it loads. None if it loads none.
    """

    def __init__(
        self,
        plan: Plan,
        inputs: InputStructure,
        outputs: OutputStructure,
        emit: Emit,
        changes: LearnedChanges | None = None,
    ) -> None:
        from scaleflow import model, objective

        self._plan = plan
        self._outputs = outputs
        self._emit = emit
        self._changes = changes
        self._emitted_notes: set[str] = set()
        self._factory = bind_target(plan.model.target, positional=2)
        loader = objective.Loader(locate_target, bind_target)
        losses = objective.find_positive_losses(outputs, plan.objective, loader)
        #: The losses that need positive outputs, in words, by output.
        self._positive_losses = {name: loss.describe() for name, loss in losses.items()}
        has_step = plan.training.step is not None
        make_model = functools.partial(model.make_model, self._call_factory, inputs, outputs, has_step=has_step)
        self._make_named_model = model.keep_names(make_model)
        self._saved_weights = self._read_weights()

    def __call__(self) -> keras.Model:
        from scaleflow import model

        net = self._make_named_model()
        model.check_tracked(net)
        if self._saved_weights is not None:
            self._emit_once(model.initialize_from(net, self._saved_weights, self._changes))
        model.fine_tune(net, self._plan.model)
        return net

    def _call_factory(self, *descriptions: Any) -> Any:
        """Calls the config's factory with the descriptions of the inputs and outputs, and checks what it returns."""
        from scaleflow import model

        plan = self._plan
        returned = self._factory(*descriptions)
        compile_config = model.find_compile_config(returned)
        if plan.model.target.path == KERAS_FILE:
            compile_config = model.read_compile_config(str(plan.model.target.arguments["path"]))
        if compile_config is not None and plan.resume is None:
            self._emit_once(check_compiled(compile_config, self._outputs, plan))
        model.check_positive(returned, self._positive_losses)
        self._emit_once(model.find_low_precision_note(returned))
        return returned

    def _read_weights(self) -> SavedWeights | None:
        """Reads the weights of `model.init_from`. Reading uses random numbers, so it seeds Keras again."""
        import keras

        from scaleflow import model

        if self._plan.weights is None:
            return None
        grown_inputs = () if self._changes is None else self._changes.grown_inputs
        weights = model.read_weights(self._plan.weights, str(self._plan.model.init_from), grown_inputs)
        keras.utils.set_random_seed(self._plan.seed)
        return weights

    def _emit_once(self, note: str | None) -> None:
        if note is not None and note not in self._emitted_notes:
            self._emitted_notes.add(note)
            self._emit(Note(note))


@dataclass(frozen=True)
class EngineMaker:
    """Makes the engine of a run."""

    plan: Plan
    runtime: Runtime
    outputs: OutputStructure
    objective: Objective  # of the whole model
    length: Length  # the length of the training
    feed: Feed  # the feed of the training split
    folds: int = 0  # the number of folds of the training split (`Splits.folds`)

    def make(self, make_model: Callable[[], keras.Model]) -> tuple[Engine, list[str]]:
        """Makes the engine (a loop or Keras's `fit`) and the model in the strategy's scope.

        Returns:
            The engine, and notes on how the model is divided into pipeline stages.
        """
        from scaleflow import optimizer, strategy, training

        engine: Engine
        notes: list[str] = []
        if self.runtime.strategy_name == "parameter_server":
            return self._make_parameter_server_loop(make_model), notes
        with self.runtime.strategy.scope():
            with strategy.variable_scope(self.runtime.strategy_name):
                net = make_model()
            phases = prepare_freeze_phases(self.plan, net)
            trained, objective = self._find_trained(net)
            remat = apply_remat(self.plan, self.runtime, trained)
            if self.plan.training.step is not None and is_class_target(self.plan.training.step):
                engine = self._make_custom_update_loop(net)
            elif self.plan.training.engine == "fit":
                engine = self._make_fit_engine(net, trained, objective)
            else:
                engine, notes = self._make_loop(net, trained, objective)
        engine.remat = remat or engine.remat
        if phases:
            engine.freezing = training.FreezePhases(net, phases)
            optimizer.count_from_own_start(engine.optimizer, engine.freezing.find_start)
        return engine, notes

    def _make_loop(self, net: keras.Model, trained: keras.Model, objective: Objective) -> tuple[Loop, list[str]]:
        """Makes the loop for a whole model or for pipeline stages. Returns it with notes for the user."""
        from scaleflow import optimizer, strategy, training

        plan = self.plan
        runtime = self.runtime
        loss = self._choose_step(objective)
        model_optimizer = self._make_optimizer(net, takes_rows=not runtime.is_divided)
        passes: ForwardBackward
        if runtime.is_divided:
            optimizer.update_in_place(model_optimizer)
            devices = runtime.devices.names
            share = runtime.batching.share
            staged, notes = strategy.divide_model(
                trained,
                objective,
                devices,
                options=plan.strategy,
                examples=share,
                is_recomputed=plan.hardware.remat is True,
            )
            passes = staged
        else:
            by_rows = can_update_by_rows(net, model_optimizer)
            passes = training.TapeForwardBackward(trained, loss, keeps_rows=by_rows)
            notes = []
        # Each freeze phase compiles anew.
        compilations = len(plan.model.freeze) if isinstance(plan.model.freeze, dict) else 1
        xla_choice = training.choose_xla(
            plan,
            net,
            self.feed,
            strategy_name=runtime.strategy_name,
            device_kind=runtime.devices.kind,
            policy=runtime.policy,
            keeps_rows=passes.keeps_rows,
            steps=self.length.total // compilations,
        )
        limit = plan.training.clip_norm
        xla = plan.hardware.xla is True
        loop_class = training.XlaLoop if xla_choice.mode == "loop" else training.Loop
        loop = loop_class(
            runtime.strategy, net, model_optimizer, objective=objective, clip_norm=limit, xla=xla, passes=passes
        )
        loop.xla = xla_choice
        if runtime.is_divided and plan.hardware.remat is True:
            loop.remat = count_of(staged.count_recomputed(), "segment")
        return loop, notes

    def _find_trained(self, net: keras.Model) -> tuple[keras.Model, Objective]:
        """Returns the model and the objective to train. Each member of an ensemble has its own loss."""
        from scaleflow.model import expose_members
        from scaleflow.objective import average_losses

        if self.plan.training.step is not None:
            return net, self.objective
        ensemble = expose_members(net, self.outputs, self.folds)
        if ensemble is None:
            return net, self.objective
        return ensemble, average_losses(self.objective)

    def _make_parameter_server_loop(self, make_model: Callable[[], keras.Model]) -> Loop:
        """Makes the loop of a coordinator. It has the model twice: on the servers, and unpartitioned in its own
        process.

        Raises ConfigError if `training.step` is a class: its optimizers would not update the variables on the servers.
        """
        import keras

        from scaleflow import training

        step = self.plan.training.step
        if step is not None and is_class_target(step):
            raise ConfigError(
                f"training.step._target_={step.path} with strategy=parameter_server: a class applies its own "
                "optimizers, which does not work with parameter servers; use a function (model, batch, weights) -> "
                "(loss, outputs)"
            )
        with self.runtime.evaluation_strategy.scope():
            local = make_model()
            evaluated, local_objective = self._find_trained(local)
            forward = functools.partial(evaluated, training=False)
            evaluation = training.Evaluation(self.runtime.evaluation_strategy, forward, local_objective)
        keras.utils.set_random_seed(self.plan.seed)  # so that both models have the same initial weights
        with self.runtime.strategy.scope():
            served = make_model()
            check_no_constraints(served)
            model_optimizer = self._make_optimizer(served, takes_rows=True)
            trained, objective = self._find_trained(served)
            remat = apply_remat(self.plan, self.runtime, trained)
            loop = training.ParameterServerLoop(
                self.runtime.strategy,
                served,
                model_optimizer,
                objective=objective,
                clip_norm=self.plan.training.clip_norm,
                passes=training.TapeForwardBackward(
                    trained,
                    self._choose_step(objective),
                    training.list_shards(served.trainable_variables),
                    keeps_rows=can_update_by_rows(served, model_optimizer),
                ),
                workers=count_workers(self.plan),
                whole=local,
                evaluation=evaluation,
            )
            loop.remat = remat or loop.remat
            return loop

    def _make_custom_update_loop(self, net: keras.Model) -> Loop:
        """Makes the loop for a user's training step that applies its own optimizers."""
        from scaleflow import training

        step = self.plan.training.step
        assert step is not None
        training.check_own_updates(self.plan, step.path, self.runtime.policy)
        return training.CustomUpdateLoop(
            strategy=self.runtime.strategy,
            model=net,
            objective=self.objective,
            outputs=self.outputs,
            own=bind_target(step)(),
            name=step.path,
            make_optimizer=self._make_optimizer_maker(net),
        )

    def _make_fit_engine(self, net: keras.Model, trained: keras.Model, objective: Objective) -> FitEngine:
        from scaleflow import training

        length = self.length
        per_loop = self.plan.training.steps_per_loop
        return training.FitEngine(
            strategy=self.runtime.strategy,
            model=net,
            trained=trained,
            optimizer=self._make_optimizer(net, takes_summed=False),
            objective=objective,
            steps_per_execution=training.choose_steps_per_execution(per_loop, length.steps_per_epoch, length.total),
        )

    def _choose_step(self, objective: Objective) -> Any:
        """Returns the function that computes the loss of a batch: the user's, or the default for the kind of target."""
        from scaleflow import training

        step = self.plan.training.step
        if step is not None:
            return training.add_checks(bind_target(step, positional=3), step.path, self.outputs)
        return training.make_loss_step(objective)

    def _make_optimizer(
        self, net: keras.Model, takes_summed: bool = True, takes_rows: bool = False
    ) -> keras.optimizers.Optimizer:
        """Makes the config's optimizer. It updates the variables of `net` or their shards.

        Args:
            takes_summed: whether its gradients are already summed over the replicas.
            takes_rows: whether gradients of embedding tables are `tf.IndexedSlices` with unique rows.
        """
        from scaleflow import model, optimizer, training

        options = self.plan.optimizer
        rate = self._make_learning_rate(options)
        scaled = self.runtime.policy == "mixed_float16"
        new_optimizer = optimizer.create_optimizer(
            bind_target(options.target), rate, loss_scaling=scaled, takes_summed=takes_summed, ema=options.ema
        )
        table_ids = model.find_table_ids(net)
        shard_counts = []
        are_tables = []
        for variable in net.trainable_variables:
            shard_counts.append(len(training.list_shards([variable])))
            are_tables.append(id(variable) in table_ids)
        optimizer.mark_tables(new_optimizer, repeat_each(are_tables, shard_counts))
        if takes_rows and can_update_by_rows(net, new_optimizer):
            optimizer.update_by_rows(new_optimizer)  # before the rate factors, which must also scale these updates
        # Keras's own weight decay of Muon works in one replica only.
        if options.rate_factors or options.no_decay or options.target.path.endswith(".Muon"):
            factors = model.find_rate_factors(net, options.rate_factors or {})
            are_decayed = model.find_decayed(net, options.no_decay) if options.no_decay else None
            optimizer.scale_rates(
                new_optimizer,
                repeat_each(factors, shard_counts),
                are_decayed and repeat_each(are_decayed, shard_counts),
            )
        if options.clip_value is not None:
            optimizer.clip_values(new_optimizer, options.clip_value)
        return new_optimizer

    def _make_learning_rate(self, options: Optimizer) -> Any:
        """Makes the learning-rate schedule; the user's own if `optimizer.schedule` has a `_target_`."""
        from scaleflow import optimizer

        schedule = self.plan.optimizer.schedule
        size = self.runtime.batching.global_size
        make_own_schedule = bind_target(schedule) if isinstance(schedule, Target) else None
        return optimizer.make_learning_rate(options, size, self.length.total, make_own_schedule=make_own_schedule)

    def _make_optimizer_maker(self, net: keras.Model) -> MakeOptimizer:
        """Returns the function that makes optimizers for user training steps. They sum gradients over the replicas."""
        from scaleflow import model, optimizer

        def make(variables: Sequence[Any], rate_factor: float = 1.0) -> keras.optimizers.Optimizer:
            options = replace(self.plan.optimizer, learning_rate=self.plan.optimizer.learning_rate * rate_factor)
            rate = self._make_learning_rate(options)
            new_optimizer = optimizer.create_optimizer(
                bind_target(self.plan.optimizer.target), rate, loss_scaling=False, takes_summed=False
            )
            tables = model.find_table_ids(net)
            optimizer.mark_tables(new_optimizer, [id(variable) in tables for variable in variables])
            if options.clip_value is not None:
                optimizer.clip_values(new_optimizer, options.clip_value)
            new_optimizer.build(list(variables))
            return new_optimizer

        return make


def prepare_freeze_phases(plan: Plan, net: keras.Model) -> list[FreezePhase]:
    """Lists the phases of `model.freeze`, if it changes the trained variables during the run.

    Raises ConfigError if a phase is impossible, or if a training step applies its own optimizers.
    """
    from scaleflow import model

    step = plan.training.step
    if plan.model.freezes_by_epoch and step is not None and is_class_target(step):
        raise ConfigError(
            f"model.freeze by epochs with training.step._target_={step.path}: it applies its own optimizers, which "
            "know nothing of it; change what trains in its update, or write a function (model, batch, weights) -> "
            "(loss, outputs)"
        )
    return model.list_freeze_phases(net, plan.model)


def apply_remat(plan: Plan, runtime: Runtime, net: keras.Model) -> str:
    """Applies `hardware.remat`: training recomputes parts of a model instead of storing them. A pipeline does it
    itself.

    Returns:
        The recomputed parts in words; empty if there are none.

    Raises ConfigError if a pattern matches no layer, or if the model cannot be divided in this way.
    """
    from scaleflow import model, strategy

    setting = plan.hardware.remat
    if setting is False or (setting is True and runtime.is_divided):
        return ""
    if setting is True:
        return count_of(len(strategy.recompute_segments(net)), "segment")
    key = f"hardware.remat=[{', '.join(setting)}]"
    layers = []
    for pattern in setting:
        layers += model.find_layers(net, pattern, key)
    return count_of(strategy.recompute_layers(layers, key, is_divided=runtime.is_divided), "layer")


def count_of(count: int, noun: str) -> str:
    """Returns a number with its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def repeat_each(values: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """Returns each value as often as its count says."""
    repeated = []
    for value, count in zip(values, counts, strict=True):
        repeated += [value] * count
    return repeated


def can_update_by_rows(net: keras.Model, model_optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an update may touch only the rows of embedding tables that a batch uses."""
    from scaleflow import model, optimizer

    return bool(model.list_tables(net)) and optimizer.find_dense_cause(model_optimizer) is None


def check_no_constraints(net: keras.Model) -> None:
    """Rejects weight constraints: Keras applies them to its own variables only, not to variables on the servers."""
    for variable in net.trainable_variables:
        if variable.constraint is not None:
            raise ConfigError(
                f"model: {variable.path} has a constraint ({type(variable.constraint).__name__}), which "
                "strategy=parameter_server does not apply; use another strategy, or remove the constraint"
            )


def find_weight_doubts(
    plan: Plan, net: keras.Model, run: Length, batching: Batching, freezing: FreezePhases | None = None
) -> dict[str, str]:
    """Returns warnings about layers that need trained weights or a longer run, by rule; empty if the config loads
    weights.

    `freezing` has the trained variables of each epoch; None: they are the same in all epochs.
    """
    from scaleflow import model

    if model.loads_weights(plan.model):
        return {}
    phases = [] if freezing is None else freezing.count_steps(run.steps_per_epoch, run.total)
    doubts = {
        "frozen": model.find_freeze_warning(net, plan.model),
        "BatchNorm": model.find_moving_average_warning(net, run.total, batching.accumulate, phases),
    }
    return {rule: text for rule, text in doubts.items() if text is not None}


def find_late_freeze_phases(plan: Plan, run: Length) -> str | None:
    """Returns a note if the run ends before a phase of `model.freeze`; otherwise None."""
    late = [epoch for epoch in plan.model.freeze or () if isinstance(epoch, int) and epoch >= run.epochs]
    if not late:
        return None
    return (
        f"model.freeze: the run ends after {count_of(run.epochs, 'epoch')}, before what is to change at epoch "
        f"{', '.join(map(str, sorted(late)))}; the first epoch is 0"
    )


def find_table_warning(plan: Plan, runtime: Runtime, engine: Engine) -> str | None:
    """Returns a warning if each step updates all rows of a large embedding table; otherwise None."""
    from scaleflow import model, optimizer

    table = model.describe_large_table(engine.model)
    cause = "training.step" if engine.optimizer is None else optimizer.find_dense_cause(engine.optimizer)
    if plan.training.engine == "fit" or runtime.is_divided:
        cause = "training.engine=fit" if plan.training.engine == "fit" else "strategy=pipeline"
    if table is None or cause is None:
        return None
    return (
        f"{cause}: each step updates {table}, not only those of its batch; optimizer=lazy_adam, optimizer=adagrad, and "
        "optimizer=sgd optimizer.momentum=0 update only those, with training.engine=loop on other strategies than "
        "pipeline"
    )
