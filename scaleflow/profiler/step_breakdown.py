"""Where the time of a step went, by the events of a trace.

Each instant between a step's marker's begin and end belongs to one of four: `compute` if any operation of the step
computes then, on any device; else `allreduce` if gradients are being summed over the replicas; else `input` if the
step waits for examples or puts them together; else `host`: Python, the start of the call, the time between operations.
So what a device does while another still computes costs nothing here, and the parts sum to the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaleflow.interfaces import READ_SCOPE, STEP_SCOPE, SUM_SCOPE

PARTS = ("input", "compute", "allreduce", "host")

#: In the order in which they count where several are under way at once.
ORDER = ("compute", "allreduce", "input")

OF_STEP = re.compile(rf"(^|/){STEP_SCOPE}(_\d+)?/")
OF_READ = re.compile(rf"/{READ_SCOPE}(_\d+)?/")
OF_SUM = re.compile(rf"/{SUM_SCOPE}(_\d+)?/")

#: TensorFlow's own operations, whatever scope they are in.
COLLECTIVE = re.compile(r"Collective(Reduce|Gather|AllToAll)|Nccl", re.IGNORECASE)
GET_NEXT = re.compile(r"\bIteratorGetNext")

Event = Mapping[str, Any]


@dataclass(frozen=True)
class StepTimes:
    """One traced step: its number, and milliseconds of it."""

    number: int
    total: float
    input: float
    compute: float
    allreduce: float
    host: float


@dataclass(frozen=True)
class Timeline:
    """The events of one process's trace that its steps are divided by.

    Attributes:
        markers: (number, begin, end) of each step, in microseconds, in order.
        spans: (begin, end, part) of what is none of the host's, in order.
        has_device: whether an accelerator's own events are there.
    """

    markers: Sequence[tuple[int, float, float]]
    spans: Sequence[tuple[float, float, str]]
    has_device: bool


def parse_timeline(trace: Mapping[str, Any]) -> Timeline:
    """What a trace in Chrome's format says, as xprof writes it."""
    streams = device_streams(trace["traceEvents"])
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    markers = [
        (int(event["args"]["step_num"]), event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"].split(" ")[0] == "train" and "step_num" in event.get("args", {})
    ]
    spans = []
    for event in events:
        on_device = (event["pid"], event["tid"]) in streams
        part = classify_device_event(event) if on_device else classify_host_event(event, is_driver=bool(streams))
        if part is not None:
            spans.append((event["ts"], event["ts"] + event["dur"], part))
    return Timeline(sorted(markers), sorted(spans), bool(streams))


def device_streams(events: Iterable[Event]) -> set[tuple[int, int]]:
    """The (process, thread) ids of what runs on accelerators."""
    named = [event for event in events if event.get("ph") == "M"]
    devices = {
        event["pid"]
        for event in named
        if event["name"] == "process_name" and re.match(r"/device:(GPU|TPU)", event["args"]["name"])
    }
    return {
        (event["pid"], event["tid"])
        for event in named
        if event["name"] == "thread_name"
        and event["pid"] in devices
        and re.match(r"Stream #|XLA Ops", event["args"]["name"])
    }


def classify_host_event(event: Event, is_driver: bool) -> str | None:
    """What an event of the host's threads is part of; None for what is not the step's work.

    Args:
        event: of the trace.
        is_driver: whether what the step computes runs on an accelerator, which the host's operations only start.
    """
    name, arguments = event["name"], event.get("args", {})
    operation = arguments.get("long_name", "")
    if GET_NEXT.search(name) and "group_id" in arguments:  # tf.data's own threads belong to no step
        return "input"
    if is_driver or not OF_STEP.search(operation):
        return None
    return classify_kernel(name, operation)


def classify_device_event(event: Event) -> str:
    """What a kernel is part of; copies of examples to the device are input."""
    arguments = event.get("args", {})
    operation = arguments.get("tf_op") or arguments.get("long_name") or arguments.get("name") or ""
    return "input" if event["name"].startswith("MemcpyH2D") else classify_kernel(event["name"], str(operation))


def classify_kernel(name: str, operation: str) -> str:
    if OF_SUM.search(operation) or COLLECTIVE.search(name):
        return "allreduce"
    return "input" if OF_READ.search(operation) else "compute"


def divide_steps(line: Timeline) -> list[StepTimes]:
    """Each marked step, divided."""
    found = []
    first = 0
    for number, begin, end in line.markers:
        while first < len(line.spans) and line.spans[first][1] <= begin and line.spans[first][0] < begin:
            first += 1
        inside = []
        for at in range(first, len(line.spans)):
            if line.spans[at][0] >= end:
                break
            if line.spans[at][1] > begin:
                inside.append(line.spans[at])
        parts = divide_interval(inside, begin, end)
        total = (end - begin) / 1000
        found.append(StepTimes(number, total, host=max(0.0, total - sum(parts.values())), **parts))
    return found


def divide_interval(spans: Iterable[tuple[float, float, str]], begin: float, end: float) -> dict[str, float]:
    """Milliseconds of each part in [begin, end): an instant counts for the first in `ORDER` that is under way."""
    edges = []
    for start, stop, part in spans:
        edges += [(max(start, begin), 1, part), (min(stop, end), -1, part)]
    under_way = dict.fromkeys(ORDER, 0)
    sums = dict.fromkeys(ORDER, 0.0)
    last = begin
    for at, change, part in sorted(edges):
        now = next((each for each in ORDER if under_way[each]), None)
        if now is not None:
            sums[now] += at - last
        under_way[part] += change
        last = at
    return {part: micros / 1000 for part, micros in sums.items()}
