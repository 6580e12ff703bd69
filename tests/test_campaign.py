"""Some faults of the campaign: at moments drawn from a seed, in runs that then have to be what they would have been."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.campaign.bench import Bench, empty_store
from tests.campaign.cases import DAMAGE, DISK, GONE, KILL, KINDS, LOCK, PAUSE, ROLES, STEPS, STRATEGIES, Case, drawn
from tests.campaign.faults import damage
from tests.campaign.judge import Stored, Whole, differences, lost_points, twice, wrong_status
from tests.campaign.trial import Trial, undisturbed


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """`tried(case, ...)`: what is wrong after their faults, against the undisturbed run, which is trained once."""
    folder = tmp_path_factory.mktemp("campaign")
    store = empty_store(folder)
    bench = made(folder / "undisturbed", store)
    try:
        whole = undisturbed(bench, "pipeline")
    finally:
        bench.close()

    def run(*cases: Case) -> list[str]:
        results = [Trial(case, made(folder / str(case.number), store), whole).run() for case in cases]
        assert [result.faults for result in results] == [1 + bool(case.again) for case in cases]
        return [f"{result.case}: {line}" for result in results for line in result.wrong]

    return run


def made(folder: Path, store: Path) -> Bench:
    folder.mkdir()
    shutil.copy(store, folder)
    return Bench(folder)


@pytest.mark.slow
def test_reports_before_a_kill_are_recorded_once_and_the_run_goes_on(
    tried: Callable[..., list[str]],
) -> None:
    draw = random.Random("at random moments")
    cases = [
        Case(number, "pipeline", KILL, role, step=draw.randrange(0, STEPS, 2), seconds=draw.uniform(0, 0.06))
        for number, role in enumerate(["launcher", "chief"])
    ]
    assert tried(*cases, Case(3, "pipeline", KILL, "launcher", step=6, again="chief")) == []


@pytest.mark.slow
def test_faults_that_no_other_test_makes(tried: Callable[..., list[str]]) -> None:
    cases = [
        Case(10, "pipeline", LOCK, "store", step=10, lasts=1.0),
        Case(11, "pipeline", DISK, "launcher", step=16, place=0.01),
        Case(12, "pipeline", DISK, "chief", step=20, place=0.4),
        Case(13, "pipeline", PAUSE, "forker", step=24, lasts=0.5),
        Case(14, "pipeline", DAMAGE, "launcher", step=30, how="bit of manifest", place=0.3),
    ]
    assert tried(*cases) == []


def test_a_seed_says_which_faults_come_and_all_kinds_are_among_them() -> None:
    cases = [drawn(0, number) for number in range(200)]
    assert cases == [drawn(0, number) for number in range(200)]
    assert cases != [drawn(1, number) for number in range(200)]
    assert {case.strategy for case in cases} == set(STRATEGIES)
    assert {case.kind for case in cases} == set(KINDS)
    assert {(case.strategy, case.role) for case in cases} >= {(s, role) for s, roles in ROLES.items() for role in roles}
    killed = [case for case in cases if case.kind == KILL and case.role != "forker"]
    assert len(killed) >= 50
    assert sum(case.kind == GONE for case in cases) >= 5


EVENTS = (
    '{"event": "ready", "time": 1}\n'
    '{"event": "metrics", "time": 5, "step": 1, "values": {"train/loss": 0.5}}\n'
    '{"event": "metrics", "time": 6, "step": 2, "values": {"train/loss": 0.25}}\n{"event": "metr\n'
    '{"event": "end", "time": 7, "status": "FAILED", "error": "x"}\n'
)
ONE, TWO = ("train/loss", 1, 0.5, 5), ("train/loss", 2, 0.25, 6)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "events.jsonl").write_text(EVENTS)
    return tmp_path


def in_store(*points: tuple[str, int, float, int], status: str = "FAILED") -> Stored:
    made = Stored(status, {"scaleflow.status": status})
    made.points.update(points)
    return made


def test_the_judge_sees_points_that_are_missing_or_there_twice(run: Path) -> None:
    assert list(lost_points(run, [in_store(ONE, TWO)])) == []
    assert "1 of 2 points are not in the store" in next(lost_points(run, [in_store(ONE)]))
    assert "1 points in the store were not written" in next(lost_points(run, [in_store(ONE, TWO, TWO)]))
    assert "1 points in the store were not written" in next(lost_points(run, [in_store(ONE, TWO), in_store(ONE)]))
    assert list(twice(run)) == []
    with (run / "events.jsonl").open("a") as events:
        events.write('{"event": "metrics", "time": 9, "step": 2, "values": {"train/loss": 0.25}}\n')
    assert list(twice(run)) == ["train/loss has 2 points at step 2"]


def test_the_judge_sees_what_is_not_true(run: Path) -> None:
    assert list(wrong_status(1, run, [in_store()], True)) == []
    assert list(wrong_status(0, run, [in_store()], True)) == ["exit code 0 of a run that is FAILED"]
    assert "the store says RUNNING" in next(wrong_status(1, run, [in_store(status="RUNNING")], True))
    assert list(wrong_status(1, run, [in_store(status="RUNNING")], False)) == []
    assert list(wrong_status(1, run, [in_store(), in_store()], True)) == ["2 runs in the store"]
    with (run / "events.jsonl").open("a") as events:
        events.write('{"event": "ready", "time": 9}\n')
    assert list(wrong_status(1, run, [], False)) == ["the run's last word is missing; exit code 1"]


def test_the_judge_sees_what_differs() -> None:
    history = {"train/loss": [(1, 0.5), (2, 0.25)]}
    well = Whole(history, {"kernel": 1}, 2, STEPS, STEPS)
    case, other = Case(0, "one_device", KILL, "chief"), Case(0, "parameter_server", KILL, "chief")
    assert [*differences(case, well, well), *differences(other, well, well)] == []
    less = Whole({"train/loss": [(1, 0.5)]}, {"kernel": 2}, 3, STEPS - 1, STEPS - 1)
    assert [line.partition(":")[0] for line in differences(case, less, well)] == [
        "the weights differ from the undisturbed run's",
        "what the last checkpoint holds differs from the undisturbed run's",
        "train/loss",
    ]
    assert len(list(differences(other, less, well))) == 3


@pytest.mark.parametrize("how", ["bit of data", "bit of index", "bit of manifest", "short data", "no manifest"])
def test_the_newest_checkpoint_is_damaged(tmp_path: Path, how: str) -> None:
    assert damage(tmp_path, how, 0.5) is None
    for step in ("04", "08"):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        for name in ("tensors.data-0", "tensors.index", "checkpoint.json"):
            (folder / name).write_text("content")
    assert damage(tmp_path, how, 0.5) == "step-08"
    left = [path.read_text() for path in folder.iterdir()]
    assert left.count("content") == 2
    assert len(left) == (2 if how == "no manifest" else 3)
