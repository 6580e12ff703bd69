"""What a tracking server costs training that is down, slow, or answers with errors: against one that is well.

A real `mlflow server` behind a proxy, which the runs know alone. `tracking.offline=true` lets a run begin whatever the
server does. Behind each run the server is well, and what it has missed has to come: else the figures mean nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import Benchmark, Results, Row, WrongResultError, row, run, run_scaleflow
from benchmarks.steps import MLP, rate_of, words
from tests.tracking.servers import Fault, Proxy, Server

#: By what becomes of every request.
WAYS: Mapping[str, Fault] = {"well": "none", "down": "reset", "slow": "delay", "failing": "error"}

#: Of each request to the slow one.
SECONDS_OF_DELAY = 2.0

EPOCHS = 30


def benchmark() -> Benchmark:
    """A row to each way to be unwell: examples per second, to those with a server that is well."""
    return Benchmark({way: functools.partial(rate, way) for way in WAYS}, rows)


def rows(results: Results) -> list[Row]:
    well = "a server that is well"
    return [
        row(f"mlp, the tracking server {way}, examples/s", well, rates, results["well"], "/s", at_least=0.98)
        for way, rates in results.items()
        if way != "well"
    ]


@contextmanager
def proxied(folder: Path) -> Iterator[Proxy]:
    """A server with a store of its own, and a proxy before it."""
    from scaleflow.interfaces import Tracking
    from scaleflow.tracking.store import MlflowTracker

    store = folder / "empty.db"  # the server works on a copy
    if not store.exists():
        MlflowTracker(Tracking(uri=f"sqlite:///{store}")).connect()
    server = Server(folder, store)
    try:
        server.start()
        proxy = Proxy(server.port)
        proxy.seconds = SECONDS_OF_DELAY
        yield proxy
        proxy.stop()
    finally:
        server.stop()


def rate(way: str, folder: Path) -> float:
    """The median epoch's but the first."""
    with proxied(folder) as proxy:
        proxy.plan = lambda: WAYS[way]
        overrides = (f"tracking.uri={proxy.uri}", "tracking.offline=true", "tracking.flush_seconds=0")
        options = words(MLP, "strategy=one_device", "checkpoint=none", *overrides, epochs=EPOCHS)
        events, _ = run_scaleflow(options, folder, way, is_recorded=False)
        proxy.plan = lambda: "none"
        output, _ = run(["-m", "scaleflow", "sync", folder / way, "--uri", proxy.uri], folder)
    if "recorded" not in output:
        raise WrongResultError(f"what the server missed did not come: {output}")
    return rate_of(MLP, events)
