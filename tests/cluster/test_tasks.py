"""Names of processes, and which of them answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from scaleflow.cluster import tasks
from scaleflow.cluster.tasks import find_unreachable, process_name, process_names
from scaleflow.interfaces import Plan


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("one_device", ["worker 0"]),
        ("multi_worker", ["worker 0", "worker 1", "worker 2"]),
        ("parameter_server", ["coordinator", "worker 0", "worker 1", "worker 2", "server 0"]),
    ],
)
def test_a_process_has_its_name_from_its_number(strategy: str, names: list[str], plan: Callable[..., Plan]) -> None:
    words = [] if strategy == "one_device" else ["cluster.workers=3"]
    run = plan(f"strategy={strategy}", *words)
    assert process_names(run) == names
    assert [process_name(run, number) for number in range(len(names))] == names
    with pytest.raises(IndexError):
        process_name(run, len(names))


def test_few_processes_are_probed_at_a_time(plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread for each of 4,096 machines that do not answer may be more than the system allows."""
    probing: set[str] = set()
    most = 0
    lock, others = threading.Lock(), threading.Barrier(2)

    def is_listening(address: str) -> bool:
        nonlocal most
        with lock:
            probing.add(address)
            most = max(most, len(probing))
        others.wait(60)
        with lock:
            probing.remove(address)
        return address != "b:2"

    monkeypatch.setattr(tasks, "is_listening", is_listening)
    monkeypatch.setattr(tasks, "MAX_PROBES", 2)
    run = plan("strategy=multi_worker", "cluster.workers=6")
    assert find_unreachable(run, ["a:1", "b:2", "c:3", "d:4", "e:5", "f:6"]) == "worker 1 (b:2)"
    assert most == 2
