"""How benchmarks take rounds, what they make of them, and when they fail: with contestants that measure nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import measure
from benchmarks.measure import Benchmark, Results, Row, WrongResultError, row, table, take_rounds


class Contestants:
    """Two that tell when it is their turn; the other one does not do its work in one of the rounds.

    Args:
        wrong_in: that round.
        seconds: that each takes, on a clock that stands still else.
    """

    def __init__(self, wrong_in: int = 0, seconds: float = 0.0) -> None:
        self.turns: list[str] = []
        self.folders: set[Path] = set()
        self.now = 0.0
        self._wrong_in = wrong_in
        self._seconds = seconds

    def ours(self, folder: Path) -> float:
        return self._turn("ours", folder)

    def theirs(self, folder: Path) -> float:
        if self.turns.count("theirs") + 1 == self._wrong_in:
            raise WrongResultError("accuracy 0.1")
        return self._turn("theirs", folder)

    def prepare(self, folder: Path) -> None:
        self._turn("prepare", folder)

    def _turn(self, name: str, folder: Path) -> float:
        assert folder.is_dir()
        self.turns.append(name)
        self.folders.add(folder)
        self.now += self._seconds
        return float(len(self.turns))

    def benchmark(self) -> Benchmark:
        return Benchmark({"ours": self.ours, "theirs": self.theirs}, self.rows, self.prepare)

    def rows(self, results: Results) -> list[Row]:
        return [row("work", "them", results["ours"], results["theirs"], "s", at_most=1.0)]


def test_contestants_take_turns_in_a_folder_of_their_own() -> None:
    one, two = Contestants(), Contestants()
    measured = take_rounds({"one": one.benchmark(), "two": two.benchmark()}, 3, 60.0)
    assert one.turns == two.turns == ["prepare", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert measured[0].results == {"ours": [2.0, 5.0, 6.0], "theirs": [3.0, 4.0, 7.0]}
    assert len(one.folders | two.folders) == 2
    assert not any(folder.exists() for folder in one.folders)


def test_no_round_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Contestants(seconds=10.0)
    monkeypatch.setattr(measure.time, "monotonic", lambda: one.now)
    (measured,) = take_rounds({"one": one.benchmark()}, 5, 75.0)  # 30 s, then 20 s a round; the last is thought to be
    assert len(measured.results["ours"]) == 3
    (least,) = take_rounds({"one": one.benchmark()}, 5, 0.0)
    assert len(least.results["ours"]) == 1


@pytest.mark.parametrize(("wrong_in", "code"), [(0, 0), (1, 1), (2, 1)])
def test_a_wrong_result_fails_and_has_no_row(capsys: pytest.CaptureFixture[str], wrong_in: int, code: int) -> None:
    benchmarks = {"well": Contestants().benchmark(), "one": Contestants(wrong_in).benchmark()}
    assert program.told(take_rounds(benchmarks, 2, 60.0)) == code
    told = capsys.readouterr()
    assert told.out.count("| work") == 3 - code  # the head, too
    assert ("FAILED: one gave a wrong result: accuracy 0.1" in told.err) == bool(code)


def test_a_benchmark_that_breaks_takes_no_other_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(folder: Path) -> float:
        raise ValueError("broken")

    benchmarks = {"one": Benchmark({"ours": breaks}, lambda results: []), "well": Contestants().benchmark()}
    assert program.told(take_rounds(benchmarks, 1, 60.0)) == 1
    told = capsys.readouterr()
    assert "| met " in told.out
    assert "FAILED: one gave a wrong result" in told.err
    assert "ValueError: broken" in told.err


def test_a_time_never_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(results: Results) -> list[Row]:
        return [row("work", "them", results["ours"], results["theirs"], "/s", at_least=1000.0)]

    contestants = Contestants()
    slow = Benchmark({"ours": contestants.ours, "theirs": contestants.theirs}, rows)
    assert program.told(take_rounds({"slow": slow}, 1, 60.0)) == 0
    assert "| below " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "ratios", "verdict"),
    [
        ({"at_least": 1.8}, [1.0, 1.8, 2.0], "met"),
        ({"at_least": 1.8}, [2.0, 1.7, 1.0], "below"),
        ({"at_most": 0.3}, [0.3, 0.2, 0.9], "met"),
        ({"at_most": 0.3}, [0.31], "below"),
    ],
)
def test_the_median_is_what_counts(asked: dict[str, float], ratios: list[float], verdict: str) -> None:
    assert Row("work", "them", ratios, "", "", **asked).verdict == verdict


def test_the_table_says_what_is_asked_and_what_came_of_it() -> None:
    head, line, cells = table([row("work", "them", [30.0, 10.0], [10.0, 10.0], "s", at_least=1.5)]).splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == list(measure.HEAD)
    assert set(line) <= set("|- ")
    found = [cell.strip() for cell in cells.strip("|").split("|")]
    assert found == ["work", "20 s", "them", "10 s", ">= 1.5", "2.00", "1.00..3.00", "2", "met"]


@pytest.mark.parametrize("name", program.BENCHMARKS)
def test_each_benchmark_makes_its_rows_of_its_contestants(name: str) -> None:
    benchmark = program.BENCHMARKS[name][0]()
    results = {contestant: [1.0, 1.0] for contestant in benchmark.contestants}
    rows = benchmark.rows(results)
    assert rows or not benchmark.contestants  # what it takes is not here, and it has said so
    assert all(len(row.ratios) == 2 and bool(row.asked) == (row.verdict in ("met", "below")) for row in rows)
    assert name in ("engines", "network", "memory") or all(row.asked for row in rows)  # those cost what they cost


@pytest.mark.parametrize("words", [["nothing"], ["--rounds", "0"]])
def test_wrong_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.parsed(words)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_command_that_fails_is_a_wrong_result(tmp_path: Path) -> None:
    with pytest.raises(WrongResultError, match="exited with 3"):
        measure.run(["-c", "raise SystemExit(3)"], tmp_path)
