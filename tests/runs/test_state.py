from dataclasses import replace
from pathlib import Path

import pytest

from scaleflow.interfaces.events import (
    CheckpointSaved,
    EpochEnded,
    Event,
    FaultReported,
    MetricsLogged,
    PeersMet,
    Restarted,
    RunEnded,
    RunReady,
    RunRefused,
    UploadAwaited,
    Waiting,
)
from scaleflow.runs import EventWriter, RunFolder, RunState

READY = RunReady("a-run", params={"model": "mlp"}, time=1)


def state_after(*events: Event) -> RunState:
    state = RunState()
    for event in events:
        state.apply(event)
    return state


def test_without_events_there_is_no_run(tmp_path: Path) -> None:
    state = RunState.read(tmp_path)
    assert state == RunState()
    assert (state.has_begun, state.is_open, state.status, state.error, state.refusal) == (False, False, None, "", None)


def test_a_run_is_open_until_it_ends() -> None:
    state = state_after(READY, MetricsLogged(4, {"train/loss": 0.5}, time=7), CheckpointSaved(3, "/x", time=6))
    assert (state.has_begun, state.is_open, state.attempt.is_under_way, state.status) == (True, True, True, None)
    assert (state.step, state.checkpoint, state.time, state.params) == (4, 3, 7, {"model": "mlp"})
    state.apply(RunEnded("FAILED", "OSError: no"))
    assert (state.is_open, state.status, state.error, state.refusal) == (False, "FAILED", "OSError: no", None)


def test_an_upload_is_waited_for_until_it_is_over_or_the_run_restarts() -> None:
    waits = (READY, UploadAwaited(600.0))
    assert state_after(*waits).attempt.upload_seconds == 600.0
    assert state_after(*waits, Restarted(1, "died")).attempt.upload_seconds == 0.0
    assert state_after(*waits, UploadAwaited(0.0)).attempt.upload_seconds == 0.0
    assert state_after(*waits, RunEnded("FINISHED")).attempt.upload_seconds == 600.0  # another worker's upload


def test_a_run_that_is_resumed_after_its_end_is_open_again() -> None:
    resumed = RunReady("a-run", params={"model": "cnn"}, resumed=3)
    state = state_after(READY, FaultReported("lost"), RunEnded("KILLED", "stopped by SIGTERM"), resumed)
    assert (state.is_open, state.status, state.last, state.error, state.attempt.fault) == (True, None, None, "", "")
    assert (state.last_status, state.checkpoint) == ("KILLED", 3)
    assert state.ready is READY
    state.apply(RunEnded("FINISHED"))
    assert (state.is_open, state.status, state.error) == (False, "FINISHED", "")


def test_a_length_that_an_earlier_command_has_trained_is_not_longer() -> None:
    from scaleflow.runs.resume import is_longer

    began = replace(READY, epochs=3, steps=57)
    longer = (began, RunEnded("FINISHED"), RunReady("a-run", epochs=5, steps=95, resumed=57))
    saved = {"training": {"epochs": 3, "max_steps": None}}

    def count_longer(*events: Event) -> list[bool]:
        state = state_after(*events)
        return [is_longer(saved, {"training": {"epochs": n, "max_steps": None}}, state) for n in (3, 5, 6)]

    assert count_longer(began, RunEnded("FINISHED")) == [False, True, True]
    assert count_longer(*longer, RunEnded("FINISHED")) == [False, False, True]
    assert count_longer(*longer) == [False, True, True]  # it was lost


def test_a_baseline_is_named_like_the_metric_that_it_compares_with() -> None:
    both = {"baseline/accuracy": 0.2, "baseline/test/accuracy": 0.1, "baseline/test/loss": 2.3}
    wanted = {"val/accuracy": 0.2, "test/accuracy": 0.1, "test/loss": 2.3}
    assert state_after(READY, MetricsLogged(0, both)).baseline == wanted
    one = MetricsLogged(0, {"baseline/mae": 5.0})
    assert state_after(READY, one, MetricsLogged(4, {"test/mae": 1.0})).baseline == {"test/mae": 5.0}
    assert state_after(READY, one, MetricsLogged(4, {"val/mae": 1.0})).baseline == {"val/mae": 5.0}
    assert state_after(READY, MetricsLogged(4, {"test/mae": 1.0})).baseline == {}


def test_a_restart_of_all_processes_waits_until_they_have_built_everything() -> None:
    state = state_after(READY, Waiting(5.0), FaultReported("lost worker 1"), Restarted(1, "lost worker 1"))
    assert (state.is_open, state.attempt.is_under_way, state.attempt.waiting, state.attempt.fault) == (
        True,
        False,
        None,
        "",
    )
    state.apply(READY)
    assert state.attempt.is_under_way


def test_a_restart_of_one_worker_leaves_the_others_under_way() -> None:
    waiting = Waiting(5.0, ["host:1"])
    state = state_after(READY, waiting, FaultReported("x"), Restarted(1, "worker 1 was killed", "worker 1"))
    assert (state.is_open, state.attempt.is_under_way, state.attempt.waiting, state.attempt.fault) == (
        True,
        True,
        waiting,
        "",
    )
    state.apply(PeersMet())
    assert state.attempt.waiting is None


def test_a_refusal_after_the_end_leaves_the_status_of_the_end() -> None:
    """A command that resumes a finished run may be refused."""
    state = state_after(READY, RunEnded("FINISHED"), RunRefused("seed=1: no"))
    assert (state.has_begun, state.is_open, state.status) == (True, False, "FINISHED")
    assert (state.error, str(state.refusal)) == ("seed=1: no", "seed=1: no")


def test_a_refusal_without_a_run_is_no_run() -> None:
    state = state_after(RunRefused("no"))
    assert (state.has_begun, state.is_open, state.status, str(state.refusal)) == (False, False, None, "no")


@pytest.mark.parametrize(("last", "results"), [("train", 1.0), ("val", 2.0), ("test", 3.0)])
def test_the_results_are_those_of_the_split_that_says_most(last: str, results: float) -> None:
    splits = ["train", "val", "test"]
    logged = splits[: splits.index(last) + 1]
    values = {f"{split}/loss": float(number) for number, split in enumerate(logged, 1)}
    assert state_after(READY, MetricsLogged(1, {"train/loss": 9.0}), MetricsLogged(2, values)).results == {
        f"{last}/loss": results
    }


def test_a_history_keeps_all_points_and_grows_with_the_run(tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    write = EventWriter(files.events)
    write(READY)
    for epoch, rate in enumerate([10.0, 30.0, 50.0], 1):
        write(MetricsLogged(4 * epoch, {"perf/examples_per_second": rate}))
        write(EpochEnded(epoch, 3, 4 * epoch, {}))
    files.write_record({"run_id": "run-7", "uri": "http://host", "model_uri": "models:/m-7"})
    history = RunState.read(tmp_path, has_points=True)
    assert (history.record["uri"], history.model_uri) == ("http://host", "models:/m-7")
    assert (history.run_id, history.epoch_steps, history.rate) == ("run-7", 4, 40.0)
    history.apply(MetricsLogged(16, {"perf/examples_per_second": 90.0}))
    assert history.curves == {"perf/examples_per_second": [(4, 10.0), (8, 30.0), (12, 50.0), (16, 90.0)]}
    assert (history.rate, history.is_open, history.step) == (50.0, True, 16)
