"""Examples per second of two workers on two hosts, by the network between them, against that of this machine itself.

The hosts are network namespaces; a slow network is made by netem, or where the kernel has none by a cable of the tests'
own (`tests/cluster/network_link.py`). A step of synchronous training waits for its gradients to go round, so what
counts is
how long an answer takes, then how many bytes they are (here 0.4 MB).
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks.measure import Benchmark, Results, Row, WrongResultError, environment, metric, row, say
from tests.cluster import hosts

NEAR = "as it is"

#: Seconds that a frame takes to the other host, and bytes in a second.
NETWORKS: Mapping[str, tuple[float, float]] = {
    "1 ms away": (0.001, 1e9),
    "10 ms away": (0.01, 1e9),
    "at 100 Mbit/s": (0.0, 100e6 / 8),
}

#: 101,770 parameters, 60 steps, of which the last epoch's 20 count.
JOB = (
    *("strategy=multi_worker", "hardware=cpu", "hardware.intra_op_threads=1", "cluster=tf_config", "checkpoint=none"),
    *("dataset=synthetic", "dataset.shape=[28,28,1]", "model.units=128", "training.batch_size=128", "tracking=none"),
    *("training.steps_per_epoch=20", "training.epochs=3"),
)


def benchmark() -> Benchmark:
    """A row to each network."""
    if reason := hosts.lacking():
        say(f"network: is left out: {reason}")
        return Benchmark({}, rows)
    if not hosts.has_netem():
        say("network: this kernel has no netem; a slow network is a cable of the tests' own")
    ways = {
        NEAR: functools.partial(rate, None),
        **{name: functools.partial(rate, how) for name, how in NETWORKS.items()},
    }
    return Benchmark(ways, rows)


def rows(results: Results) -> list[Row]:
    work = "mlp, multi_worker(2), hosts {}, examples/s"
    return [row(work.format(name), NEAR, results[name], results[NEAR], "/s") for name in NETWORKS]


def rate(how: tuple[float, float] | None, folder: Path) -> float:
    """Examples per second of the last epoch."""
    with ExitStack() as until_the_end:
        own = Path(until_the_end.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        joined = until_the_end.enter_context(hosts.joined(2, own))
        if how:
            until_the_end.enter_context(joined[1].slowed(*how))
        peers = [f"{host.name}:2222" for host in joined]
        started = []
        for number, host in enumerate(joined):
            config = {"cluster": {"worker": peers}, "task": {"type": "worker", "index": number}}
            words = [sys.executable, "-m", "scaleflow", *JOB, f"hydra.run.dir={own / host.name}"]
            started.append(host.start(words, own, {**environment(own), "TF_CONFIG": json.dumps(config)}))
        for launcher in started:
            _, said = launcher.communicate()
            if launcher.returncode:
                raise WrongResultError(f"a worker exited with {launcher.returncode}: {said}")
        events = [json.loads(line) for line in (own / joined[0].name / "events.jsonl").read_text().splitlines()]
    return metric(events, "perf/examples_per_second")[-1]
