"""Divides the time of a step into parts, from the events of a trace.

Each instant between the begin and the end of a step's marker belongs to the first of these parts that applies:

- `compute`: an operation of the step computes on any device;
- `allreduce`: gradients are summed over the replicas;
- `input`: the step waits for examples or assembles them;
- `host`: anything else, such as Python, the start of the call, the time between operations.

So reading or summing that overlaps with computing counts as computing, and the parts sum to the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaleflow.interfaces import READ_SCOPE, STEP_SCOPE, SUM_SCOPE

PARTS = ("input", "compute", "allreduce", "host")

#: Priority while several parts are under way.
PRIORITY = ("compute", "allreduce", "input")

STEP_OPERATION = re.compile(rf"(^|/){STEP_SCOPE}(_\d+)?/")
READ_OPERATION = re.compile(rf"/{READ_SCOPE}(_\d+)?/")
SUM_OPERATION = re.compile(rf"/{SUM_SCOPE}(_\d+)?/")

#: TensorFlow operations that are recognized by name, in any scope.
COLLECTIVE = re.compile(r"Collective(Reduce|Gather|AllToAll)|Nccl", re.IGNORECASE)
GET_NEXT = re.compile(r"\bIteratorGetNext")

Event = Mapping[str, Any]


@dataclass(frozen=True)
class StepTimes:
    """The number of a traced step, and its whole time and its parts in milliseconds."""

    number: int
    total: float
    input: float
    compute: float
    allreduce: float
    host: float


@dataclass(frozen=True)
class Timeline:
    """The events of one process's trace that divide its steps. Times are in microseconds."""

    markers: Sequence[tuple[int, float, float]]  # (number, begin, end) of each step, in order
    spans: Sequence[tuple[float, float, str]]  # (begin, end, part) of every part but `host`, in order
    has_device: bool  # whether the trace has an accelerator's own events


def parse_timeline(trace: Mapping[str, Any]) -> Timeline:
    """Reads the steps and their parts from a trace in Chrome's format, as xprof writes it."""
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
    metadata = [event for event in events if event.get("ph") == "M"]
    devices = {
        event["pid"]
        for event in metadata
        if event["name"] == "process_name" and re.match(r"/device:(GPU|TPU)", event["args"]["name"])
    }
    return {
        (event["pid"], event["tid"])
        for event in metadata
        if event["name"] == "thread_name"
        and event["pid"] in devices
        and re.match(r"Stream #|XLA Ops", event["args"]["name"])
    }


def classify_host_event(event: Event, is_driver: bool) -> str | None:
    """Returns the part that an event of a host thread belongs to, None if it is no work of the step.

    If the host is only the driver of an accelerator, its operations launch kernels and do not count.
    """
    name, arguments = event["name"], event.get("args", {})
    operation = arguments.get("long_name", "")
    if GET_NEXT.search(name) and "group_id" in arguments:  # tf.data's threads have no group_id
        return "input"
    if is_driver or not STEP_OPERATION.search(operation):
        return None
    return classify_kernel(name, operation)


def classify_device_event(event: Event) -> str:
    """Returns the part that a device's event belongs to. Copies from the host are input."""
    arguments = event.get("args", {})
    operation = arguments.get("tf_op") or arguments.get("long_name") or arguments.get("name") or ""
    return "input" if event["name"].startswith("MemcpyH2D") else classify_kernel(event["name"], str(operation))


def classify_kernel(name: str, operation: str) -> str:
    if SUM_OPERATION.search(operation) or COLLECTIVE.search(name):
        return "allreduce"
    return "input" if READ_OPERATION.search(operation) else "compute"


def divide_steps(line: Timeline) -> list[StepTimes]:
    steps = []
    first = 0
    for number, begin, end in line.markers:
        while first < len(line.spans) and line.spans[first][1] <= begin and line.spans[first][0] < begin:
            first += 1
        inside = []
        for index in range(first, len(line.spans)):
            if line.spans[index][0] >= end:
                break
            if line.spans[index][1] > begin:
                inside.append(line.spans[index])
        parts = divide_interval(inside, begin, end)
        total = (end - begin) / 1000
        steps.append(StepTimes(number, total, host=max(0.0, total - sum(parts.values())), **parts))
    return steps


def divide_interval(spans: Iterable[tuple[float, float, str]], begin: float, end: float) -> dict[str, float]:
    """Returns the milliseconds of each part between two times in microseconds; `PRIORITY` decides between overlaps."""
    edges = []
    for start, stop, part in spans:
        edges += [(max(start, begin), 1, part), (min(stop, end), -1, part)]
    under_way = dict.fromkeys(PRIORITY, 0)
    sums = dict.fromkeys(PRIORITY, 0.0)
    last = begin
    for time, change, part in sorted(edges):
        current = next((candidate for candidate in PRIORITY if under_way[candidate]), None)
        if current is not None:
            sums[current] += time - last
        under_way[part] += change
        last = time
    return {part: micros / 1000 for part, micros in sums.items()}
