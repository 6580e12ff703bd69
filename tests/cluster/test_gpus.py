"""Which GPUs each process of a run on one machine sees, and what is refused; no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scaleflow.cli import main
from scaleflow.cluster.gpus import CUDA_DEVICES, GROWTH, drop_assigned_devices, gpu_environments
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Hardware, Plan
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.launcher.processes.local_host import make_worker_specs
from scaleflow.runs import RunSpec
from scaleflow.worker.tasks import TrainModel

STEPPING = {"worker": 2}
SERVED = {"chief": 1, "worker": 2, "ps": 1}


@pytest.mark.parametrize(
    ("roles", "options", "gpus", "seen"),
    [
        (STEPPING, Hardware(), "01", ["0", "1"]),
        (STEPPING, Hardware(), "0123", ["0,1", "2,3"]),
        (STEPPING, Hardware(), "012", ["0", "1"]),
        (STEPPING, Hardware(devices=[1, 3]), "0123", ["1", "3"]),
        (STEPPING, Hardware("cpu"), "01", ["-1", "-1"]),
        (STEPPING, Hardware(), "", [None, None]),
        ({"worker": 1}, Hardware(), "01", [None]),
        (SERVED, Hardware(), "0123", ["2", "0", "1", "-1"]),
        (SERVED, Hardware(), "01", ["1", "0", "1", "-1"]),
        (SERVED, Hardware(), "0", ["0", "0", "0", "-1"]),
        (SERVED, Hardware(devices=[3]), "0123", ["3", "3", "3", "-1"]),
        (SERVED, Hardware("cpu"), "01", ["-1"] * 4),
    ],
)
def test_each_process_sees_its_own_gpus(
    roles: Mapping[str, int], options: Hardware, gpus: str, seen: Sequence[str | None]
) -> None:
    found = gpu_environments(roles, options, list(gpus))
    assert [each.get(CUDA_DEVICES) for each in found] == seen


def test_processes_that_share_a_gpu_take_its_memory_as_they_need_it() -> None:
    found = gpu_environments(SERVED, Hardware(), ["0", "1"])
    assert [each.get(GROWTH) for each in found] == ["true", None, "true", None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Hardware(devices=[1]), "cluster.workers=2: .* use strategy=one_device, or hardware=cpu"),
        (Hardware(devices=[5]), r"hardware.devices=\[5\]: this machine has the GPUs \[0, 1\]; choose"),
    ],
)
def test_too_few_gpus_are_refused(options: Hardware, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpu_environments(STEPPING, options, ["0", "1"])


def test_indices_that_the_launcher_has_applied_are_not_applied_again() -> None:
    options = Hardware(devices=[3])
    (first, _) = gpu_environments(STEPPING, Hardware(devices=[2, 3]), list("0123"))
    assert drop_assigned_devices(options, first).devices is None
    assert drop_assigned_devices(options, {}) == options


def test_a_launcher_divides_the_gpus_that_a_sweep_has_left_it(plan: Callable[..., Plan], tmp_path: Path) -> None:
    spec = RunSpec(
        plan("strategy=multi_worker", "tracking=none"), tmp_path, 0.0, TrainModel(), environment={CUDA_DEVICES: "2,3"}
    )
    assert [environment[CUDA_DEVICES] for environment in make_worker_specs(spec)[1]] == ["2", "3"]


def test_more_workers_than_gpus_are_refused_before_there_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SERVER_ENV, "nobody forks here")
    monkeypatch.setenv(CUDA_DEVICES, "0,1")
    assert main(["strategy=multi_worker", "cluster.workers=3", "tracking=none"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("scaleflow: cluster.workers=3: each worker needs its own GPU, and this machine has 2")
    assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def served(options: Hardware, computes: bool) -> dict[str, Any]:
    from scaleflow.strategy.make import server_config

    found = server_config(options, 3, computes)
    gpu = found.gpu_options
    limits = [list(device.memory_limit_mb) for device in gpu.experimental.virtual_devices]
    return {
        "gpus": found.device_count["GPU"],
        "visible": gpu.visible_device_list,
        "growth": gpu.allow_growth,
        "limits": limits,
    }


@pytest.mark.parametrize(
    ("options", "computes", "wanted"),
    [
        (Hardware(), True, {"gpus": 1, "visible": "", "growth": False, "limits": []}),
        (Hardware(), False, {"gpus": 0}),
        (Hardware("cpu"), True, {"gpus": 0}),
        (Hardware("gpu", devices=[2, 3], memory_growth=True), True, {"gpus": 1, "visible": "2", "growth": True}),
        (Hardware("gpu", memory_limit_mb=512), True, {"gpus": 1, "limits": [[512.0]], "growth": False}),
    ],
)
def test_a_process_that_serves_follows_hardware(
    isolated: Callable[..., Any], options: Hardware, computes: bool, wanted: Mapping[str, Any]
) -> None:
    found = isolated(served, options, computes)
    assert {key: found[key] for key in wanted} == wanted
