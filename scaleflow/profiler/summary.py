"""Divides the time of a traced step into parts, and summarizes a window: figures, advice and a Markdown page.

Each instant between the start and the end of a step's marker belongs to the first of these parts that applies:

- `compute`: an operation of the step computes on any device;
- `allreduce`: gradients are summed over the replicas;
- `input`: the step waits for examples or assembles them;
- `host`: anything else, such as Python, the start of the call, the time between operations.

Reading or summing that overlaps with computing counts as computing. The parts add up to the time of the step.
"""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scaleflow.interfaces import READ_SCOPE, STEP_SCOPE, SUM_SCOPE
from scaleflow.interfaces.events import StepsProfiled

PARTS = ("input", "compute", "allreduce", "host")

#: Priority of parts that overlap.
PRIORITY = ("compute", "allreduce", "input")

STEP_OPERATION = re.compile(rf"(^|/){STEP_SCOPE}(_\d+)?/")
READ_OPERATION = re.compile(rf"/{READ_SCOPE}(_\d+)?/")
SUM_OPERATION = re.compile(rf"/{SUM_SCOPE}(_\d+)?/")

#: TensorFlow operations that are recognized by their names in any scope.
COLLECTIVE = re.compile(r"Collective(Reduce|Gather|AllToAll)|Nccl", re.IGNORECASE)
GET_NEXT = re.compile(r"\bIteratorGetNext")

Event = Mapping[str, Any]


@dataclass(frozen=True)
class StepTimes:
    """The number of a traced step, its total time, and the time of each part, in milliseconds."""

    number: int
    total: float
    input: float
    compute: float
    allreduce: float
    host: float


@dataclass(frozen=True)
class Timeline:
    """The events in one process's trace that are needed to divide its steps. Times are in microseconds."""

    markers: Sequence[tuple[int, float, float]]  # (number, begin, end) of each step, in order
    spans: Sequence[tuple[float, float, str]]  # (begin, end, part) of all parts except `host`, in order
    has_device: bool  # whether the trace has an accelerator's own events


def parse_timeline(trace: Mapping[str, Any]) -> Timeline:
    """Reads the steps and their parts from xprof's trace in Chrome's format."""
    streams = device_streams(trace["traceEvents"])
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    markers = []
    spans = []
    for event in events:
        begin = event["ts"]
        end = begin + event["dur"]
        if event["name"].split(" ")[0] == "train" and "step_num" in event.get("args", {}):
            markers.append((int(event["args"]["step_num"]), begin, end))
        if (event["pid"], event["tid"]) in streams:
            part: str | None = classify_device_event(event)
        else:
            part = classify_host_event(event, is_driver=bool(streams))
        if part is not None:
            spans.append((begin, end, part))
    return Timeline(sorted(markers), sorted(spans), bool(streams))


def device_streams(events: Iterable[Event]) -> set[tuple[int, int]]:
    """Returns process and thread number of each stream in which an accelerator computes."""
    metadata = [event for event in events if event.get("ph") == "M"]
    devices = set()
    for event in metadata:
        if event["name"] == "process_name" and re.match(r"/device:(GPU|TPU)", event["args"]["name"]):
            devices.add(event["pid"])
    streams = set()
    for event in metadata:
        if event["name"] != "thread_name" or event["pid"] not in devices:
            continue
        if re.match(r"Stream #|XLA Ops", event["args"]["name"]):
            streams.add((event["pid"], event["tid"]))
    return streams


def classify_host_event(event: Event, is_driver: bool) -> str | None:
    """Returns the part of an event of a host thread, or None if it is not work of the step.

    `is_driver`: whether an accelerator computes the step. The host's operations then only launch kernels and do not
    count.
    """
    name = event["name"]
    arguments = event.get("args", {})
    operation = arguments.get("long_name", "")
    if GET_NEXT.search(name) and "group_id" in arguments:  # tf.data's threads have no group_id
        return "input"
    if is_driver or not STEP_OPERATION.search(operation):
        return None
    return classify_kernel(name, operation)


def classify_device_event(event: Event) -> str:
    """Returns the part of a device's event. Copies from the host are input."""
    arguments = event.get("args", {})
    operation = arguments.get("tf_op") or arguments.get("long_name") or arguments.get("name") or ""
    if event["name"].startswith("MemcpyH2D"):
        return "input"
    return classify_kernel(event["name"], str(operation))


def classify_kernel(name: str, operation: str) -> str:
    """Returns the part of a kernel, from its own name and that of its TensorFlow operation."""
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
    """Returns the milliseconds of each part between two times in microseconds. Overlaps follow `PRIORITY`."""
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


Summary = dict[str, Any]

#: Percent of a step that waits for input. A run is input-bound from INPUT_BOUND on, and not below NOT_INPUT_BOUND.
INPUT_BOUND = 20.0
NOT_INPUT_BOUND = 5.0

#: From these percentages of a step on, the summary gives advice about all-reduce and the host.
HIGH_ALLREDUCE = 15.0
HIGH_HOST = 40.0

#: Number of operations in the summary.
OPS = 15


def summarise(event: StepsProfiled, steps: Sequence[StepTimes], ops: Sequence[Mapping[str, Any]]) -> Summary:
    """Returns the figures of one process's trace, with advice. `ops` is the result of `list_longest_operations`."""
    import numpy as np

    totals = [step.total for step in steps]
    p50, p95 = np.percentile(totals, (50, 95))
    total = sum(totals) or 1.0
    shares = {}
    medians = {}
    for part in PARTS:
        times = [getattr(step, part) for step in steps]
        shares[part] = round(100 * sum(times) / total, 2)
        medians[f"{part}_ms"] = round(statistics.median(times), 4)
    rounded_steps = []
    for step in steps:
        rounded_steps.append({key: round(value, 4) for key, value in asdict(step).items()})
    is_elsewhere = event.facts.get("strategy") == "parameter_server"
    summary: Summary = {
        "first_step": event.first,
        "last_step": event.last,
        "steps": len(steps),
        "step_ms": {"p50": round(float(p50), 4), "p95": round(float(p95), 4)},
        "percent": None if is_elsewhere else shares,
        "median_ms": None if is_elsewhere else medians,
        "usual_step_ms": event.usual_ms,
        "ops": list(ops[:OPS]),
        "each_step": rounded_steps,
        "facts": dict(event.facts),
    }
    summary["advice"] = give_advice(summary, ops)
    return summary


def to_metrics(summary: Summary) -> dict[str, float]:
    """Returns the metrics of a profile. With parameter servers, where other processes compute, only the step time."""
    metrics = {"profile/step_ms": summary["step_ms"]["p50"]}
    if summary["percent"] is not None:
        metrics["profile/input_pct"] = summary["percent"]["input"]
        metrics["profile/allreduce_pct"] = summary["percent"]["allreduce"]
    return metrics


def give_advice(summary: Summary, ops: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns advice, ordered by importance."""
    percent = summary["percent"]
    facts = summary["facts"]
    if percent is None:
        return [
            "Only the coordinator was traced. Its workers compute what it waits for, and in the window only one step "
            "runs at a time. To see the parts of a step, profile the same run with strategy=one_device."
        ]
    advice = [advise_on_input(percent["input"], facts, ops)]
    if percent["allreduce"] >= HIGH_ALLREDUCE:
        between_workers = facts.get("strategy") == "multi_worker"
        end = "; between GPUs, strategy.communication=nccl." if between_workers else "."
        advice.append(
            f"{percent['allreduce']:.0f} % of a step sums gradients over the replicas: a larger training.batch_size or "
            f"training.accumulate does that less often for the same examples{end}"
        )
    if percent["host"] >= HIGH_HOST:
        advice.append(advise_on_host(summary))
    if percent["compute"] == max(percent.values()):
        advice.append(advise_on_compute(percent["compute"], facts, ops))
    return advice


def advise_on_input(percent: float, facts: Mapping[str, Any], ops: Sequence[Mapping[str, Any]]) -> str:
    if percent < NOT_INPUT_BOUND:
        return f"{percent:.0f} % of a step waits for input: the run is not input-bound."
    if facts.get("input") == "memory" and percent < INPUT_BOUND:
        return f"{percent:.0f} % of a step gathers its examples from memory: the run is not input-bound."
    degree = "the run is input-bound" if percent >= INPUT_BOUND else "a part of the run is input-bound"
    return f"{percent:.0f} % of a step waits for input: {degree}; {suggest_input_fix(facts, ops)}."


def suggest_input_fix(facts: Mapping[str, Any], ops: Sequence[Mapping[str, Any]]) -> str:
    if facts.get("input") == "memory":
        return (
            "the examples are in memory, and this is the time to gather them, which is a large share only if a step "
            "does little else; use a larger model or training.batch_size, and look at perf/step_ms outside the window"
        )
    fixes = []
    if facts.get("cache") == "none" and facts.get("shards", 1) == 1:
        fixes.append("dataset.cache=memory (or file) reads and prepares each example once")
    fixes.append("more parallel reads (dataset.threads, or more cores)")
    slowest = next((op for op in ops if not op["in_step"]), None)
    if slowest is not None:
        fix = f"the longest of the pipeline is {slowest['type']}"
        if slowest["type"] == "PyFunc":
            fix += ", which is Python and runs in one thread at a time: use TensorFlow's operations"
        fixes.append(fix)
    return "; ".join(fixes)


def advise_on_host(summary: Summary) -> str:
    usual = summary["usual_step_ms"]
    p50 = summary["step_ms"]["p50"]
    share = f"{summary['percent']['host']:.0f} % of a step is none of these: it is Python and the start of the call"
    if usual is not None and usual < 0.8 * p50:
        return (
            f"{share}. In the window each step is a separate call ({p50:.3g} ms). Outside, one call runs many steps "
            f"and a step takes {usual:.3g} ms, so most of this time is not spent there."
        )
    return f"{share}: a larger training.batch_size gives a step more to do."


def advise_on_compute(percent: float, facts: Mapping[str, Any], ops: Sequence[Mapping[str, Any]]) -> str:
    longest = next((op for op in ops if op["in_step"]), None)
    most = f", most of it in {longest['type']} ({longest['name']})" if longest else ""
    on_gpu = facts.get("hardware") == "gpu"
    hint = ""
    if on_gpu and facts.get("precision") == "float32":
        hint = "; precision=mixed is faster on a GPU with tensor cores"
    elif on_gpu:
        hint = "; hardware.xla=true may fuse small operations, a larger training.batch_size uses the device better"
    return f"{percent:.0f} % of a step computes{most}{hint}."


def to_markdown(summary: Summary) -> str:
    first = summary["first_step"]
    last = summary["last_step"]
    p50 = summary["step_ms"]["p50"]
    p95 = summary["step_ms"]["p95"]
    lines = [f"# Steps {first} to {last}", "", f"A step took {p50:.3g} ms (p50), {p95:.3g} ms (p95)."]
    if summary["usual_step_ms"] is not None:
        lines.append(
            "Outside the window, where several steps are one call, a step of that epoch took "
            f"{summary['usual_step_ms']:.3g} ms on average, waiting for input included."
        )
    lines.append("")
    for advice in summary["advice"]:
        lines.append(f"- {advice}")
    lines.append("")
    if summary["percent"] is not None:
        lines += ["| part of a step | share | median, ms |", "|---|---|---|"]
        for part in PARTS:
            median = summary["median_ms"][f"{part}_ms"]
            lines.append(f"| {part} | {summary['percent'][part]:.1f} % | {median:.3g} |")
    if len(summary.get("workers", ())) > 1:
        lines += ["", "| process | step p50, ms | input | compute | all-reduce | host |", "|---|---|---|---|---|---|"]
        for worker in summary["workers"]:
            shares = " | ".join(f"{worker['percent'][part]:.1f} %" for part in PARTS)
            lines.append(f"| {worker['name']} | {worker['step_ms']:.3g} | {shares} |")
    if summary["memory"]:
        lines += ["", "| memory | peak, MiB |", "|---|---|"]
        for name, value in summary["memory"].items():
            lines.append(f"| {name} | {value:,.0f} |")
    lines += ["", "| operation | name | count | self time, ms | share |", "|---|---|---|---|---|"]
    for op in summary["ops"]:
        row = f"| {op['type']} | `{op['name']}` | {op['count']} | {op['self_ms']:.3f} | {op['percent']:.1f} % |"
        lines.append(row)
    lines += ["", EXPLANATION]
    return "\n".join(lines) + "\n"


EXPLANATION = """\
An instant of a step counts as `compute` if an operation computes on any device; else as `allreduce` if gradients are
summed over the replicas; else as `input` if the step waits for examples; else as `host`. The shares of operations refer
to the self time of all operations in the trace, also those of the input pipeline, without their waiting."""


def to_line(summary: Summary) -> str:
    """Formats a summary as one line for the end of a command."""
    steps = f"steps {summary['first_step']} to {summary['last_step']}: {summary['step_ms']['p50']:.3g} ms a step"
    if summary["percent"] is None:
        return steps
    parts = ", ".join(f"{part} {summary['percent'][part]:.0f} %" for part in PARTS)
    return f"{steps}, {parts}"
