"""`scaleflow check`, the look at data in each run, and the comparison of new data with what a run has learned."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.features.checks.events import DataChecked
from scaleflow.interfaces.events import Note
from tests.conftest import Command

ROWS = 400


def write_rows(
    path: Path, seed: int, shift: float = 0.0, town: str = "Thun", **more: Callable[[int, str], Any]
) -> None:
    """Writes a table of people; `more` are columns that are made of the row's number and its target."""
    random = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["age", "town", *more, "buys"])
        for n in range(ROWS):
            age = random.normal(40, 10)
            buys = "yes" if age + random.normal(0, 10) > 42 else "no"
            towns = ("Bern", "Chur", town if n % 3 else "Chur")
            rows.writerow([f"{age + shift:.2f}", towns[n % 3], *(make(n, buys) for make in more.values()), buys])


def read_table(name: str) -> tuple[str, ...]:
    return ("dataset=csv", f"dataset.data_dir={name}", "dataset.target=buys")


def answer_of(command: Command, *words: str, code: int) -> Any:
    """The object that a command prints with `--json`."""
    ended = command(*words, "--json")
    assert ended.returncode == code, ended.stderr + ended.stdout
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_user_checks_data_trains_and_compares_new_data_with_the_run(tmp_path: Path) -> None:
    command = Command(tmp_path)
    write_rows(tmp_path / "bad.csv", 0, number=lambda n, _: n, same=lambda *_: 1, coded=lambda _, buys: len(buys))
    write_rows(tmp_path / "first.csv", 1)
    write_rows(tmp_path / "new.csv", 2)
    write_rows(tmp_path / "other.csv", 3, shift=30, town="Paris", more=lambda n, _: n % 7)
    bad, first = read_table("bad.csv"), read_table("first.csv")

    found = answer_of(command, "check", *bad, code=1)
    assert {(each["rule"], *each["columns"]) for each in found["findings"] if each["level"] == "fault"} == {
        ("id column", "number"),
        ("leak", "coded"),
    }
    assert found["splits"]["train"] == {"examples": 320, "looked_at": 320}
    page = Path(found["report"]).read_text()
    assert found["findings"][0]["text"] in page
    assert not {'src="http', "@import", "<script"} & set(page.split())
    assert "id column" in answer_text(command, *bad, "dataset.check=refuse")
    assert not list(tmp_path.glob("outputs/*/*/learned_state.json"))  # there was no run

    small = ("model=linear", "training.max_steps=3", "checkpoint=none", "tracking.system_metrics=false")
    trained = answer_of(command, *first, *small, "hardware=cpu", code=0)
    assert answer_of(command, "check", *read_table("new.csv"), "--against", trained["folder"], code=0)["findings"] == []
    against = answer_of(command, "check", *read_table("other.csv"), "--against", trained["run_id"], code=1)
    assert {(each["rule"], *each["columns"]) for each in against["findings"]} >= {
        ("drift", "age"),
        ("range", "age"),
        ("unseen", "town"),
        ("column", "more"),
    }
    predicted = command.python(
        "-m", "scaleflow", "predict", trained["run_id"], "--input", "other.csv", "--output", "p.csv"
    )
    assert predicted.returncode == 0, predicted.stderr
    assert "drift        age: its distribution has changed" in predicted.stdout
    assert "new columns  more: not in training, not used" in predicted.stdout
    evaluated = command.python("-m", "scaleflow", "evaluate", trained["run_id"], "dataset.data_dir=other.csv")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "note: dataset.check: age: its distribution has changed" in evaluated.stdout
    assert "are not in training: 'Paris' (" in evaluated.stdout
    assert "are not used: more" in evaluated.stdout


def answer_text(command: Command, *words: str) -> str:
    """Why a run is refused."""
    ended = command(*words, "tracking=none")
    assert ended.returncode == 2, ended.stdout
    assert ended.stderr.startswith("scaleflow: dataset.check=refuse: number: a different value in each row")
    assert "and 1 more finding;" in ended.stderr
    return "id column"


def test_a_wrong_command_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    from scaleflow.features.checks.check import make_check_plan

    for words, message in {
        (*read_table("nothing.csv"),): "dataset.data_dir=nothing.csv: there is no such file",
        ("strategy=multi_worker", "cluster.workers=2"): "data checks are computed in one process",
    }.items():
        with pytest.raises(ConfigError, match=message):
            make_check_plan(words, (), 9)
    with pytest.raises(ConfigError, match="--examples 0: expected at least 1"):
        make_check_plan((), (), 0)


def look_at_each(folder: Path) -> dict[str, Any]:
    """In a child: what is found in folders of pictures and texts, in arrays, and in corpora."""
    from PIL import Image

    from scaleflow.features.checks.check import make_check_plan
    from scaleflow.features.checks.look import look_at_dataset

    random = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (folder / "photos" / name).mkdir(parents=True)
        (folder / "texts" / name).mkdir(parents=True)
        for n in range(30):
            noise = Image.fromarray(random.integers(0, 255, (6, 6, 3), np.uint8)).resize((24, 24))
            noise.save(folder / "photos" / name / f"{n}.png")
            (folder / "texts" / name / f"{n}.txt").write_text(" ".join(map(str, random.integers(0, 99, 9))))
    (folder / "photos/bee/again.png").write_bytes((folder / "photos/ant/3.png").read_bytes())
    (folder / "photos/bee/broken.png").write_bytes((folder / "photos/ant/3.png").read_bytes()[:90])
    (folder / "texts/bee/again.txt").write_bytes((folder / "texts/ant/3.txt").read_bytes())
    (folder / "texts/bee/too.txt").write_bytes((folder / "texts/ant/4.txt").read_bytes())
    inputs = random.normal(size=(200, 3)).astype("float32")
    inputs[:, 1] = 5
    np.savez(folder / "arrays.npz", x=inputs, y=random.integers(0, 2, 200))
    (folder / "corpus.txt").write_text("one two three four five " * 900)
    kinds = {
        "photos": ("dataset=image_folder", f"dataset.data_dir={folder}/photos", "dataset.size=[24,24]"),
        "photos, allowed": (
            *("dataset=image_folder", f"dataset.data_dir={folder}/photos", "dataset.size=[24,24]"),
            "dataset.on_bad_example=skip",
        ),
        "texts": ("dataset=text_folder", f"dataset.data_dir={folder}/texts"),
        "arrays": ("dataset=npz", f"dataset.data_dir={folder}/arrays.npz"),
        "corpus": ("dataset=tokens", f"dataset.data_dir={folder}/corpus.txt", "dataset.tokens=16"),
        "several outputs": ("experiment=multi_task",),
        "targets of pixels": ("experiment=segmentation",),
    }
    found: dict[str, Any] = {}
    for name, words in kinds.items():
        events: list[Any] = []
        page = folder / f"{name}.html"
        look_at_dataset(make_check_plan(words, (), 5000), page, 5000, emit=events.append)
        (checked,) = (each for each in events if isinstance(each, DataChecked))
        found[name] = (
            [each["rule"] for each in checked.findings if each["level"] != "hint"],
            checked.splits,
            page.read_text().count("<img"),
        )
    return found


@pytest.mark.slow  # the other modules have the rules
def test_each_kind_of_dataset_is_looked_at(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(look_at_each, tmp_path)
    rules = {name: set(each[0]) for name, each in found.items()}
    assert rules["photos"] >= {"unreadable", "contradicting labels"}
    assert rules["photos, allowed"] == rules["photos"] - {"unreadable"}
    assert "contradicting labels" in rules["texts"]
    assert rules["arrays"] == {"constant column"}
    assert found["photos"][2] == 2  # a sheet for each class
    assert all(each[1]["train"]["looked_at"] == each[1]["train"]["examples"] > 0 for each in found.values())


def read_spread_of(folder: Path) -> dict[str, Any]:
    """In a child: the examples that are read of arrays, tables, records and streams."""
    import tensorflow as tf

    from scaleflow.dataset.batches.records import cache_records
    from scaleflow.dataset.batches.rows import to_rows
    from scaleflow.dataset.table import Table
    from scaleflow.interfaces import Arrays, Stream

    values = np.arange(100, dtype=np.float32)
    lines = "".join(f"{n},{'yes' if n % 2 else 'no'}\n" for n in range(100))
    (folder / "rows.csv").write_text(f"x,y\n{lines}")
    (folder / "long.csv").write_text(f"x,y\n{30 * lines}")
    pairs = tf.data.Dataset.from_tensor_slices((values, values))
    loaded: dict[str, Any] = {
        "arrays": Arrays(values, values),
        "table": Table(str(folder / "rows.csv"), "y", test=0.0).load("train"),
        "large table": Table(str(folder / "rows.csv"), "y", test=0.0, learn_on=10).load("train"),
        "records": cache_records("train", to_rows(Stream(pairs, 100, decode=lambda x, y: (x, y)))),
        "stream": Stream(pairs, 100),
    }
    splits, found = {name: to_rows(each) for name, each in loaded.items()}, {}
    for name, examples in splits.items():
        places, (inputs, *_) = examples.read_spread(5)
        numbers = inputs["x"] if isinstance(inputs, dict) else inputs
        found[name] = np.asarray(numbers).tolist(), examples.is_spread
        assert found[name][0] == places.tolist()
    found["whole stream"] = np.asarray(splits["stream"].read_spread(5, reads_all=True)[1][0]).tolist(), True
    drawn = Table(str(folder / "long.csv"), "y", test=0.1, learn_on=10).load("test")
    found["drawn"] = len(drawn.read_spread(200)[0]), len(drawn)
    found["all"] = np.asarray(splits["table"].read_spread(500)[1][0]["x"]).tolist(), True
    return found


def test_a_sample_is_spread_over_the_split(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(read_spread_of, tmp_path)
    for name in ("arrays", "table", "records", "whole stream"):
        assert found[name] == (found["arrays"][0], True), name
    assert found["arrays"][0] == sorted(set(found["arrays"][0]))
    assert found["arrays"][0][-1] > 50
    assert len(found["large table"][0]) == 5
    assert found["drawn"] == (200, 300)
    assert found["stream"] == ([0, 1, 2, 3, 4], False)
    assert found["all"][0] == list(range(100))


def test_what_cannot_be_read_is_no_fault_if_the_user_leaves_it_out() -> None:
    from scaleflow.features.checks.look import judge_left_out

    for begin, option, level in (
        *(
            ("skip: left out ", "auto", "fault"),
            ("skip: left out ", "raise", "fault"),
            ("skip: left out ", "skip", "hint"),
        ),
        *(("left out: ", "auto", "hint"), ("left out: ", "raise", "fault"), ("left out: ", "skip", "hint")),
    ):
        found = judge_left_out(f"{begin}a.png", option, "left out: ")
        assert (found.level, found.text) == (level, "a.png"), (begin, option)


def test_findings_are_told_as_the_user_wants() -> None:
    from scaleflow.features.checks.hook import report_findings
    from scaleflow.worker.data import tell_unread

    def tell(check: str, *levels: str, error: str = "") -> list[str]:
        events: list[Any] = []
        found = [{"text": f"finding {n}", "because": "a rule", "level": level} for n, level in enumerate(levels)]
        if error:
            tell_unread(error, check, events.append)
        else:
            report_findings(found, check, events.append)
        assert all(isinstance(each, Note) for each in events)
        return [each.text for each in events]

    assert tell("warn", "fault", "hint") == ["dataset.check: finding 0 (a rule)", "dataset.check: finding 1 (a rule)"]
    assert tell("warn", *7 * ["fault"])[-1] == "dataset.check: 2 more findings; scaleflow check shows all"
    assert tell("refuse", "hint") == ["dataset.check: finding 0 (a rule)"]
    with pytest.raises(ConfigError, match=r"dataset.check=refuse: finding 1 \(a rule\), and 1 more finding; "):
        tell("refuse", "hint", "drift", "fault")
    assert tell("warn", error="odd") == ["dataset.check=warn: the data cannot be looked at (odd)"]
    with pytest.raises(ConfigError, match=r"cannot be looked at \(odd\); use dataset.check=none"):
        tell("refuse", error="odd")


def test_a_resumed_run_compares_with_its_first_data_and_keeps_their_schema(isolated: Callable[..., Any]) -> None:
    before, again, other, none = isolated(look_twice)
    assert before["rows"] == 200
    assert again == (before, [])
    assert other[0] == before
    assert "input[0]: its distribution has changed" in other[1][0]
    assert none == (before, [])


def look_twice() -> Any:
    """In a child: the schemas, and the notes, of a run and of others that resume it."""
    from dataclasses import replace

    from scaleflow import dataset
    from scaleflow.dataset.batches.splits import SingleProcess
    from scaleflow.features.checks.check import make_check_plan
    from scaleflow.features.checks.hook import DataChecks
    from scaleflow.interfaces import Arrays, EarlierState, Inputs, Outputs
    from scaleflow.worker.data import make_look

    class Points:
        inputs = Inputs((2,), "float32")
        outputs = Outputs("regression", (1,))
        splits = ("train",)

        def __init__(self, shift: float) -> None:
            self.shift = shift

        def load(self, split: str) -> Arrays:
            values = np.random.default_rng(1).normal(self.shift, 1, (200, 2)).astype("float32")
            return Arrays(values, np.random.default_rng(2).normal(size=(200, 1)).astype("float32"))

    plan = make_check_plan((), (), 9)

    def look(shift: float, earlier: Any = None, check: str = "warn") -> Any:
        notes: list[Any] = []
        changed = replace(plan, dataset=replace(plan.dataset, validation=None, check=check))
        source, arguments = Points(shift), (earlier, earlier is not None, SingleProcess(), notes.append, notes.append)
        looking = make_look(changed, {"checks": DataChecks()}, source, *arguments)
        learned = dataset.prepare_splits(source, changed.dataset, 0, look=looking).learned
        assert learned is not None
        return learned, [each.text for each in notes]

    first = EarlierState(look(0)[0])
    later = (look(0, first), look(3, first), look(3, first, "none"))
    assert look(0, check="none")[0].schema == {}
    return dict(first.state.schema), *((dict(state.schema), notes) for state, notes in later)


def look_for_groups(folder: Path) -> dict[str, Any]:
    """In a child: what runs say and keep of visits of customers, whose column is dropped."""
    from dataclasses import replace

    from scaleflow import dataset
    from scaleflow.dataset.batches.splits import SingleProcess
    from scaleflow.dataset.table import Table
    from scaleflow.features.checks.check import make_check_plan
    from scaleflow.features.checks.hook import DataChecks
    from scaleflow.interfaces import Split
    from scaleflow.worker.data import make_look

    random = np.random.default_rng(0)
    of = random.permutation(np.repeat(np.arange(60), 20))
    like, answers = random.normal(size=(60, 2)).round(3), random.integers(0, 2, 60)
    rows = [f"K{n:03d},{like[n][0]},{like[n][1]},{random.normal():.3f},{answers[n]}\n" for n in of]
    (folder / "visits.csv").write_text("customer,a,b,c,bought\n" + "".join(rows))
    plan = make_check_plan((), (), 9)

    def look(**options: Any) -> Any:
        notes: list[Any] = []
        rule = options.get("split", Split("auto"))
        source = Table(str(folder / "visits.csv"), "bought", drop=["customer"], **options)
        changed = replace(plan, dataset=replace(plan.dataset, validation=0.1, split=rule))
        hooks = {"checks": DataChecks()}
        looking = make_look(changed, hooks, source, None, False, SingleProcess(), notes.append, notes.append)
        learned = dataset.prepare_splits(source, changed.dataset, 0, look=looking).learned
        assert learned is not None
        return [each.text for each in notes], learned.schema["together"]

    by_group = look(split=Split("group", "customer"))
    return {"whole": look(), "read while training": look(learn_on=100), "by group": by_group}


def test_rows_of_a_dropped_column_are_found_by_each_run(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(look_for_groups, tmp_path)
    for name in ("whole", "read while training"):
        notes, (kept,) = found[name]
        assert notes[0].startswith("dataset.check: rows of one customer are alike (20 each); test figures are too good")
        assert "dataset.split='{by: group, column: customer}'" in notes[0]
        assert kept["rule"] == "groups"
    assert found["by group"][1] == []


def test_that_the_data_cannot_be_looked_at_is_told_after_they_were_read(plan: Any) -> None:
    """If they cannot be read either, the run has that error alone."""
    from scaleflow.worker.data import make_look

    now: list[Any] = []
    late: list[Any] = []
    workers = SimpleNamespace(from_chief=lambda find: find())
    look = make_look(plan(), {}, None, None, False, workers, emit=now.append, late=late.append)  # type: ignore[arg-type]
    assert look is not None
    look(SimpleNamespace())  # type: ignore[arg-type]
    assert now == []
    assert "the data cannot be looked at" in late[0].text
