from __future__ import annotations

import json
import socket
import tracemalloc

import pytest

from scaleflow.cluster.network import port_is_free
from scaleflow.cluster.tasks import make_tf_config, make_tf_config_environments, make_tf_configs
from scaleflow.cluster.tf_config import parse_tf_config
from scaleflow.errors import ConfigError
from scaleflow.interfaces import TaskInfo

HOSTS = ["a:1", "b:2", "c:3"]


def config(cluster: object, task: object) -> str:
    return json.dumps({"cluster": cluster, "task": task})


def task(index: object, role: str = "worker") -> dict[str, object]:
    return {"type": role, "index": index}


def test_workers_are_counted_in_order() -> None:
    assert parse_tf_config(config({"worker": HOSTS}, task(2))) == TaskInfo(2, ("a:1", "b:2", "c:3"))


def test_a_chief_is_worker_0_and_the_others_come_after_it() -> None:
    cluster = {"worker": HOSTS[1:], "chief": HOSTS[:1]}
    assert parse_tf_config(config(cluster, task(0, "chief"))) == TaskInfo(0, ("a:1", "b:2", "c:3"))
    assert parse_tf_config(config(cluster, task(0))) == TaskInfo(1, ("a:1", "b:2", "c:3"))


def test_parameter_servers_come_after_the_workers() -> None:
    cluster = {"ps": HOSTS[2:], "worker": HOSTS[1:2], "chief": HOSTS[:1]}
    for number, role in enumerate(("chief", "worker", "ps")):
        assert parse_tf_config(config(cluster, task(0, role))) == TaskInfo(number, ("a:1", "b:2", "c:3"), servers=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "TF_CONFIG is not set"),
        ("", "TF_CONFIG is not set"),
        ("{worker", "is not valid JSON"),
        ("[]", "expected the keys `cluster` and `task`"),
        (config({"worker": HOSTS}, None), "expected the keys `cluster` and `task`"),
        (config({}, task(0)), "names no worker"),
        (config({"worker": HOSTS, "ps": ["d:4"]}, task(0)), "also needs a chief and at least one worker"),
        (config({"chief": HOSTS, "worker": ["d:4"]}, task(0)), "expected one"),
        (
            config({"worker": HOSTS, "evaluator": ["d:4"]}, task(0)),
            "the role evaluator: the training processes validate by themselves",
        ),
        (config({"worker": HOSTS}, task(0, "evaluator")), "the role evaluator: "),
        (config({"workers": HOSTS}, task(0)), "there is no role workers"),
        (config({"worker": "a:1"}, task(0)), "expected a list of HOST:PORT"),
        (config({"worker": ["a"]}, task(0)), "expected a list of HOST:PORT"),
        (config({"worker": ["a:99999"]}, task(0)), "expected a list of HOST:PORT"),
        (config({"worker": HOSTS}, task(3)), "task.index=3: expected 0 to 2"),
        (config({"worker": HOSTS}, task(-1)), "task.index=-1"),
        (config({"worker": HOSTS}, task("0")), 'task.index="0": expected'),
        (config({"worker": HOSTS}, task(0, "chief")), 'task.type="chief": the cluster has only worker'),
    ],
)
def test_impossible_options_are_refused(text: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_tf_config(text)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_local_workers_are_told_of_each_other() -> None:
    told = [parse_tf_config(environment["TF_CONFIG"]) for environment in make_tf_config_environments({"worker": 3})]
    assert [place.worker for place in told] == [0, 1, 2]
    assert len({place.peers for place in told}) == 1
    assert len(set(told[0].peers)) == 3
    assert all(peer.startswith("127.0.0.1:") for peer in told[0].peers)


def test_a_single_worker_is_told_of_nobody() -> None:
    assert make_tf_config_environments({"worker": 1}) == [{}]


def test_a_port_in_use_is_not_free() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        assert not port_is_free(f"anywhere:{taken.getsockname()[1]}")


def test_a_free_port_is_free() -> None:
    with socket.socket() as sock:
        sock.bind(("", 0))
        port = sock.getsockname()[1]
    assert port_is_free(f"anywhere:{port}")


def test_each_process_gets_its_task() -> None:
    texts = list(make_tf_configs({"chief": 1, "worker": 1, "ps": 1}, HOSTS))
    assert [parse_tf_config(text).worker for text in texts] == [0, 1, 2]
    assert [make_tf_config(number, HOSTS, servers=1) for number in range(3)] == texts


def test_the_tf_config_of_one_task_takes_no_memory_for_those_of_the_others() -> None:
    """Each text names 4,096 processes, so all of them would take 300 MB."""
    peers = [f"scaleflow-{number}.scaleflow:2222" for number in range(4096)]
    tracemalloc.start()
    try:
        text = make_tf_config(4095, peers, servers=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parse_tf_config(text).worker == 4095
    assert peak < 10e6
