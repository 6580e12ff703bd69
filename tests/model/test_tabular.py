"""`model=tabular`: its layers, its members, and what they promise of a whole run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs
from tests.conftest import Command
from tests.event_log import events_in

QUANTILES = tuple(np.linspace(-2, 2, 49).tolist())
COLUMNS = {
    "age": Inputs((2,), quantiles=QUANTILES),
    "constant": Inputs((1,), quantiles=(0.0,) * 49),
    "town": Inputs((30,)),
    "user": Inputs((), "int32", vocabulary=20),
    "kind": Inputs((4,)),
}


def rows(count: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    age = np.stack([random.normal(size=count), np.zeros(count)], axis=1).astype("f")
    town, kind = (np.eye(n, dtype="f")[random.integers(0, n, count)] for n in (30, 4))
    return {
        "age": age,
        "constant": np.zeros((count, 1), "f"),
        "town": town,
        "user": random.integers(0, 20, count).astype("i"),
        "kind": kind,
    }


def build_each(file: str) -> dict[str, Any]:
    import tensorflow as tf

    from scaleflow.interfaces import HELD_OUT, MEMBERS, PREDICTION, SHARES
    from scaleflow.model.make import scale_outputs
    from scaleflow.model.tabular import build, expose_members

    found: dict[str, Any] = {}
    batch = rows(6)
    for numbers in ("both", "periodic", "piecewise", "plain"):
        net = build(COLUMNS, Outputs("classification", (3,)), units=[8, 8], members=4, numbers=numbers)
        found[numbers] = np.asarray(net(batch)).shape, net.count_params()
    price = Outputs("regression", (1,), scaling=(100.0, 10.0), limits=(95.0, 110.0))
    net = build(COLUMNS, price, units=8, members=3)
    whole = scale_outputs(net, net.inputs, net.outputs, price)
    whole.save(file)
    found["loaded"] = np.asarray(tf.keras.models.load_model(file)(batch)).ravel()
    exposed = expose_members(whole, price, folds=3)
    answer = exposed({**batch, "__fold__": np.array([0, 1, 2, 0, -1, 1], "i")})
    found["members"] = np.asarray(answer[MEMBERS]).reshape(6, 3)
    found["prediction"] = np.asarray(answer[PREDICTION]).ravel()
    found["held out"] = np.asarray(answer[HELD_OUT]).ravel()
    found["shares"] = np.asarray(answer[SHARES])
    far = {**batch, "age": np.array([[1e6, 0]] * 6, "f")}
    found["far"] = np.asarray(whole(far)).ravel()
    found["no members"] = expose_members(tf.keras.Sequential([tf.keras.layers.Dense(1)]), price)
    return found


def wave(values: Any) -> Any:
    import tensorflow as tf

    from scaleflow.model.tabular import compute_waves

    x = tf.constant(values)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = compute_waves(x)
    return y.numpy(), tape.gradient(y, x).numpy()


def test_waves_are_cosines(isolated: Callable[..., Any]) -> None:
    values = np.concatenate([np.linspace(-40, 40, 40_001), np.arange(-4, 4.25, 0.25)]).astype("f")
    found, slopes = isolated(wave, values)
    angle = 2 * np.pi * values.astype("d")
    np.testing.assert_allclose(found, np.cos(angle), atol=4e-7)
    np.testing.assert_allclose(slopes, -2 * np.pi * np.sin(angle), atol=2e-4)


def test_members_predict_apart_and_their_average_is_the_prediction(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    found = isolated(build_each, str(tmp_path / "model.keras"))
    assert [found[kind][0] for kind in ("both", "periodic", "piecewise", "plain")] == [(6, 3)] * 4
    assert len({found[kind][1] for kind in ("both", "periodic", "piecewise", "plain")}) == 4
    members, limits = found["members"], (95.0, 110.0)
    assert members.std(axis=1).min() > 0.01, "members begin at different weights"
    np.testing.assert_allclose(found["prediction"], np.clip(members.mean(axis=1), *limits), rtol=1e-5)
    np.testing.assert_array_equal(found["loaded"], found["prediction"])
    left_out = [members[0, 0], members[1, 1], members[2, 2], members[3, 0], members[4].mean(), members[5, 1]]
    np.testing.assert_allclose(found["held out"], np.clip(left_out, *limits), rtol=1e-5)
    expected = np.full((6, 3), 1.5)
    expected[[0, 1, 2, 3, 5], [0, 1, 2, 0, 1]] = 0
    np.testing.assert_allclose(found["shares"], expected)
    assert (found["far"] >= 95).all()
    assert (found["far"] <= 110).all()
    assert found["no members"] is None


def count_users(numbers: str) -> dict[str, int]:
    """Returns the most members whose prediction depends on a number of a weight, by the weight."""
    import keras
    import tensorflow as tf

    from scaleflow.model.tabular import build

    columns = {**COLUMNS, "text": Inputs((7,), "int32", vocabulary=30)}
    net = build(columns, Outputs("binary", (1,)), units=[8, 8], members=4, numbers=numbers, shared=False)
    random = np.random.default_rng(0)
    for each in net.weights:  # embeddings begin as 0, and have no gradient until the layers after them differ from that
        each.assign(each + random.normal(size=each.shape) / 10)
    batch = {**rows(40), "text": random.integers(0, 30, (40, 7)).astype("i")}
    exposed = keras.Model(net.input, net.get_layer("members").output)
    users = {each.path: np.zeros(each.shape, int) for each in net.trainable_variables}
    for member in range(4):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(exposed(batch)[:, member])
        slopes = tape.gradient(total, [each.value for each in net.trainable_variables])
        for each, slope in zip(users.values(), slopes, strict=True):
            each += 0 if slope is None else np.asarray(tf.convert_to_tensor(slope)) != 0
    return {path: int(each.max()) for path, each in users.items()}


@pytest.mark.parametrize("numbers", ["both", pytest.param("periodic", marks=pytest.mark.slow)])
def test_members_that_validate_each_other_share_no_weight(isolated: Callable[..., Any], numbers: str) -> None:
    users = isolated(count_users, numbers)
    assert len(users) > 10
    assert set(users.values()) == {1}, users


def average_each() -> Any:
    from scaleflow.model.tabular import average_members

    random = np.random.default_rng(1)
    logits = random.normal(size=(4, 3, 5)).astype("f")
    classes = np.asarray(average_members(logits, Outputs("classification", (5,))))
    binary = np.asarray(average_members(logits, Outputs("binary", (5,))))
    return logits, classes, binary


def test_probabilities_are_averaged_and_not_logits(isolated: Callable[..., Any]) -> None:
    logits, classes, binary = isolated(average_each)
    exponents = np.exp(logits)
    wanted = (exponents / exponents.sum(axis=-1, keepdims=True)).mean(axis=1)
    found = np.exp(classes)
    np.testing.assert_allclose(found / found.sum(axis=-1, keepdims=True), wanted, rtol=1e-5)
    np.testing.assert_allclose(1 / (1 + np.exp(-binary)), (1 / (1 + 1 / exponents)).mean(axis=1), rtol=1e-5)


def test_the_median_becomes_0_and_the_interquartile_range_1() -> None:
    from scaleflow.model.tabular import bound, find_scaling

    scale, offset = find_scaling(np.linspace(10, 30, 49).tolist())
    assert (20 * scale + offset, 25 * scale + offset) == pytest.approx((0, 0.5))
    mostly = [0.0] * 40 + [4.0] * 9  # no interquartile range
    assert find_scaling(mostly)[0] == pytest.approx(0.5)
    assert find_scaling([7.0] * 49)[0] == 0
    assert bound(np.array([0.1, 1e9])) == pytest.approx([0.1, 3], rel=1e-3)


def test_sizes_follow_from_rows_and_columns_and_folds_from_members() -> None:
    from scaleflow.model.tabular import build

    few, many = ({str(n): Inputs(()) for n in range(count)} for count in (3, 300))
    embeddings = dict.fromkeys("012", 0)
    found = {"units": [64] * 3, "members": 8, "numbers": "both", "embeddings": embeddings, "shared": True}
    assert build.choose_sizes(few, 500) == found
    assert build.choose_sizes(few, 500, folds=8) == {**found, "shared": False}
    assert build.choose_sizes(few, 50_000) == {**found, "units": [128] * 3}
    assert build.choose_sizes(few, 200_000) == {**found, "units": [128] * 3, "members": 4}
    assert build.choose_sizes(many, 500)["numbers"] == "plain"
    assert {build.choose_sizes(each, 200_000, folds=8)["members"] for each in (few, many)} == {8}, "one for each fold"
    apart = {"shared": "by_size"}
    assert [build.count_folds({"members": count, **apart}) for count in (1, 3, 20, "by_size")] == [0, 3, 8, 8]
    assert [build.count_folds({"members": 8, **shared}) for shared in ({"shared": True}, {})] == [0, 0]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"name": Inputs((), "string")}, "name.* are text"),
        ({"picture": Inputs((8, 8, 1))}, r"picture.* have the shape \[8, 8, 1\]"),
    ],
)
def test_other_inputs_are_refused(inputs: Any, message: str) -> None:
    from scaleflow.model.tabular import build

    with pytest.raises(ConfigError, match=message):
        build(inputs, Outputs("regression", (1,)))


WORDS = (
    "model=tabular",
    "dataset=table",
    "dataset.data_dir=noise.csv",
    "dataset.target=y",
    "tracking=none",
    "hardware=cpu",
)


def write_noise(folder: Path) -> None:
    """Writes a table whose target follows from nothing: what a model learns of it is by heart."""
    random = np.random.default_rng(0)
    lines = [",".join(f"{value:.4f}" for value in row) for row in random.normal(size=(200, 5))]
    (folder / "noise.csv").write_text("\n".join(["a,b,c,d,y", *lines, ""]))


def read_values(folder: Path) -> dict[str, float]:
    values: dict[str, float] = {}
    for event in events_in(folder / "events.jsonl"):
        values |= event.get("values") or {}
    return values


def test_a_run_of_a_table_validates_out_of_fold(tmp_path: Path) -> None:
    write_noise(tmp_path)
    command = Command(tmp_path)
    long = ("training.epochs=40", "evaluation.importance=50", "checkpoint.every_epochs=10")
    done = command(*WORDS, *long, "hydra.run.dir=run", "training.steps_per_loop=5")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "training.batch_size=32" in said
    assert "model.members=8" in said
    assert "each member leaves out one of 8 parts" in said
    values = read_values(tmp_path / "run")
    assert values["train/loss"] < 0.75 * values["val/loss"], "validation is of rows that a member has not seen"
    assert values["val/loss"] > 0.9
    assert values["test/loss"] < values["val/loss"], "the best epoch is tested"
    assert "cannot be measured" not in said
    assert "cannot write" not in said, "as a .keras file"
    assert re.search(r"^noise.csv-\w+-tabular-", said, re.M)


COIN_COLUMNS = ("number", "town", "text", "day")

#: What a coin gives, by the kind of target.
COINS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "binary": lambda random, count: np.array(["no", "yes"])[random.integers(0, 2, count)],
    "classification": lambda random, count: np.array(list("abcd"))[random.integers(0, 4, count)],
    "regression": lambda random, count: random.normal(size=count).round(4),
}


def write_coins(folder: Path, count: int, kind: str = "binary", columns: Sequence[str] = COIN_COLUMNS) -> None:
    """Writes a table with columns of each kind, none of which says anything of the target."""
    random = np.random.default_rng(5)
    texts = [" ".join(f"w{word}" for word in row) for row in random.integers(0, count // 5, (count, 6))]
    days = (np.datetime64("2020-01-01") + random.integers(0, 2000, count)).astype(str)
    towns = [f"t{town}" for town in random.integers(0, count // 8, count)]
    values = {"number": random.normal(size=count).round(4), "town": towns, "text": texts, "day": days}
    named = {**{name: values[name] for name in columns}, "y": COINS[kind](random, count)}
    lines = [",".join(map(str, row)) for row in zip(*named.values(), strict=True)]
    (folder / "noise.csv").write_text("\n".join([",".join(named), *lines, ""]))


def check_chance(values: dict[str, float], kind: str, count: int) -> None:
    """Checks that a validation is at chance, within four standard errors, or worse in its loss."""
    if kind == "regression":
        assert values["val/r2"] < 4 * (2 / count) ** 0.5
        return
    share = {"binary": 0.5, "classification": 0.25}[kind]
    assert abs(values["val/accuracy"] - share) < 4 * (share * (1 - share) / count) ** 0.5
    assert values["val/loss"] > -np.log(share) * 0.97


@pytest.mark.slow
def test_a_coin_cannot_be_validated(tmp_path: Path) -> None:
    write_coins(tmp_path, 600)
    words = ("training.epochs=25", "evaluation=none", "hydra.run.dir=run", "optimizer.schedule=constant")
    done = Command(tmp_path)(*WORDS, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each member leaves out one of 8 parts" in done.stdout + done.stderr
    values = read_values(tmp_path / "run")
    assert values["train/accuracy"] > 0.9, "it is learned by heart"
    check_chance(values, "binary", 480)


@pytest.mark.slow  # the test above has all columns
@pytest.mark.parametrize(
    ("kind", "columns", "words"),
    [
        ("classification", COIN_COLUMNS, ()),
        ("regression", COIN_COLUMNS, ()),
        ("binary", ("text",), ()),
        ("binary", COIN_COLUMNS, ("model.numbers=plain",)),
        ("binary", COIN_COLUMNS, ("dataset.embed=true",)),
        ("binary", COIN_COLUMNS, ("model.members=16", "training.clip_norm=0.1")),
    ],
)
def test_a_coin_cannot_be_validated_by_any_column(
    tmp_path: Path, kind: str, columns: Sequence[str], words: Sequence[str]
) -> None:
    write_coins(tmp_path, 1500, kind, columns)
    done = Command(tmp_path)(*WORDS, f"dataset.kind={kind}", "evaluation=none", "hydra.run.dir=run", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    check_chance(read_values(tmp_path / "run"), kind, 1200)


@pytest.mark.slow  # checkpoint/test_resume.py resumes a model without members
def test_a_resumed_run_takes_the_same_sizes_and_gets_the_same_numbers(tmp_path: Path) -> None:
    write_coins(tmp_path, 200)
    command = Command(tmp_path)
    fast = ("training.epochs=6", "optimizer.schedule=constant", "training.steps_per_loop=5", "evaluation=none")
    for words in (
        (*WORDS, *fast, "hydra.run.dir=whole"),
        (*WORDS, *fast, "hydra.run.dir=part", "training.max_steps=15"),
        ("resume=part", "training.max_steps=null"),
    ):
        done = command(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    whole, part = (read_values(tmp_path / name) for name in ("whole", "part"))
    names = [name for name in whole if name.startswith(("train/", "val/", "test/"))]
    assert "test/accuracy" in names
    assert {name: part[name] for name in names} == {name: whole[name] for name in names}


TOWNS = ("Bonn", "Rom", "Ulm")


def write_answers(path: Path, seed: int, towns: tuple[str, ...], has_height: bool, has_later: bool) -> None:
    """Writes rows whose class follows from the age and the town."""
    random = np.random.default_rng(seed)
    lines = ["age,town,answer" if not has_height else "height,town,age,answer"]
    for n in range(300):
        age, town = random.integers(20, 80), towns[n % len(towns)]
        answer = "later" if has_later and town == towns[-1] else ("no", "yes")[int((age > 50) ^ (town == "Rom"))]
        lines.append(f"{age},{town},{answer}" if not has_height else f"{random.normal():.3f},{town},{age},{answer}")
    path.write_text("\n".join([*lines, ""]))


@pytest.mark.slow  # model/test_weight_mapping.py keeps weights without a run
def test_a_run_goes_on_with_other_columns_words_and_classes_and_is_evaluated(tmp_path: Path) -> None:
    write_answers(tmp_path / "first.csv", 0, TOWNS, has_height=False, has_later=False)
    write_answers(tmp_path / "second.csv", 1, (*TOWNS, "Aix"), has_height=True, has_later=True)
    write_answers(tmp_path / "new.csv", 2, (*TOWNS, "Aix"), has_height=True, has_later=True)
    command = Command(tmp_path)
    words = ("dataset=table", "dataset.target=answer", "hardware=cpu", "checkpoint.export=last")
    first = command(*words, "dataset.data_dir=first.csv", "training.epochs=20", "hydra.run.dir=first")
    assert first.returncode == 0, first.stderr
    assert re.search(r"^[\w.]+-\w+-tabular-one_device", first.stdout, re.M)
    still = ("optimizer.learning_rate=1e-9", "optimizer.weight_decay=0", "training.max_steps=1", "tracking=none")
    more = ("dataset.data_dir=second.csv", "model.init_from=first")
    kept = command(*words, *more, *still, "hydra.run.dir=kept")
    assert kept.returncode == 0, kept.stderr
    assert "1 new category (Aix)" in kept.stdout
    assert "1 new class (later)" in kept.stdout
    assert "height" in kept.stdout.partition("init_from")[2]
    second = command(*words, *more, "training.epochs=20", "hydra.run.dir=second")
    assert second.returncode == 0, second.stderr
    run_id = json.loads((tmp_path / "second" / "record.json").read_text())["run_id"]
    done = command.python("-m", "scaleflow", "evaluate", run_id, "dataset.data_dir=new.csv", "--split", "all")
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"evaluate/table\S*/accuracy +([\d.]+)", done.stdout)
    assert accuracy, done.stdout
    before, after = (read_values(tmp_path / name)["test/accuracy"] for name in ("kept", "second"))
    assert before > 0.6, "three of four rows have an old town and an old class"
    assert after > 0.9
    assert float(accuracy[1]) > 0.9
