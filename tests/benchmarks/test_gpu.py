"""The checks of GPUs: what is reported without a GPU, how they are run, and that one of them works on CPUs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import correctness, device, memory, profile, speed
from benchmarks.gpu.__main__ import list_checks, main
from benchmarks.gpu.bench import Bench, CheckFailed, CheckSkipped, Ended, Run, expect
from benchmarks.gpu.checks import NO_GPU, Check, run_checks
from benchmarks.gpu.device import Device, find_device, is_named, to_megabytes
from benchmarks.gpu.models import MODELS, find_difference
from scaleflow.cluster.gpus import CUDA_DEVICES
from scaleflow.interfaces import Plan
from scaleflow.launcher.processes.handover import SERVER_ENV
from tests.processes import FORKING, server

CPUS = Device("cpu", (), 2)
GPU = Device("gpu", ("0",), 1, 16_000)


def pass_with_value(bench: Bench) -> None:
    bench.values["answer"] = 42.0


def fail(bench: Bench) -> None:
    bench.values["seen"] = "a | b"
    bench.remarks.append("a rule is contradicted")
    expect(False, "it does not hold")


def skip(bench: Bench) -> None:
    raise CheckSkipped("a package is missing")


def crash(bench: Bench) -> None:
    raise ZeroDivisionError("by zero")


def wait_for_ever(bench: Bench) -> None:
    bench.run(["-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"])


def run(*functions: Callable[[Bench], None], seconds: float = 60, **options: Any) -> list[tuple[str, str]]:
    checks = [Check(each.__name__, "group", 60, each, **options) for each in functions]
    return [(result.status, result.reason) for result in run_checks(checks, CPUS, seconds)]


def read_reports(folder: Path) -> tuple[dict[str, Any], str]:
    return json.loads((folder / "gpu.json").read_text()), (folder / "gpu.md").read_text()


def test_without_a_gpu_every_check_is_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(CUDA_DEVICES, "")
    assert main(["--report", str(tmp_path / "new" / "report")]) == 0
    names = [check.name for check in list_checks()]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [[name, "skipped"] for name in names]
    assert lines[-1].startswith(f"{len(names)} skipped ({NO_GPU}); the report is ")
    found, text = read_reports(tmp_path / "new" / "report")
    assert [(each["name"], each["result"], each["reason"]) for each in found["checks"]] == [
        (name, "skipped", NO_GPU) for name in names
    ]
    assert found["machine"]["versions"]["tensorflow"]
    assert all(f"| `{name}` | skipped: {NO_GPU} |" in text for name in names)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        *("## Correctness", "## Memory", "## Profile", "## Speed", "## Sweeps")
    ]


def test_names_of_checks_differ_and_all_fit_into_half_an_hour_each() -> None:
    names = [check.name for check in list_checks()]
    assert len(set(names)) == len(names) > 40
    assert not set(names) & {check.group for check in list_checks()}
    assert all(0 < check.seconds < 1800 for check in list_checks())


def test_groups_and_checks_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CUDA_DEVICES, "")
    assert main(["resnet50", "sweeps", "model.depth=101", "--report", str(tmp_path)]) == 0
    names = [each["name"] for each in read_reports(tmp_path)[0]["checks"]]
    assert names == ["resnet50", "sweep_shared", "sweep_limited", "sweep_precisions"]
    for wrong in (["gpt5"], ["--rounds", "0"], ["--minutes", "0"]):
        with pytest.raises(SystemExit) as ended:
            main([*wrong, "--report", str(tmp_path)])
        assert ended.value.code == 2


def test_a_check_that_fails_is_reported_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = (fail, crash, skip, pass_with_value)
    checks = [Check(each.__name__, "group", 60, each, "none | any") for each in functions]
    assert main(["--cpus", "1", "--report", str(tmp_path)], checks) == 1
    assert "1 skipped, 1 passed" in capsys.readouterr().out
    found, text = read_reports(tmp_path)
    assert [(each["name"], each["result"], each["reason"]) for each in found["checks"]] == [
        ("fail", "failed", "it does not hold"),
        ("crash", "failed", "ZeroDivisionError: by zero"),
        ("skip", "skipped", "a package is missing"),
        ("pass_with_value", "passed", ""),
    ]
    assert [each["values"] for each in found["checks"]] == [{"seen": "a | b"}, {}, {}, {"answer": 42.0}]
    assert "| `fail` | **failed**: it does not hold | seen a \\| b | none \\| any | 0 |" in text
    assert "- `fail`: a rule is contradicted" in text
    assert main(["--cpus", "1", "--report", str(tmp_path)], checks[2:]) == 0


def test_check_that_does_not_begin_in_time_is_not_run(tmp_path: Path) -> None:
    assert run(pass_with_value, fail, seconds=0) == [("not run", "out of time")] * 2
    checks = [Check("late", "group", 60, pass_with_value)]
    assert main(["--cpus", "1", "--minutes", "1e-9", "--report", str(tmp_path)], checks) == 1


@pytest.mark.parametrize(("own", "total", "expected"), [(1.0, 60.0, "failed"), (60.0, 1.0, "not run")])
def test_a_check_that_does_not_end_is_stopped(own: float, total: float, expected: str) -> None:
    pids = []

    def wait(bench: Bench) -> None:
        try:
            wait_for_ever(bench)
        finally:
            pids.append(bench._started[0].process.pid)

    checks = [Check("slow", "group", own, wait), Check("next", "group", 60, pass_with_value)]
    first, second = run_checks(checks, CPUS, total)
    assert (first.status, second.status) == (expected, "passed" if expected == "failed" else "not run")
    assert first.reason == ("it took longer than 1 s" if expected == "failed" else "out of time")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_check_that_cpus_cannot_make_is_skipped() -> None:
    assert run(fail, only_gpu=True)[0][0] == "skipped"
    assert run(fail, devices=3) == [("skipped", "it needs 3 devices, and there is 2")]


def test_hindrance_of_all_checks_fails_them_without_running_them() -> None:
    (result,) = run_checks([Check("any", "group", 60, crash)], GPU, 60, obstacle="no CUDA")
    assert (result.status, result.reason) == ("failed", "no CUDA")


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
    with pytest.raises(CheckFailed, match=r"differ by 0.5, allowed is 0.001: 1/0.5"):
        correctness.expect_close(bench, [1.0], [0.5], 1e-3)
    assert bench.values == {"difference": 0.5}
    with pytest.raises(CheckFailed):
        correctness.expect_close(bench, [float("nan")], [0.5], 1e-3)


def test_operations_of_dense_layers() -> None:
    assert speed.count_operations([64, 128, 128, 10]) == 138_752  # as `perf/flops_per_example` of the default job


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
    memory.run_out_of_memory(bench)
    assert bench.typed[1][-3:-1] == ["training.batch_size=16384", "training.accumulate=2"]
    assert bench.values["attempts"] == 1
    for ends in ([(0, "")], [(1, OUT_OF_MEMORY)] * memory.ATTEMPTS, [(1, "scaleflow: something else")]):
        with pytest.raises(CheckFailed):
            memory.run_out_of_memory(FakeBench(ends))


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


def test_commands_for_a_gpu_pass_the_rules(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(profile, "find_spec", lambda name: True)  # as if xprof and nvidia-ml-py were installed
    # The commands of the five models differ in nothing that concerns hardware.
    same = tuple(f"{model}_" for model in MODELS if model != "digits")
    checks = [check for check in list_checks() if not check.name.startswith((*same, "doctor", "refusals"))]
    for check in checks:
        bench = RecordingBench(Device("gpu", ("0", "1"), 2, 16_000), tmp_path)
        bench.folder = tmp_path / check.name
        bench.folder.mkdir()
        with pytest.raises(FirstCommand) as ended:
            check.function(bench)
        words, extra = ended.value.args
        words = [word for word in words if "=" in word and not word.startswith(("hydra.", "model.units=[128"))]
        with monkeypatch.context() as patch:
            for name, value in extra.items():
                patch.setenv(name, value)
            made = plan(*words)
        assert made.hardware.name == ("auto" if check.name == "sweep_shared" else "gpu"), check.name


def test_a_share_of_the_peak_above_it_fails(tmp_path: Path) -> None:
    def run_with(share: float) -> Run:
        event = {"event": "epoch", "values": {"perf/mfu": share}}
        (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
        return Run(tmp_path, None)  # type: ignore[arg-type]

    bench = Bench(GPU, tmp_path)
    speed.record_mfu(bench, "mixed", [run_with(0.4)])
    assert bench.values == {"mixed, perf/mfu": 0.4}
    with pytest.raises(CheckFailed, match=r"perf/mfu is 1\.2"):
        speed.record_mfu(bench, "mixed", [run_with(1.2)])
    with pytest.raises(CheckFailed, match="on a CPU"):
        speed.record_mfu(Bench(CPUS, tmp_path), "mixed", [run_with(0.4)])


@pytest.mark.slow
def test_checks_of_each_group_work_on_logical_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SERVER_ENV, server())
    monkeypatch.setattr("benchmarks.gpu.bench.subprocess", FORKING)
    names = ["digits_bfloat16", "mirrored", "in_memory_data", "trace", "xla_mlp", "sweep_shared"]
    assert main(["--cpus", "2", *names, "--report", str(tmp_path)]) == 0
    found = {each["name"]: each for each in read_reports(tmp_path)[0]["checks"]}
    assert {name: each["result"] for name, each in found.items()} == dict.fromkeys(names, "passed")
    assert 0 < found["digits_bfloat16"]["values"]["difference"] < 5e-2
