"""What a tracking server costs training that is down, slow, or answers with errors: against one that is well.

A real `mlflow server` behind a proxy, which the runs know alone. `tracking.offline=true` lets a run begin whatever the
server does. Behind the last round the server is well, and what each way has missed has to come: else the figures mean
nothing.
"""

from __future__ import annotations

import functools
import json
import shutil
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import Row, WrongResultError, alternate, median, metric, ratios, run, temporary_folder
from benchmarks.steps import BATCH_SIZE, MLP
from tests.tracking.servers import Fault, Proxy, Server

#: By what becomes of every request.
WAYS: Mapping[str, Fault] = {"well": "none", "down": "reset", "slow": "delay", "failing": "error"}

#: Of each request to the slow one.
SECONDS_OF_DELAY = 2.0

EPOCHS = 30


def measure(rounds: int) -> list[Row]:
    """A row to each way to be unwell: examples per second, to those with a server that is well."""
    with temporary_folder() as folder, proxied(folder) as proxy:
        rates = alternate({way: functools.partial(rate, way, proxy, folder) for way in WAYS}, rounds)
        proxy.plan = lambda: "none"
        for way in WAYS:
            check(way, proxy, folder)
    return [
        Row(
            work=f"mlp, the tracking server {way}, examples/s",
            against="a server that is well",
            ratios=ratios(rates[way], rates["well"]),
            held_to=">= 0.98",
            ours=median(rates[way], "/s"),
            theirs=median(rates["well"], "/s"),
        )
        for way in list(WAYS)[1:]
    ]


@contextmanager
def proxied(folder: Path) -> Iterator[Proxy]:
    """A server with a new store, and a proxy before it."""
    from scaleflow.interfaces import Tracking
    from scaleflow.tracking.store import MlflowTracker

    MlflowTracker(Tracking(uri=f"sqlite:///{folder}/empty.db")).connect()
    server = Server(folder, folder / "empty.db")
    try:
        server.start()
        proxy = Proxy(server.port)
        proxy.seconds = SECONDS_OF_DELAY
        yield proxy
        proxy.stop()
    finally:
        server.stop()


def rate(way: str, proxy: Proxy, folder: Path) -> float:
    """The median epoch's but the first."""
    output = folder / way
    shutil.rmtree(output, ignore_errors=True)
    proxy.plan = lambda: WAYS[way]
    overrides = [
        *("dataset=synthetic", f"dataset.examples={MLP.examples * 5 // 4}", "dataset.validation=null", *MLP.overrides),
        *("strategy=one_device", f"training.batch_size={BATCH_SIZE}", f"training.epochs={EPOCHS}", "checkpoint=none"),
        *(f"tracking.uri={proxy.uri}", "tracking.offline=true", "tracking.flush_seconds=0", f"hydra.run.dir={output}"),
    ]
    run(["-m", "scaleflow", *overrides], folder)
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    if events[-1].get("status") != "FINISHED":
        raise WrongResultError(f"the run did not finish: {events[-1]}")
    return statistics.median(metric(events, "perf/examples_per_second")[1:])


def check(way: str, proxy: Proxy, folder: Path) -> None:
    """The last run of each way comes into the store after all."""
    output, _ = run(["-m", "scaleflow.sync", folder / way, "--uri", proxy.uri], folder)
    if "recorded" not in output:
        raise WrongResultError(f"what the server missed did not come: {output}")
