"""The optimizers of Keras by their names, their arguments, weight decay of some weights, and clipped elements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from scaleflow.config.compose import ComposedConfig
from scaleflow.config.policies import LOOK
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Best, EarlyStopping
from scaleflow.launcher.prepare import make_plan
from tests.optimizer.test_fine_tuning import resume
from tests.training.fake_engine import far, follow, ignore

CONF = Path(__file__).parent.parent.parent / "conf" / "optimizer"
NAMES = sorted(path.stem for path in CONF.glob("*.yaml"))

#: What the files give that is not Keras's default; `tabular` and `lazy_adam` are no optimizers of Keras's own.
OTHER = {("adagrad", "learning_rate"): 0.01, ("sgd", "momentum"): 0.9, ("adafactor", "epsilon_1"): 1e-16}
OF_KERAS = [name for name in NAMES if name not in ("tabular", "lazy_adam")]

#: What scaleflow does in place of Keras's arguments.
NOT_TAKEN = {
    *("clipnorm", "clipvalue", "global_clipnorm", "use_ema", "ema_momentum", "ema_overwrite_frequency"),
    *("loss_scale_factor", "gradient_accumulation_steps", "name", "kwargs"),
}
BASE = ("hardware=cpu", "tracking=none", "training.global_batch_size=48", "model.units=[8, 6]", "dataset.limit=480")
ONE = "strategy=one_device"
TWO = ("strategy=mirrored", "hardware.logical_devices=2")


def list_defaults() -> dict[str, dict[str, Any]]:
    """The arguments of each optimizer that this Keras has, by the name of its file."""
    import inspect

    import keras

    found = {}
    for name in OF_KERAS:
        path = yaml.safe_load((CONF / f"{name}.yaml").read_text())["_target_"]
        assert path.startswith("keras.optimizers.")
        if (made := getattr(keras.optimizers, path.rpartition(".")[2], None)) is not None:
            parameters = inspect.signature(made).parameters
            found[name] = {key: each.default for key, each in parameters.items() if key not in NOT_TAKEN}
    return found


def test_the_files_have_the_arguments_and_defaults_of_keras(isolated: Callable[..., Any]) -> None:
    found = isolated(list_defaults)
    assert {"lion", "rmsprop", "nadam", "adafactor", "adamax", "adadelta", "ftrl", "lamb"} <= set(found)
    for name, wanted in found.items():
        values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
        del values["_target_"]
        expected = {key: OTHER.get((name, key), value) for key, value in wanted.items()}
        if name == "muon" and "rms_rate" not in expected:  # an older Keras has fewer arguments and other defaults
            assert {*values} > {*expected}
            continue
        assert values == expected, name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("optimizer.beta_1=2", "optimizer.beta_1=2: expected a number, at least 0.0, below 1.0"),
        ("optimizer=rmsprop optimizer.rho=1.0", "optimizer.rho=1.0: expected a number, at least 0.0, below 1.0"),
        ("optimizer=sgd optimizer.nesterov=yes", "optimizer.nesterov=yes: expected true or false"),
        ("optimizer=lion optimizer.weight_decay=much", "optimizer.weight_decay=much: expected a number, at least 0.0"),
        ("optimizer=nadam optimizer.epsilon=-1", "optimizer.epsilon=-1: expected a number, at least 0.0"),
        ("optimizer=muon optimizer.ns_steps=0", "optimizer.ns_steps=0: expected an integer, at least 1"),
        ("optimizer=muon strategy=parameter_server", "parameter servers hold parts of matrices; use optimizer=adamw"),
        ("optimizer._target_=keras.optimizers.ScheduleFreeAdamW", "optimizer.ema=0.99"),
        (
            "optimizer.no_decay=[bias]",
            "no weight decay, so no variable can be left out of it; set optimizer.weight_decay=0.01",
        ),
        ("optimizer.schedule=cosine_restarts", "optimizer.schedule=cosine_restarts: the schedule needs the number"),
        ("optimizer.schedule=exponential", "optimizer.final_rate=0.0: the rate falls by the same factor"),
        ("optimizer.warmup_steps=1.5", "optimizer.warmup_steps=1.5: a number of updates is whole"),
        ("optimizer.schedule=liner", "expected one of constant, cosine, step, linear, polynomial"),
        ("training.early_stopping={metric:val/loss,monitor:val/loss}", "both name the value; give one"),
        ("training.early_stopping={restore_best:true} checkpoint=none", "no checkpoint keeps the best model"),
        ("training.early_stopping={restore_best:true} checkpoint.best={monitor:train/loss}", "two values would decide"),
        ("training.early_stopping={min_delta:-1}", "min_delta=-1: expected a number, at least 0.0"),
        ("training.validate_every='2_epochs'", "this is no number of updates or of epochs; write 500"),
        ("training.max_seconds=soon", "training.max_seconds=soon: this is no time; write 600 for seconds, or 10m"),
        ("training.max_seconds=0", "training.max_seconds=0: expected a number, above 0.0 or text, or null"),
        ("training.validate_every=0", "training.validate_every=0: expected an integer, at least 1"),
        ("training.validate_every=5 training.engine=fit", "fit validates at the end of an epoch"),
        ("training.validate_every=5 dataset.validation=null", "there is no validation split; set dataset.validation"),
        ("training.validate_examples=0", "training.validate_examples=0: expected an integer, at least 1"),
        ("optimizer.clip_value=0", "optimizer.clip_value=0: expected a number, above 0.0, or null"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_starts(
    compose: Callable[..., Any], words: str, message: str
) -> None:
    from scaleflow.config.plan import check_plan

    with pytest.raises(ConfigError) as refusal:
        check_plan(make_plan(ComposedConfig(compose(*words.split(" "))), LOOK))
    assert message in str(refusal.value)


def test_restore_best_exports_the_best_checkpoint_of_the_value(plan: Callable[..., Any]) -> None:
    made = plan("training.early_stopping={metric: val/accuracy, restore_best: true}", "tracking=none")
    assert made.training.early_stopping == EarlyStopping("val/accuracy", restore_best=True)
    assert (made.checkpoint.best, made.checkpoint.export) == (Best("val/accuracy"), "best")


def train_as_keras(plan: Any) -> tuple[list[Any], list[Any]]:
    """The weights after three steps, and those of Keras's own optimizer, from the gradients of a tape."""
    import keras
    import tensorflow as tf

    from scaleflow.worker.build import build_training

    built = build_training(plan, ignore)
    model, feed = built.engine.model, built.feeds.train
    mine = keras.models.clone_model(model)
    mine.set_weights(model.get_weights())
    given = {name: value for name, value in plan.optimizer.target.arguments.items() if name != "learning_rate"}
    taken = {name: float(v) if isinstance(v, int) and not isinstance(v, bool) else v for name, v in given.items()}
    if "ns_steps" in taken:
        taken["ns_steps"] = given["ns_steps"]
    made = getattr(keras.optimizers, plan.optimizer.target.path.rpartition(".")[2])
    optimizer = made(learning_rate=plan.optimizer.learning_rate, **taken)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for inputs, targets, _ in feed.batches(1, 3).take(3):
        with tf.GradientTape() as tape:
            value = loss(targets, mine(inputs, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(value, mine.trainable_variables), mine.trainable_variables, strict=True)
        )
    built.engine.start_epoch()
    built.engine.train(feed, feed.open(0, 0), 0, 0, 3, 0)
    return [np.asarray(v) for v in model.trainable_variables], [np.asarray(v) for v in mine.trainable_variables]


def compare_optimizers(plans: dict[str, tuple[Any, Any]]) -> dict[str, tuple[float, float, bool, bool]]:
    """By name: the difference to Keras, that of two replicas to one, and whether each resumes bit for bit."""
    found = {}
    for name, (one, two) in plans.items():
        ours, wanted = train_as_keras(one)
        apart = far(follow(two, 3).weights, ours)
        found[name] = far(ours, wanted), apart, *(resume(plan, 4, "optimizer/") for plan in (one, two))
    return found


SLOW = ("muon", "rmsprop", "nadam", "adadelta", "adamax", "ftrl", "lamb", "lion")
OF_TEST = [["adafactor"], *(pytest.param([name], marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.parametrize("names", OF_TEST, ids=("adafactor", *SLOW))
def test_an_optimizer_updates_as_in_keras_on_each_strategy_and_resumes(
    isolated: Callable[..., Any], plan: Callable[..., Any], names: list[str]
) -> None:
    available = isolated(list_defaults)
    names = [name for name in names if name in available]
    words = (*BASE, "optimizer.learning_rate=0.01")
    devices = "hardware.logical_devices=2"
    plans = {
        name: (plan(*words, f"optimizer={name}", ONE, devices), plan(*words, f"optimizer={name}", *TWO))
        for name in names
    }
    for name, (difference, apart, *resumes) in isolated(compare_optimizers, plans).items():
        assert difference < 1e-5, name
        assert apart < (1e-5 if name != "lion" else 0.1), name  # a sign of a rounded 0 is another one
        assert resumes == [True, True], name


def decay_only(plans: list[Any]) -> list[list[float]]:
    """By how much each variable shrinks in a step whose gradients are 0: the mean of its elements before and after."""
    import tensorflow as tf

    from scaleflow.worker.build import build_training

    shrunk = []
    for plan in plans:
        engine = build_training(plan, ignore).engine
        variables = engine.model.trainable_variables
        for variable in variables:
            variable.assign(tf.ones(variable.shape))
        with engine.strategy.scope():
            engine.strategy.run(lambda e=engine, v=variables: e.optimizer.apply([tf.zeros(x.shape) for x in v], v))
        shrunk.append([1 - float(np.mean(v.numpy())) for v in variables])
    return shrunk


@pytest.mark.slow
def test_biases_norms_and_named_layers_are_left_out_of_weight_decay(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    words = (*BASE, "optimizer=adamw", "optimizer.learning_rate=0.1", "optimizer.weight_decay=0.5", "model=cnn")
    words = (*words, "model.filters=[4]", "model.batch_norm=true", "hardware.logical_devices=2")
    leaves = "optimizer.no_decay=[bias, norm, outputs]"
    rates = "optimizer.rate_factors={conv2d*: 0.5}"
    spread = ("strategy=mirrored", leaves)
    found = isolated(decay_only, [plan(*words, ONE), plan(*words, ONE, leaves, rates), plan(*words, *spread)])
    assert found[0] == pytest.approx([0.05] * len(found[0]), rel=1e-4)
    wanted = [0.05, 0, 0, 0.05, 0, 0, 0.05, 0, 0, 0, 0]  # three kernels, each with a norm, and the last layer
    assert found[1] == pytest.approx([0.025, *wanted[1:]], rel=1e-4)
    assert found[2] == pytest.approx(wanted, rel=1e-4)


def refuse(plans: list[Any]) -> list[str]:
    from scaleflow.worker.build import build_training

    messages = []
    for each in plans:
        with pytest.raises(ConfigError) as refusal:
            build_training(each, ignore)
        messages.append(str(refusal.value))
    return messages


def test_a_layer_that_is_not_there_and_a_decay_that_is_not_are_refused(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    words = (*BASE, ONE, "optimizer=adamw", "optimizer.no_decay=[output]")
    without = (*BASE, ONE, "optimizer.no_decay=[bias]", "optimizer=lazy_adam")
    unknown, none = isolated(refuse, [plan(*words), plan(*without)])
    assert "optimizer.no_decay=[output]: output matches no layer with weights; did you mean outputs?" in unknown
    assert "optimizer.no_decay: LazyAdam has no weight decay; set optimizer.weight_decay" in none


def clip_in_keras(plans: list[Any]) -> list[list[Any]]:
    """The weights after a step of Keras's own clipping, and of plans."""
    import keras
    import tensorflow as tf

    from scaleflow.worker.build import build_training

    built = build_training(plans[0], ignore)
    mine = built.engine.model
    optimizer = keras.optimizers.SGD(0.5, clipvalue=0.001)
    inputs, targets, _ = next(iter(built.feeds.train.batches(1, 1)))
    with tf.GradientTape() as tape:
        value = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(targets, mine(inputs, training=True))
    optimizer.apply_gradients(
        zip(tape.gradient(value, mine.trainable_variables), mine.trainable_variables, strict=True)
    )
    return [[np.asarray(v) for v in mine.trainable_variables], *(follow(plan, 1).weights for plan in plans)]


@pytest.mark.slow
def test_elements_of_gradients_are_clipped_alike_on_each_strategy(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    words = (*BASE, "optimizer=sgd", "optimizer.momentum=0", "optimizer.learning_rate=0.5")
    words = (*words, "optimizer.clip_value=0.001", "hardware.logical_devices=2")
    others = [
        ("strategy=mirrored", "training.accumulate=2"),
        ("strategy=pipeline",),
        (ONE, "precision=mixed_float16"),
    ]
    wanted, *found = isolated(clip_in_keras, [plan(*words, ONE), *(plan(*words, *other) for other in others)])
    for name, weights in zip((ONE, *others), found, strict=True):
        assert far(weights, wanted) < (2e-4 if "precision=mixed_float16" in name else 1e-6), name
