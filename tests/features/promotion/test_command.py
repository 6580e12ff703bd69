"""`scaleflow promote`, and `promotion=champion` in a run: real runs, models that are served, a registry in SQLite."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Command


def read_versions(folder: Path, name: str, run_id: str) -> tuple[dict[str, str], Any, str, list[str]]:
    """The aliases, the decision about the version of a run, the tag of the run, and the pages of the run."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    aliases = {alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()}
    versions = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
    tags = client.get_model_version(name, versions[0].version).tags if versions else {}
    pages = [each.path for each in client.list_artifacts(run_id, "promotion")]
    tag = client.get_run(run_id).data.tags.get("scaleflow.promotion", "")
    return aliases, json.loads(tags.get("scaleflow.promotion", "null")), tag, pages


def answer_of(done: Any, code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def promote(command: Command, *words: str, code: int = 0) -> dict[str, Any]:
    return answer_of(command.python("-m", "scaleflow", "promote", "--json", *words), code)


def test_a_better_model_becomes_the_champion(command: Command, isolated: Callable[..., Any]) -> None:
    run = ("--json", "dataset=digits", "tracking.system_metrics=false")
    registered = ("tracking.register_as=digits", "tracking.alias=champion")
    answer_of(command(*run, "training.max_steps=3", *registered))
    champion = ("promotion=champion", "promotion.model=digits")
    done = command(*run, "training.epochs=5", *champion)
    second = answer_of(done)
    line = "promoted models:/digits/2 is the champion, before it was version 1"
    assert done.stdout.splitlines()[-2].split() == line.split()
    aliases, decision, tag, pages = isolated(read_versions, command.folder, "digits", second["run_id"])
    assert (aliases, tag, pages) == ({"champion": "2"}, "digits, version 2: champion", ["promotion/digits.html"])
    assert (decision["is_good"], decision["compared_with"]) == (True, "1")
    assert decision["smoke"]["difference"] < 1e-5
    comparison = decision["comparison"]
    assert (comparison["examples"], comparison["left_out"]) == (359, 0)
    assert 0 < comparison["low"] < comparison["gain"] < comparison["high"]
    for file, why in (
        ("no.csv", "there is no such file or folder"),
        (".", "it has no dataset.data_dir"),
    ):
        refused = command.python("-m", "scaleflow", "promote", second["run_id"], "--model", "digits", "--on", file)
        assert (refused.returncode, f"--on {file}: " in refused.stderr, why in refused.stderr) == (2, True, True)
    again = promote(command, second["run_id"], "--model", "digits")
    assert again["conditions"] == [["it is the champion already", True]]
    assert promote(command, "--rollback", "--model", "digits")["version"] == "1"
    assert isolated(read_versions, command.folder, "digits", second["run_id"])[0] == {"champion": "1"}


@pytest.mark.slow  # promotion/test_decision.py has every condition
def test_a_model_below_a_floor_is_not_promoted_and_the_first_one_needs_no_comparison(
    command: Command, isolated: Callable[..., Any]
) -> None:
    done = command("--json", "dataset=digits", "training.max_steps=3", "promotion=champion", "promotion.model=digits")
    first = answer_of(done)
    assert done.stdout.splitlines()[-2].split() == ["promoted", "models:/digits/1", "is", "the", "champion"]
    aliases, decision, tag, pages = isolated(read_versions, command.folder, "digits", first["run_id"])
    assert (aliases, tag, pages) == ({"champion": "1"}, "digits, version 1: champion", ["promotion/digits.html"])
    assert (decision["is_good"], decision["comparison"], decision["compared_with"]) == (True, None, None)
    second = answer_of(command("--json", "dataset=digits", "training.epochs=5"))
    limits = ("--dry-run", "promotion.at_least={test/accuracy:0.999}", "promotion.most_mb=1")
    tried = promote(command, second["run_id"], "--model", "digits", *limits, code=3)
    assert isolated(read_versions, command.folder, "digits", second["run_id"])[0] == {"champion": "1"}
    assert (tried["is_promoted"], tried["version"], tried["champion"]) == (False, None, "1")
    (better, is_better), (floor, is_enough), *smoke = tried["conditions"]
    assert (is_better, is_enough, [holds for _, holds in smoke]) == (True, False, [True, True, False])
    assert better.startswith("accuracy 0.9")
    assert floor.endswith("at least 0.999 is needed")
    assert "MB of memory, at most 1 is needed" in smoke[-1][0]


REFUSED = [
    ((), "RUN_ID"),
    (("nowhere", "--model", "m"), "nowhere: expected"),
    (("a" * 32, "--model", "a/b"), "--model a/b: expected a name without / : % and quotes"),
    (("--rollback",), "--rollback: takes --model NAME, and no run"),
    (("--rollback", "--model", "m", "a" * 32), "--rollback: takes --model NAME, and no run"),
    (("--rollback", "--model", "m"), "there is no such store; set tracking.uri=..."),
]


def test_what_cannot_be_promoted_is_refused(command: Command) -> None:
    for words, text in REFUSED:
        done = command.python("-m", "scaleflow", "promote", *words)
        assert (done.returncode, text in done.stderr) == (2, True), done.stderr


def write_houses(folder: Path) -> None:
    random = np.random.default_rng(0)
    with (folder / "h.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["area", "town", "size"])
        for area, town in zip(random.uniform(20, 200, 600).round(2), random.choice(["Aa", "Bb"], 600), strict=True):
            writer.writerow([area, town, "big" if area > 110 else "small"])


@pytest.mark.slow
def test_rows_that_the_champion_was_trained_on_are_left_out(command: Command) -> None:
    write_houses(command.folder)
    table = ("dataset=table", "dataset.data_dir=h.csv", "dataset.target=size", "evaluation.slices=[town]")
    promotion = ("promotion=champion", "promotion.model=house")
    assert command(*table, *promotion, "training.max_steps=1", "dataset.validation=null").returncode == 0
    words = ("dataset.split_seed=7", "training.epochs=30", "dataset.validation=null")
    second = answer_of(command("--json", *table, *words, "promotion.at_least={slice/town/Aa:0.5}", *promotion))
    assert second["status"] == "FINISHED"
    done = command.python("-m", "scaleflow", "promote", second["run_id"], "--json", "--dry-run")
    assert done.returncode == 2, done.stderr
    assert "the champion and the candidate can be compared on 2" in done.stderr
    assert "others; at least 30 are needed" in done.stderr


@pytest.mark.slow
def test_two_models_are_compared_on_another_file(command: Command) -> None:
    write_houses(command.folder)
    rows = (command.folder / "h.csv").read_text().splitlines()
    new = [f"{float(area) + 0.001:.3f},{town},{size}" for area, town, size in (row.split(",") for row in rows[1:301])]
    (command.folder / "new.csv").write_text("\n".join([*rows[:11], *new, ""]))  # 10 rows that both were trained on
    table = ("dataset=table", "dataset.data_dir=h.csv", "dataset.target=size", "dataset.validation=null")
    table += ("dataset.test=0",)
    first = answer_of(
        command("--json", *table, "training.max_steps=1", "optimizer.learning_rate=1e-9", "dataset.drop=[town]")
    )["run_id"]
    second = answer_of(command("--json", *table, "training.epochs=20"))["run_id"]
    promote(command, first, "--model", "house")
    found = promote(command, second, "--model", "house", "--on", "new.csv")["comparison"]
    assert (found["examples"], found["left_out"], found["on"]) == (300, 10, "new.csv")
    answer = answer_of(command.python("-m", "scaleflow", "diff", first, second, "--on", "new.csv", "--json"))
    (accuracy,) = (each for each in answer["results"] if each["name"] == "new.csv: accuracy")
    for run, value in ((first, accuracy["before"]), (second, accuracy["now"])):
        done = command.python("-m", "scaleflow", "evaluate", run, "dataset.data_dir=new.csv", "--json")
        (same,) = (each for name, each in answer_of(done)["metrics"].items() if name.endswith("/accuracy"))
        assert value == pytest.approx(same, abs=1e-6)
    assert accuracy["basis"] == "310 examples, paired"
    assert accuracy["low"] < accuracy["difference"] < accuracy["high"]


@pytest.mark.slow
def test_a_model_is_served_with_its_requirements_alone(command: Command) -> None:
    words = ("dataset=digits", "training.max_steps=3", "promotion=champion", "promotion.model=digits")
    done = command("--json", *words, "promotion.environment=clean", timeout=900)
    assert answer_of(done)["status"] == "FINISHED"
    assert "models:/digits/1 is the champion" in done.stdout


@pytest.mark.slow
def test_a_candidate_whose_test_is_too_good_says_so_before_the_decision(command: Command) -> None:
    random = np.random.default_rng(0)
    of = random.permutation(np.repeat(np.arange(60), 20))
    like, answers = random.normal(size=60).round(3), random.integers(0, 2, 60)
    rows = [f"K{n:03d},{like[n]},{random.normal():.3f},{answers[n]}\n" for n in of]
    (command.folder / "visits.csv").write_text("customer,a,b,bought\n" + "".join(rows))
    data = (
        "dataset=table",
        "dataset.data_dir=visits.csv",
        "dataset.target=bought",
        "dataset.drop=[customer]",
        "model=mlp",
    )
    run = answer_of(command("--json", *data, "training.max_steps=2", "evaluation.baselines=0"))
    findings = json.loads((Path(run["folder"]) / "evaluation" / "findings.json").read_text())
    done = command.python("-m", "scaleflow", "promote", run["run_id"], "--model", "visits", "--dry-run")
    text = "test figures are too good for new customers: dataset.split='{by: group, column: customer}'"
    assert text in findings[0]["text"]
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    assert any(line.startswith("note: the candidate's data: rows of one customer") and text in line for line in lines)
