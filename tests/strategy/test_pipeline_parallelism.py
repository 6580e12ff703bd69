"""A model in stages trains as it does in one piece, each stage on its own device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan, Strategy
from tests.conftest import Command
from tests.strategy.test_structures import assert_equal, train_all
from tests.training.fake_engine import Course, far, run_apart, take

CPU = ("hardware=cpu", "tracking=none")
ONE = ("strategy=one_device", "hardware.logical_devices=2", *CPU)
PIPELINE = ("strategy=pipeline", "hardware.logical_devices=2", *CPU)
THREE = ("strategy=pipeline", "strategy.stages=3", "hardware.logical_devices=3", *CPU)

STEPS = 50
#: The digits' 1294 training examples make 27 steps of 48 an epoch, the last one partial.
BATCH = "training.global_batch_size=48"
SGD = ("optimizer=sgd", "optimizer.learning_rate=0.1", BATCH)  # and momentum 0.9
MLP = ("model.units=[16,16]", *SGD)
CNN = ("model=cnn", "model.filters=[8,8]", "model.units=16", *SGD)
#: Adam's epsilon is such that it does not divide rounding by rounding. With the rows of another split, rounding grows
#: to 6e-5 after 40 steps.
RESNET = (
    *("model._target_=tests.strategy.models.resnet", "optimizer.learning_rate=0.01", "optimizer.epsilon=0.0001"),
    *(BATCH, "training.accumulate=2", "training.clip_norm=0.3", "dataset.split=random"),
)
NORMALISED = ("model._target_=tests.strategy.models.normalised", *SGD)

Isolated = Callable[..., Any]
Make = Callable[..., Plan]


Followed = tuple[Course, dict[str, float], list[str]]


def follow_all(plans: Sequence[Plan], steps: int) -> list[Followed]:
    return run_apart(followed, ((plan, steps) for plan in plans))


def followed(plan: Plan, steps: int) -> Followed:
    """The course of training, how the test split then is, and the notes."""
    from scaleflow.worker.build import build_training

    notes: list[str] = []
    built = build_training(plan, lambda event: notes.append(getattr(event, "text", "")))
    course = take(built.engine, built.feeds.train, steps)
    assert built.feeds.test is not None
    return course, dict(built.engine.evaluate(built.feeds.test)), notes


@pytest.mark.parametrize(
    ("recipe", "divisions"),
    [
        (MLP, [(*PIPELINE, "strategy.micro_batches=1"), PIPELINE]),
        (CNN, [(*PIPELINE, "strategy.micro_batches=1"), PIPELINE]),
        (RESNET, [THREE]),
    ],
    ids=["mlp", "cnn", "resnet"],
)
def test_float32_equals_one_device(
    isolated: Isolated, plan: Make, recipe: Sequence[str], divisions: Sequence[Sequence[str]]
) -> None:
    one = (*CPU, "strategy=one_device", *(word for word in divisions[0] if "logical_devices" in word))
    (wanted, scores, _), *others = isolated(follow_all, [plan(*recipe, *way) for way in (one, *divisions)], STEPS)
    assert np.mean(wanted.losses[-10:]) < 0.9 * np.mean(wanted.losses[:10])
    for division, (found, found_scores, _) in zip(divisions, others, strict=True):
        np.testing.assert_allclose(found.losses, wanted.losses, rtol=0, atol=1e-5, err_msg=str(division))
        assert far(found.weights, wanted.weights) < 1e-4, division
        assert found_scores == pytest.approx(scores, abs=1e-4), division


STRUCTURED = "tests.strategy.structured"
TOWERS = (
    *(f"dataset._target_={STRUCTURED}.DictOut", f"model._target_={STRUCTURED}.tied_towers", "hardware=cpu"),
    *("dataset.validation=validation", "tracking=none", "training.global_batch_size=48", "training.clip_norm=0.5"),
    *("optimizer=sgd", "optimizer.learning_rate=0.1", "hardware.logical_devices=4"),
    *("training.max_steps=7", "training.steps_per_loop=1"),
)
REPLICATED = ("strategy=pipeline", "strategy.replicas=2", "strategy.micro_batches=2", "strategy.cuts=[late]")


@pytest.mark.parametrize(
    "way",
    [
        ("training.accumulate=2",),
        pytest.param(("hardware.remat=true", "+dataset.streams=true", "dataset.cache=none"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_replicas_of_stages_give_the_losses_and_metrics_of_one_device(
    isolated: Isolated, plan: Make, way: tuple[str, ...]
) -> None:
    """Several inputs and outputs, a skip over the cut, a layer that is shared in its stage; in one process."""
    wanted, found = isolated(train_all, [plan(*TOWERS, *words) for words in (ONE[:1], (*REPLICATED, *way))])
    assert_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("mixed_float16", 5e-3), ("mixed_bfloat16", 3e-2)])
def test_mixed_precision_equals_one_device_within_its_rounding(
    isolated: Isolated, plan: Make, precision: str, tolerance: float
) -> None:
    recipe = ("model.units=16", *SGD, f"precision={precision}", "training.clip_norm=0.3", "training.accumulate=2")
    made = [plan(*recipe, *way) for way in (ONE, PIPELINE)]
    (wanted, _, _), (found, _, _) = isolated(follow_all, made, STEPS)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=0, atol=tolerance)
    assert far(found.weights, wanted.weights) < tolerance


@pytest.mark.slow
def test_batch_norm_is_equal_where_there_are_no_micro_batches_and_said_to_differ_where_there_are(
    isolated: Isolated, plan: Make
) -> None:
    ways = [ONE, (*PIPELINE, "strategy.micro_batches=1"), (*PIPELINE, "model.dropout=0.1")]
    (wanted, scores, _), (found, found_scores, notes), (noisy, _, more_notes) = isolated(
        follow_all, [plan(*NORMALISED, *way) for way in ways], 20
    )
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=0, atol=1e-5)
    assert found_scores == pytest.approx(scores, abs=1e-4)
    assert not [note for note in notes if "BatchNormalization" in note]
    assert noisy.losses[-1] < 0.7 * noisy.losses[0]
    (note,) = [note for note in more_notes if "BatchNormalization" in note]
    assert "strategy.micro_batches=4" in note
    (note,) = [note for note in more_notes if note.startswith("strategy=pipeline")]
    assert note.count("parameters") == 2


# ---------------------------------------------------------------------------------------------
# Where things are
# ---------------------------------------------------------------------------------------------

Places = dict[str, list[tuple[str, str]]]


def placed(plan: Plan) -> tuple[Places, dict[str, int]]:
    """(operation, name) of what ran on each device in two steps, and the bytes of variables and slots there."""
    from tensorflow.python.eager import context

    from scaleflow.worker.build import build_training

    built = build_training(plan, lambda event: None)
    loop = built.engine
    context.enable_run_metadata()
    loop.train(built.feeds.train, built.feeds.train.open(0, 0), 0, 0, 2, 0)
    places: Places = {}
    for graph in context.export_run_metadata().partition_graphs:
        for node in graph.node:
            places.setdefault(node.device.rpartition("device:")[2], []).append((node.op, node.name))
    held: dict[str, int] = {}
    for variable in (*loop.model.variables, *loop.optimizer.variables):
        device = variable.value.device.rpartition("device:")[2]
        held[device] = held.get(device, 0) + variable.value.shape.num_elements() * variable.value.dtype.size
    return places, held


def of(operations: list[tuple[str, str]], kind: str, part: str = "") -> list[str]:
    return [name for operation, name in operations if kind in operation and part in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "optimizer", "assigned"), [("float32", "adamw", 2), ("mixed_float16", "adam", 1)]
)
def test_a_stage_is_on_its_device_forward_backward_and_in_the_update(
    isolated: Isolated, plan: Make, precision: str, optimizer: str, assigned: int
) -> None:
    chosen = (*PIPELINE, f"precision={precision}", f"optimizer={optimizer}")
    words = ("model.units=[128,128]", "strategy.micro_batches=2", "training.accumulate=2", "training.clip_norm=1.0")
    places, held = isolated(placed, plan(*chosen, *words))
    # The stages are `dense`, and `dense_1` with `outputs`: 64 x 128 and 128 x 128 + 128 x 10 weights.
    first, second = places["CPU:0"], places["CPU:1"]
    # In each micro-batch a layer multiplies once forward, and backward once for its weights and once for its input,
    # but for the first layer, which passes nothing back.
    assert len(of(first, "MatMul")) == 2 * 2
    assert len(of(second, "MatMul")) == 2 * (3 + 3)
    assert not of(first, "MatMul", "outputs")
    assert len(of(first, "MatMul", "gradient_tape")) == 2
    assert len(of(second, "MatMul", "gradient_tape")) == 2 * (2 + 2)
    # Adam takes two roots to a variable, AdamW's decay assigns too, clipping takes the norm of each gradient.
    for operations, variables in ((first, 2), (second, 4)):
        assert len(of(operations, "Sqrt", "adam")) == 2 * variables
        assert len(of(operations, "AssignSubVariableOp")) == assigned * variables
        assert len(of(operations, "L2Loss", "global_norm")) == variables
        assert precision == "float32" or len(of(operations, "IsFinite")) >= variables
    # Of gradients only those of activations travel: one to a micro-batch, in the accumulation's loop.
    assert len(of(first, "_Recv", "gradient_tape")) == 2
    assert not of(first, "_Recv", "AddOpsRewrite")

    weights = {"CPU:0": 64 * 128 + 128, "CPU:1": 128 * 128 + 128 + 128 * 10 + 10}
    for device, numbers in weights.items():
        counters = 64  # iterations, learning rate, loss scale
        assert 0 <= held[device] - 3 * 4 * numbers <= (counters if device == "CPU:0" else 0)  # Adam's two slots


@pytest.mark.slow
def test_another_replica_computes_on_its_devices_and_holds_no_variables(isolated: Isolated, plan: Make) -> None:
    words = ("strategy=pipeline", "strategy.replicas=2", "hardware.logical_devices=4", *CPU)
    places, held = isolated(placed, plan(*words, "model.units=[128,128]", "strategy.micro_batches=2"))
    assert set(held) == {"CPU:0", "CPU:1"}
    for first, second in (("CPU:0", "CPU:1"), ("CPU:2", "CPU:3")):
        assert len(of(places[first], "MatMul")) == 2 * 2
        assert len(of(places[second], "MatMul")) == 2 * (3 + 3)


def exported(plan: Plan, folder: Path) -> np.ndarray[Any, Any]:
    """Trains a few steps and exports; gives what comes out of the stages for the sample."""
    import tensorflow as tf

    from scaleflow.worker.build import build_training

    built = build_training(plan, lambda event: None)
    built.engine.train(built.feeds.train, built.feeds.train.open(0, 0), 0, 0, 3, 0)
    built.export(folder)
    return np.asarray(tf.function(built.engine.passes.forward)(tf.constant(np.load(folder / "input_example.npy"))))


def reloaded(folder: Path, batch: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    import keras
    import tensorflow as tf

    import tests.strategy.models  # noqa: F401  # registers its layer

    sample = np.load(folder / "input_example.npy")[:batch]
    saved = tf.saved_model.load(str(folder / "saved_model"))
    return saved.serve(tf.constant(sample)).numpy(), np.asarray(keras.models.load_model(folder / "model.keras")(sample))


@pytest.mark.slow
def test_the_exported_model_is_whole_and_does_on_one_device_what_the_stages_do(
    isolated: Isolated, plan: Make, tmp_path: Path
) -> None:
    live = isolated(exported, plan(*RESNET, *THREE), tmp_path / "model")
    for outputs in isolated(reloaded, tmp_path / "model", 2):
        np.testing.assert_allclose(outputs, live[:2], atol=1e-5)


@pytest.mark.slow
def test_the_default_job_finishes_and_is_accurate(command: Command) -> None:
    ended = command(*PIPELINE, "checkpoint=none")
    assert ended.returncode == 0, ended.stderr
    assert "strategy=pipeline: rescaling to dense on CPU:0 (8,320 parameters, 30% of the estimated cost), dense_1" in (
        ended.stdout + ended.stderr
    )
    events = command.events()
    assert events[-1]["status"] == "FINISHED"
    last = {key: value for event in events for key, value in event.get("values", {}).items()}
    assert last["test/accuracy"] >= 0.95


# ---------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------


def no_pipeline(cases: list[tuple[list[str], Strategy]]) -> list[str]:
    """What is said of devices and stages that do not go together."""
    from scaleflow.strategy.pipeline_parallelism import create_pipeline_parallel

    found = []
    for devices, options in cases:
        with pytest.raises(ConfigError) as refused:
            create_pipeline_parallel(devices, options)
        found.append(str(refused.value))
    return found


def test_stages_that_are_not_as_many_as_devices_are_refused_with_what_would_work(isolated: Isolated) -> None:
    cases = {
        ("CPU:0",): (2, "there is 1", "hardware.logical_devices=2", "one_device"),
        ("CPU:0", "CPU:1"): (3, "there are 2", "hardware.logical_devices=3", "strategy.stages=2"),
        ("GPU:0",): (2, "there is 1", "more devices", "one_device"),
        ("GPU:0", "GPU:1", "GPU:2", "GPU:3"): (2, "there are 4", "strategy.replicas=2", "hardware.devices with 2 of"),
        ("GPU:0", "GPU:1", "GPU:2"): (2, "there are 3", "use strategy.stages=3"),
    }
    given = [(list(names), Strategy("pipeline", stages=stages)) for names, (stages, *_) in cases.items()]
    given.append((["GPU:0", "GPU:1"], Strategy("pipeline", stages=2, replicas=2)))
    given.append((["GPU:0", "GPU:1", "GPU:2"], Strategy("pipeline", stages=2, replicas=2)))
    *messages, two, three = isolated(no_pipeline, given)
    assert two.startswith("strategy.stages=2 strategy.replicas=2: ")
    assert "4 in all, and there are 2; use more devices, or strategy.replicas=1" in two
    assert three.endswith("strategy.stages=3 strategy.replicas=1")
    for message, (stages, *parts) in zip(messages, cases.values(), strict=True):
        assert message.startswith(f"strategy.stages={stages}: ")
        assert len(message.splitlines()) == 1
        for part in parts:
            assert part in message, message
