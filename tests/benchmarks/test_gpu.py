"""The checks of GPUs: what is reported without a GPU, how they are run, and that one of them works on CPUs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import bench, device, test_correctness, test_memory, test_profile, test_speed, test_sweeps
from benchmarks.gpu.bench import Bench, Ended, Run
from benchmarks.gpu.device import Device, find_device, is_named, to_megabytes
from benchmarks.gpu.models import MODELS, find_difference
from benchmarks.gpu.report import NO_GPU
from scaleflow.cluster.gpus import CUDA_DEVICES
from scaleflow.interfaces import Plan
from scaleflow.launcher.processes.handover import SERVER_ENV
from tests.processes import FORKING, server

ROOT = Path(__file__).parents[2]
CPUS = Device("cpu", (), 2)
GPU = Device("gpu", ("0",), 1, 16_000)

#: Checks of each outcome, and one that waits for a command.
OUTCOMES = """
import pytest
from benchmarks.gpu.bench import expect
from benchmarks.gpu.conftest import *

@pytest.mark.gpu(seconds=60, tolerance="none | any")
def test_fail(bench):
    bench.values["seen"] = "a | b"
    bench.remarks.append("a rule is contradicted")
    expect(False, "it does not hold")

@pytest.mark.gpu(seconds=60)
def test_crash(bench):
    raise ZeroDivisionError("by zero")

@pytest.mark.gpu(seconds=60)
def test_skip(bench):
    pytest.skip("a package is missing")

@pytest.mark.gpu(seconds=60, only_gpu=True)
def test_only_gpu(bench):
    raise AssertionError

@pytest.mark.gpu(seconds=60, devices=3)
def test_three(bench):
    raise AssertionError

@pytest.mark.gpu(seconds=1)
def test_wait(bench):
    here = Path(__file__).with_name("pid")
    bench.run(["-c", f"import os, time; open('{here}', 'w').write(str(os.getpid())); time.sleep(600)"])

@pytest.mark.gpu(seconds=60)
@pytest.mark.parametrize("value", [pytest.param(42.0, id="named")])
def test_pass(bench, value):
    bench.values["answer"] = value
"""

#: Of the checks above with two CPUs: result and reason.
EXPECTED = {
    "fail": ("failed", "it does not hold"),
    "crash": ("failed", "ZeroDivisionError: by zero"),
    "skip": ("skipped", "a package is missing"),
    "only_gpu": ("skipped", "it needs a GPU's own memory or counters"),
    "three": ("skipped", "it needs 3 devices, and there is 2"),
    "wait": ("failed", "it took longer than 1 s"),
    "named": ("passed", ""),
}


def read_reports(folder: Path) -> tuple[dict[str, Any], str]:
    return json.loads((folder / "gpu.json").read_text()), (folder / "gpu.md").read_text()


def list_results(folder: Path) -> dict[str, tuple[str, str]]:
    return {each["name"]: (each["result"], each["reason"]) for each in read_reports(folder)[0]["checks"]}


def run_pytest(*words: str) -> tuple[int, str]:
    """The exit code and the output of `pytest -m gpu WORDS`."""
    plain = ("-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main([*plain, "-m", "gpu", *words])
    return int(code), output.getvalue()


def test_without_a_gpu_every_check_is_skipped_by_name(
    isolated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CUDA_DEVICES, "")
    report = tmp_path / "new" / "report"
    code, said = isolated(run_pytest, "benchmarks/gpu", "--report", str(report))
    assert code == 0
    found, text = read_reports(report)
    results = list_results(report)
    assert len(found["checks"]) == len(results) > 40  # names differ
    assert set(results.values()) == {("skipped", NO_GPU)}
    assert f"{len(results)} skipped ({NO_GPU}); the report is {report}/gpu.md" in said.splitlines()
    assert found["machine"]["versions"]["tensorflow"]
    assert all(f"| `{name}` | skipped: {NO_GPU} |" in text for name in results)
    groups = ["Correctness", "Memory", "Profile", "Speed", "Sweeps"]
    assert [line for line in text.splitlines() if line.startswith("## ")] == [f"## {group}" for group in groups]


def test_a_check_that_fails_is_reported_and_the_others_go_on(isolated: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from benchmarks.gpu.conftest import *")
    (tmp_path / "test_group.py").write_text(OUTCOMES)
    words = [str(tmp_path), "--report", str(tmp_path / "report"), "--cpus", "2", "-c", str(ROOT / "pyproject.toml")]
    code, said = isolated(run_pytest, *words)
    assert code == 1
    assert f"3 failed, 3 skipped, 1 passed; the report is {tmp_path}/report/gpu.md" in said
    assert list_results(tmp_path / "report") == EXPECTED
    found, text = read_reports(tmp_path / "report")
    assert [each["values"] for each in found["checks"] if each["values"]] == [{"seen": "a | b"}, {"answer": 42.0}]
    assert "| `fail` | **failed**: it does not hold | seen a \\| b | none \\| any | 0 |" in text
    assert "- `fail`: a rule is contradicted" in text
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_checks_that_pass_or_have_no_time_end_the_command(isolated: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from benchmarks.gpu.conftest import *")
    (tmp_path / "test_group.py").write_text(OUTCOMES)
    words = [str(tmp_path), "--report", str(tmp_path / "report"), "--cpus", "2", "-c", str(ROOT / "pyproject.toml")]
    for more, expected in ((["-k", "skip or named"], 0), (["--rounds", "0"], 4), (["--minutes", "0"], 4)):
        assert isolated(run_pytest, *words, *more)[0] == expected
    assert isolated(run_pytest, *words, "--minutes", "1e-9", "-k", "named or crash")[0] == 1
    assert set(list_results(tmp_path / "report").values()) == {("not run", "out of time")}


def test_a_gpu_that_tensorflow_does_not_find_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(text: str) -> Any:
        return lambda *_, **__: type("Done", (), {"stdout": text})()

    cases = {
        json.dumps({"kind": "CPU"}): "pip install '.[gpu]'",
        json.dumps({"kind": "GPU", "computes": {"float32": "no kernel"}}): "no kernel",
        "": "TensorFlow does not start",
    }
    for text, words in cases.items():
        monkeypatch.setattr(device.subprocess, "run", answer(text))
        assert words in (device.find_obstacle() or "")
    monkeypatch.setattr(device.subprocess, "run", answer(json.dumps({"kind": "GPU", "computes": {"float32": None}})))
    assert device.find_obstacle() is None


def test_devices_are_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["0", "GPU-aaaa", "H", "80000", "1"], ["1", "GPU-bbbb", "H", "[N/A]", "1"], ["2", "GPU-cc", "H", "9", "1"]]
    monkeypatch.setattr(device, "query_nvidia_smi", lambda *fields: rows)
    monkeypatch.setenv(CUDA_DEVICES, "0,GPU-bb")
    assert find_device(0) == Device("gpu", ("0", "GPU-bb"), 2, 80000)
    assert find_device(3) == Device("cpu", (), 3)
    assert device.describe_machine(find_device(0))["gpus"] == ["H, 80000 MiB", "H, [N/A] MiB"]
    monkeypatch.setenv(CUDA_DEVICES, "-1")
    assert find_device(0) is None
    assert not is_named("1", "GPU-b", ["0"])
    assert to_megabytes("[N/A]") == 0


def test_the_memory_in_use_is_sampled_on_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "SAMPLE_SECONDS", 0.001)
    used = iter(range(100, 10**6))
    monkeypatch.setattr(device, "query_nvidia_smi", lambda *_: [["0", "GPU-x", str(next(used))], ["1", "GPU-y", "7"]])
    deadline = time.monotonic() + 30
    with device.sample_memory(GPU) as samples:
        while len(samples) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert samples[:3] == [100, 101, 102]


def test_words_and_variables_of_a_device() -> None:
    assert GPU.words() == ["hardware=gpu"]
    assert GPU.words(logical=2)[1:] == [
        *("hardware.memory_growth=false", "hardware.logical_devices=2", "hardware.memory_limit_mb=2000")
    ]
    assert Device("gpu", ("3", "5"), 2).environment() == {CUDA_DEVICES: "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert Device("gpu", ("3", "5"), 2).environment(2)[CUDA_DEVICES] == "3,5"
    assert CPUS.words(2) == ["hardware=cpu", "hardware.logical_devices=2"]
    assert CPUS.environment() == {}


@pytest.mark.parametrize(
    ("losses", "reference", "difference"),
    [([1.0, 4.0], [1.0, 5.0], 0.2), ([0.5], [0.25], 0.25), ([1.0], [1.0, 2.0], float("inf"))],
)
def test_losses_differ_relative_to_those_above_one(
    losses: Sequence[float], reference: Sequence[float], difference: float
) -> None:
    assert find_difference(losses, reference) == difference


def test_losses_that_differ_too_much_fail_with_the_values() -> None:
    bench = Bench(CPUS, Path())
    with pytest.raises(pytest.fail.Exception, match=r"differ by 0.5, allowed is 0.001: 1/0.5"):
        test_correctness.expect_close(bench, [1.0], [0.5], 1e-3)
    assert bench.values == {"difference": 0.5}
    with pytest.raises(pytest.fail.Exception):
        test_correctness.expect_close(bench, [float("nan")], [0.5], 1e-3)


def test_operations_of_dense_layers() -> None:
    assert test_speed.count_operations([64, 128, 128, 10]) == 138_752  # as `perf/flops_per_example` of the default job


class FakeBench(Bench):
    """A bench whose commands end as the test says."""

    def __init__(self, ends: Sequence[tuple[int, str]]) -> None:
        super().__init__(GPU, Path())
        self.ends = list(ends)
        self.typed: list[list[str]] = []

    def start(self, arguments: Any, extra: Any = None) -> Any:
        self.typed.append([str(word) for word in arguments])

    def wait(self, started: Any) -> Any:
        code, stderr = self.ends.pop(0)
        return Ended(code, "", stderr, 1.0)


OUT_OF_MEMORY = (
    "scaleflow: out of memory on GPU:0, for a tensor of shape [32768,4096] and type float: training.batch_size=32768 "
    "x 1 replica(s) x training.accumulate=1 is a global batch of 32768; training.batch_size=16384 "
    "training.accumulate=2 or hardware.remat=true (in more time) gives the same with less memory"
)


def test_the_advice_of_a_run_that_is_out_of_memory_is_followed() -> None:
    bench = FakeBench([(1, OUT_OF_MEMORY), (0, "")])
    test_memory.test_out_of_memory(bench)
    assert bench.typed[1][-3:-1] == ["training.batch_size=16384", "training.accumulate=2"]
    assert bench.values["attempts"] == 1
    for ends in ([(0, "")], [(1, OUT_OF_MEMORY)] * test_memory.ATTEMPTS, [(1, "scaleflow: something else")]):
        with pytest.raises(pytest.fail.Exception):
            test_memory.test_out_of_memory(FakeBench(ends))


class FirstCommand(Exception):
    """Ends a check at its first training command."""


class RecordingBench(Bench):
    """A bench that starts nothing; losses that are compared exist already."""

    def start(self, arguments: Any, extra: Any = None) -> Any:
        if "scaleflow" in arguments:
            raise FirstCommand(arguments[2:], extra or {})

    def wait(self, started: Any) -> Any:
        return Ended(0, json.dumps(dict.fromkeys(("float32", "float16", "bfloat16"), 1.0)), "", 1.0)

    def reuse(self, name: str, make: Any) -> list[float]:
        return [1.0]


def list_calls() -> dict[str, Callable[[Bench], None]]:
    """The checks by name, each with its parameters."""
    calls: dict[str, Callable[[Bench], None]] = {}
    for module in (test_correctness, test_memory, test_profile, test_speed, test_sweeps):
        for name, check in vars(module).items():
            if name.startswith("test_"):
                marks = {mark.name: mark for mark in check.pytestmark}
                cases = marks["parametrize"].args[1] if "parametrize" in marks else [pytest.param(id=name[5:])]
                calls |= {case.id: partial(call_check, check, case.values) for case in cases}
    return calls


def call_check(check: Callable[..., None], values: Sequence[str], bench: Bench) -> None:
    check(bench, *values)


@pytest.mark.slow
def test_commands_for_a_gpu_pass_the_rules(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(test_profile, "find_spec", lambda name: True)  # as if xprof and nvidia-ml-py were installed
    monkeypatch.setattr(test_speed, "FILES", 1)
    # The commands of the five models differ in nothing that concerns hardware.
    same = tuple(f"{model}_" for model in MODELS if model != "digits")
    for name, check in list_calls().items():
        if name.startswith((*same, "doctor", "refusals")):
            continue
        bench = RecordingBench(Device("gpu", ("0", "1"), 2, 16_000), tmp_path)
        bench.folder = tmp_path / name
        bench.folder.mkdir()
        with pytest.raises(FirstCommand) as ended:
            check(bench)
        words, extra = ended.value.args
        words = [word for word in words if "=" in word and not word.startswith(("hydra.", "model.units=[128"))]
        with monkeypatch.context() as patch:
            for variable, value in extra.items():
                patch.setenv(variable, value)
            made = plan(*words)
        assert made.hardware.name == ("auto" if name == "sweep_shared" else "gpu"), name


def test_a_share_of_the_peak_above_it_fails(tmp_path: Path) -> None:
    def run_with(share: float) -> Run:
        event = {"event": "epoch", "values": {"perf/mfu": share}}
        (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
        return Run(tmp_path, None)  # type: ignore[arg-type]

    bench = Bench(GPU, tmp_path)
    test_speed.record_mfu(bench, "mixed", [run_with(0.4)])
    assert bench.values == {"mixed, perf/mfu": 0.4}
    with pytest.raises(pytest.fail.Exception, match=r"perf/mfu is 1\.2"):
        test_speed.record_mfu(bench, "mixed", [run_with(1.2)])
    with pytest.raises(pytest.fail.Exception, match="on a CPU"):
        test_speed.record_mfu(Bench(CPUS, tmp_path), "mixed", [run_with(0.4)])


def run_on_cpus(address: str, *words: str) -> tuple[int, str]:
    """The same, with commands that are forked."""
    os.environ[SERVER_ENV] = address
    bench.subprocess = FORKING  # type: ignore[assignment]
    return run_pytest(*words)


@pytest.mark.slow
def test_checks_of_each_group_work_on_logical_cpus(isolated: Callable[..., Any], tmp_path: Path) -> None:
    names = ["digits_bfloat16", "mirrored", "in_memory_data", "trace", "xla_mlp", "sweep_shared"]
    words = ["benchmarks/gpu", "--cpus", "2", "-k", " or ".join(names), "--report", str(tmp_path)]
    code, said = isolated(run_on_cpus, server(), *words)
    assert code == 0, said
    found = {each["name"]: each for each in read_reports(tmp_path)[0]["checks"]}
    assert {name: each["result"] for name, each in found.items()} == dict.fromkeys(names, "passed")
    assert 0 < found["digits_bfloat16"]["values"]["difference"] < 5e-2
