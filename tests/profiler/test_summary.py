"""From the events of a trace to the parts of a step, and from these to words."""

from __future__ import annotations

from typing import Any

import pytest

from scaleflow.interfaces.events import StepsProfiled
from scaleflow.profiler.summary import (
    divide_interval,
    divide_steps,
    parse_timeline,
    summarise,
    to_line,
    to_markdown,
    to_metrics,
)

Json = dict[str, Any]

HOST, GPU = 1, 2


def op(begin: float, end: float, name: str, operation: str = "", thread: int = 1, pid: int = HOST, **more: str) -> Json:
    arguments = {"long_name": f"{operation}:{name}", **more} if operation else dict(more)
    return {"ph": "X", "pid": pid, "tid": thread, "ts": begin, "dur": end - begin, "name": name, "args": arguments}


def marker(number: int, begin: float, end: float) -> Json:
    return op(begin, end, f"train {number}", step_num=str(number), group_id="0")


def test_an_instant_counts_once_and_for_the_more_important_part() -> None:
    spans = [(0.0, 10.0, "input"), (5.0, 8.0, "compute"), (7.0, 12.0, "allreduce"), (11.0, 11.5, "compute")]
    found = divide_interval(spans, 0.0, 20.0)
    assert found == {"input": 0.005, "compute": 0.0035, "allreduce": 0.0035}
    assert divide_interval([(-5.0, 3.0, "compute"), (18.0, 40.0, "input")], 0.0, 20.0)["input"] == 0.002


def test_a_steps_operations_are_told_from_the_pipelines_and_from_each_other() -> None:
    trace = {
        "traceEvents": [
            {"ph": "M", "pid": HOST, "name": "process_name", "args": {"name": "/host:CPU"}},
            marker(7, 0, 1000),
            marker(8, 2000, 2500),
            op(100, 300, "IteratorGetNextOp::DoCompute", group_id="3"),
            op(0, 1000, "IteratorGetNextOp::DoCompute", thread=5),  # of tf.data's own threads
            op(0, 1000, "MatMul", "decode/MatMul", thread=5),
            op(300, 350, "GatherV2", "train_step/replica_1/read_batch_1/GatherV2"),
            op(350, 600, "MatMul", "gradient_tape/train_step/mlp/MatMul"),
            op(500, 700, "CollectiveReduceV2", "train_step/sum_over_replicas/CollectiveReduceV2", thread=6),
            op(700, 800, "CollectiveReduceV2", "StatefulPartitionedCall/train_step/adam/CollectiveReduceV2"),
            op(2400, 2600, "Sub", "train_step/adam/Sub"),
        ]
    }
    seventh, eighth = divide_steps(parse_timeline(trace))
    assert (seventh.number, seventh.total) == (7, 1.0)
    assert (seventh.input, seventh.compute, seventh.allreduce) == pytest.approx((0.25, 0.25, 0.2))
    assert seventh.host == pytest.approx(0.3)
    assert (eighth.compute, eighth.host) == pytest.approx((0.1, 0.4))


def test_with_a_gpu_what_it_does_counts_and_not_the_host_s_starting_of_it() -> None:
    named = [
        {"ph": "M", "pid": GPU, "name": "process_name", "args": {"name": "/device:GPU:0 NVIDIA"}},
        {"ph": "M", "pid": GPU, "tid": 9, "name": "thread_name", "args": {"name": "Stream #13(Compute)"}},
        {"ph": "M", "pid": GPU, "tid": 10, "name": "thread_name", "args": {"name": "Steps"}},
    ]
    events = [
        marker(3, 0, 1000),
        op(0, 900, "MatMul", "train_step/mlp/MatMul"),
        op(0, 1000, "3", thread=10, pid=GPU),
        op(100, 200, "MemcpyH2D", thread=9, pid=GPU),
        op(200, 300, "gather_kernel", thread=9, pid=GPU, tf_op="train_step/read_batch/GatherV2:GatherV2"),
        op(300, 700, "ampere_sgemm", thread=9, pid=GPU, tf_op="train_step/mlp/MatMul:MatMul"),
        op(700, 900, "ncclDevKernel_AllReduce_Sum", thread=9, pid=GPU),
    ]
    line = parse_timeline({"traceEvents": [*named, *events]})
    (step,) = divide_steps(line)
    assert line.has_device
    assert (step.input, step.compute, step.allreduce, step.host) == pytest.approx((0.2, 0.4, 0.2, 0.2))


def summary(waiting: float, compute: float, allreduce: float = 0.0, usual: float | None = None, **facts: Any) -> Json:
    host = 10 - waiting - compute - allreduce
    from scaleflow.profiler.summary import StepTimes

    steps = [StepTimes(n, 10.0, waiting, compute, allreduce, host) for n in range(50, 60)]
    ops = [
        {"type": "PyFunc", "name": "PyFunc", "count": 3, "self_ms": 2.0, "percent": 40.0, "in_step": False},
        {"type": "MatMul", "name": "train_step/MatMul", "count": 3, "self_ms": 1.0, "percent": 20.0, "in_step": True},
    ]
    known = {"strategy": "one_device", "hardware": "cpu", "input": "stream", "cache": "none", **facts}
    event = StepsProfiled("", 50, 59, "", usual, known)
    return {**summarise(event, steps, ops), "memory": {"host": 5.0}, "workers": []}


def test_an_input_bound_run_is_told_so_with_what_would_help() -> None:
    first = summary(3.7, 5.0)["advice"][0]
    assert first.startswith("37 % of a step waits for input: the run is input-bound")
    assert "dataset.cache=memory" in first
    assert "more parallel reads" in first
    assert "PyFunc, which is Python" in first
    assert "dataset.cache" not in summary(3.7, 5.0, cache="memory")["advice"][0]
    assert "part of the run" in summary(1.0, 5.0)["advice"][0]
    assert "gathers its examples from memory: the run is not" in summary(1.0, 5.0, input="memory")["advice"][0]
    assert summary(0.2, 9.0)["advice"][0] == "2 % of a step waits for input: the run is not input-bound."


def test_other_long_stages_are_told() -> None:
    many = " ".join(summary(0.1, 3.0, 6.0, strategy="multi_worker")["advice"])
    assert "60 % of a step sums gradients" in many
    assert "strategy.communication=nccl" in many
    assert "1 ms" in " ".join(summary(0.0, 1.0, usual=1.0)["advice"])  # outside the window
    assert "training.batch_size" in " ".join(summary(0.0, 1.0)["advice"])
    assert "most of it in MatMul" in summary(0.1, 9.0)["advice"][-1]
    assert "precision=mixed" in summary(0.1, 9.0, hardware="gpu", precision="float32")["advice"][-1]


def test_the_figures_are_the_page_s_and_the_metrics() -> None:
    found = summary(3.7, 5.0, 0.3)
    assert to_metrics(found) == {
        "profile/step_ms": 10.0,
        "profile/input_pct": pytest.approx(37.0),
        "profile/allreduce_pct": pytest.approx(3.0),
    }
    page = to_markdown(found)
    assert "| input | 37.0 % | 3.7 |" in page
    assert "| MatMul | `train_step/MatMul` | 3 | 1.000 | 20.0 % |" in page
    assert "steps 50 to 59: 10 ms a step, input 37 %" in to_line(found)


def test_of_a_coordinator_there_is_the_time_of_a_step_and_no_more() -> None:
    found = summary(3.7, 5.0, strategy="parameter_server")
    assert to_metrics(found) == {"profile/step_ms": 10.0}
    assert "workers" in found["advice"][0]
    assert "input" not in to_line(found)
