"""Work that runs side by side: how much, with which part of the machine, and what an exception does."""

import threading
from functools import partial

import pytest

from scaleflow.cluster.gpus import CUDA_DEVICES
from scaleflow.launcher.executor import Portion, Work, run_side_by_side


@pytest.mark.parametrize(("count", "pieces"), [(1, 3), (2, 5), (4, 2)])
def test_each_piece_of_work_has_a_portion_of_its_own(count: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA_DEVICES, "0,1,2,3")
    lock, waiting, ended = threading.Lock(), list(range(pieces)), list[int]()
    in_use, most = set[str](), 0
    full = threading.Barrier(min(count, pieces))

    def work(number: int, portion: Portion) -> None:
        nonlocal most
        with lock:
            devices = portion.get(CUDA_DEVICES, "all")
            assert devices not in in_use
            in_use.add(devices)
            most = max(most, len(in_use))
        if number < full.parties:
            full.wait(60)
        with lock:
            in_use.remove(devices)
            ended.append(number)

    def begin_next(portion: Portion) -> Work | None:
        return partial(work, waiting.pop(0), portion) if waiting else None

    run_side_by_side(begin_next, count, end_others=pytest.fail)
    assert sorted(ended) == list(range(pieces))
    assert most == min(count, pieces)


def test_work_begins_when_other_work_has_ended() -> None:
    ended: list[str] = []
    needs = {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")}

    def begin_next(portion: Portion) -> Work | None:
        ready = [name for name, before in needs.items() if {*before} <= {*ended}]
        if not ready:
            return None
        del needs[ready[0]]
        return partial(ended.append, ready[0])

    run_side_by_side(begin_next, 3, end_others=pytest.fail)
    assert [ended[0], {*ended[1:3]}, ended[3]] == ["a", {"b", "c"}, "d"]


def test_an_exception_ends_the_others_and_is_raised_when_they_have_ended() -> None:
    stop, others = threading.Event(), list[str]()

    def wait() -> None:
        stop.wait(60)
        others.append("ended")

    def fail() -> None:
        raise OSError("the disk is full")

    pieces = [wait, fail, wait]
    with pytest.raises(OSError, match="the disk is full"):
        run_side_by_side(lambda portion: pieces.pop(0) if pieces else None, 2, stop.set)
    assert others == ["ended"]
    assert pieces == [wait]


def test_one_piece_of_work_at_a_time_runs_in_the_thread_of_the_caller() -> None:
    threads: list[threading.Thread] = []
    pieces = [lambda: threads.append(threading.current_thread())] * 2
    run_side_by_side(lambda portion: pieces.pop(0) if pieces else None, 1, end_others=pytest.fail)
    assert threads == [threading.current_thread()] * 2
