"""The model of many workers: its limits, that a link is found again from what it says, its table, its check."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.measure import WrongResultError
from benchmarks.scaling import (
    Link,
    Seen,
    Work,
    check,
    computing,
    efficiency,
    fitted,
    main,
    ring_seconds,
    table,
    undisturbed,
    while_all,
)

LINK = Link(bytes_per_second=1e9, hop_seconds=1e-4)


@pytest.mark.parametrize(
    ("workers", "seconds"),
    [
        (1, 0.0),
        (2, 1.0 + 2e-4),  # each sends half, and then the other half's sum
        (4, 1.5 + 6e-4),
        (1000, 1.998 + 1998e-4),
    ],
)
def test_a_ring_sends_nearly_twice_the_gradient_however_many_there_are(workers: int, seconds: float) -> None:
    assert ring_seconds(workers, 1e9, LINK) == pytest.approx(seconds)


def test_the_efficiency_is_the_part_of_a_step_that_is_computed_in() -> None:
    work = Work("large", 250_000_000, 1.0002)  # as long as two workers take to sum
    assert efficiency(work, 1, LINK) == 1.0
    assert efficiency(work, 2, LINK) == pytest.approx(0.5)
    found = [efficiency(work, workers, LINK) for workers in (2, 3, 8, 64, 512)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_link_is_found_again_from_what_it_takes(workers: int) -> None:
    small, large = ((size, ring_seconds(workers, size, LINK)) for size in (4e5, 7e6))
    found = fitted(small, large, workers)
    assert (found.bytes_per_second, found.hop_seconds) == pytest.approx((1e9, 1e-4))


def test_a_larger_gradient_that_does_not_take_longer_is_a_wrong_result() -> None:
    with pytest.raises(WrongResultError, match="7000000 bytes took 1 ms"):
        fitted((4e5, 0.002), (7e6, 0.001), 2)


def test_steps_count_that_were_taken_while_all_were_at_work() -> None:
    assert while_all([[(1, 0.1), (2, 0.2), (3, 0.3)], [(2, 0.4), (4, 0.5)]]) == [[0.2, 0.3], [0.4]]
    with pytest.raises(WrongResultError, match="not at work at the same time"):
        while_all([[(1, 0.1), (2, 0.2)], [(3, 0.3), (4, 0.4)]])


def test_epochs_that_others_have_disturbed_do_not_count() -> None:
    assert undisturbed([0.1] * 3 + [5.0] * 17) == 0.1
    assert undisturbed([0.3]) == 0.3


def test_the_table_has_a_row_to_each_number_of_workers_and_a_column_to_each_network() -> None:
    lines = table([Work("resnet", 250_000_000, 1.0), Work("mlp", 1000, 0.001)], (2, 8), (8.0, 80.0), 0.0).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][4:] == ["workers", "8 Gbit/s", "80 Gbit/s"]
    assert cells[2] == ["resnet", "250,000,000", "1e+03 MB", "1e+03 ms", "2", "50 %", "91 %"]
    assert cells[3] == ["", "", "", "", "8", "36 %", "85 %"]
    assert [row[0] for row in cells[4:]] == ["mlp", ""]


def seen(name: str, size: float, slower: float = 1.0) -> Seen:
    """Three workers take so many times what the model says."""
    alone = {2: 0.01, 3: 0.02}
    taken = {n: (alone[n] + ring_seconds(n, size, LINK)) * (slower if n == 3 else 1) for n in alone}
    return Seen(name, size, alone, taken)


def test_workers_that_are_more_than_the_cores_share_them() -> None:
    assert [computing(0.5, workers, 2) for workers in (1, 2, 3, 4)] == [0.5, 0.5, 0.75, 1.0]


def test_the_check_tells_the_model_s_step_from_the_measured_one() -> None:
    said, _, _, _, *rows = check([seen("mlp", 4e5), seen("mlp_wide", 7e6), seen("cnn", 1e6, 2.0)]).splitlines()
    assert said == "loopback, from 2 workers: 1000 MB/s, 0.10 ms a hop"
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [(row[0], row[2], row[6]) for row in found] == [
        *(("mlp", "2", "(fitted)"), ("mlp", "3", "1.00"), ("mlp_wide", "2", "(fitted)"), ("mlp_wide", "3", "1.00")),
        *(("cnn", "2", "1.00"), ("cnn", "3", "0.50")),
    ]
    assert found[3][-2:] == ["39.5 ms", "1.33"]  # twice what is sent in, beside twice what two compute in


def test_steps_of_other_machines_are_typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "measured_here", lambda rounds: pytest.fail("nothing is measured"))
    assert main(["--model", "resnet50:25.6e6:120", "--workers", "8", "--gbits", "10"]) == 0
    assert "| resnet50 | 25,600,000 | 102 MB | 120 ms | 8 | 45 % |" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--model", "resnet50"], ["--model", "a:0:1"], ["--workers", "0"], ["--gbits", "0"]])
def test_impossible_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_parameters_that_are_trained_are_counted(tmp_path: Path) -> None:
    (tmp_path / "model_summary.txt").write_text(" Total params: 1,250\n Trainable params: 1,234 (4.8 KB)\n")
    assert scaling.trained_parameters(tmp_path) == 1234
    (tmp_path / "model_summary.txt").write_text("")
    with pytest.raises(WrongResultError):
        scaling.trained_parameters(tmp_path)
