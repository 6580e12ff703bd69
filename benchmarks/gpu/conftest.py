"""Checks of everything that needs an NVIDIA GPU, in at most 30 minutes: the device that they use, and their report.

    python -m pytest benchmarks/gpu -m gpu                        # writes gpu.md and gpu.json into build/gpu
    python -m pytest benchmarks/gpu/test_memory.py --rounds 3     # one group; -k resnet50: one check
    python -m pytest benchmarks/gpu -m gpu --cpus 2               # small runs on logical CPUs: whether the checks work

Each check runs `python -m scaleflow` commands in a folder of its own, within its own time (the mark's `seconds`).
Without a GPU all checks are skipped. The exit code is 0 if all checks passed or were skipped, and 1 if one failed, or
was not run because time was over.

A check is a test with the mark `gpu`. Its arguments are `seconds`; `tolerance`, what is allowed, for the report;
`devices`, how many GPUs, or logical CPUs, it needs; `only_gpu`, whether it makes no sense on CPUs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.bench import Bench, Options, OutOfTime
from benchmarks.gpu.device import Device, find_device, find_obstacle
from benchmarks.gpu.report import NO_GPU, Report, Result, summarize

ONLY_GPU = "it needs a GPU's own memory or counters"

REPORT: pytest.StashKey[Report] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "checks of GPUs")
    group.addoption("--report", type=Path, default=Path("build/gpu"), help="folder of gpu.md (default build/gpu)")
    group.addoption("--minutes", type=float, default=30, help="time limit of all checks (default 30)")
    group.addoption("--rounds", type=int, default=1, help="how often precisions are compared (default 1)")
    group.addoption("--batch-size", type=int, default=128, help="ResNet-50's, of a GPU (default 128)")
    group.addoption("--override", action="append", default=[], metavar="KEY=VALUE", help="of the ResNet-50")
    group.addoption("--cpus", type=int, default=0, help="use so many logical CPUs in place of GPUs")


def pytest_configure(config: pytest.Config) -> None:
    options = config.option
    if min(options.rounds, options.batch_size, options.cpus + 1) < 1 or not options.minutes > 0:
        raise pytest.UsageError("--rounds and --batch-size: at least 1; --minutes: above 0; --cpus: not below 0")


@dataclass(frozen=True)
class Setting:
    """What all checks share.

    Attributes:
        device: what they run on; None: there is no GPU.
        obstacle: why none of them can pass; they fail without being run.
        shared: a folder.
        end: of their time, on the clock of `time.monotonic`.
    """

    device: Device | None
    obstacle: str | None
    shared: Path
    end: float


@pytest.fixture(scope="session")
def setting(pytestconfig: pytest.Config) -> Iterator[Setting]:
    end = time.monotonic() + 60 * pytestconfig.option.minutes
    device = find_device(pytestconfig.option.cpus)
    obstacle = find_obstacle() if device and device.kind == "gpu" else None
    with tempfile.TemporaryDirectory(prefix="scaleflow-gpu-") as shared:
        yield Setting(device, obstacle, Path(shared), end)


@pytest.fixture
def bench(request: pytest.FixtureRequest, setting: Setting) -> Iterator[Bench]:
    """What a check works with. Its commands end with it."""
    needs = read_mark(request.node)
    if setting.device is None:
        pytest.skip(NO_GPU)
    if needs.get("only_gpu") and setting.device.kind == "cpu":
        pytest.skip(ONLY_GPU)
    if setting.device.count < needs.get("devices", 1):
        pytest.skip(f"it needs {needs['devices']} devices, and there is {setting.device.count}")
    if setting.obstacle is not None:
        pytest.fail(setting.obstacle, pytrace=False)
    begin = time.monotonic()
    if begin >= setting.end:
        raise OutOfTime(is_total=True)
    given = request.config.option
    options = Options(given.rounds, given.batch_size, given.override)
    own_end = begin + needs["seconds"]
    with tempfile.TemporaryDirectory(prefix="check-", dir=setting.shared) as folder:
        deadline, is_last = min(setting.end, own_end), setting.end <= own_end
        bench = Bench(setting.device, setting.shared, options, Path(folder), deadline, is_last)
        request.node.user_properties += [("values", bench.values), ("remarks", bench.remarks)]
        yield bench
        bench.stop_processes()


def read_mark(item: pytest.Item) -> dict[str, Any]:
    mark = item.get_closest_marker("gpu")
    assert mark is not None, f"{item.nodeid} has no mark `gpu`"
    return dict(mark.kwargs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Writes the report after each check, so that it is there if the machine goes away."""
    made = yield
    if item.get_closest_marker("gpu") and (call.when == "call" or (call.when == "setup" and not made.passed)):
        config = item.config
        report = config.stash.setdefault(REPORT, Report(config.option.report))
        setting = getattr(item, "funcargs", {}).get("setting")
        report.add(explain(item, call, made.outcome), setting.device if setting else None)
    return made


def explain(item: pytest.Item, call: pytest.CallInfo[None], status: str) -> Result:
    """Returns what came of a check: as pytest says it, with a reason in one line."""
    error, reason = call.excinfo.value if call.excinfo else None, ""
    needs = read_mark(item)
    if isinstance(error, OutOfTime):
        status = "not run" if error.is_total else "failed"
        reason = "out of time" if error.is_total else f"it took longer than {needs['seconds']:g} s"
    elif isinstance(error, pytest.skip.Exception | pytest.fail.Exception):
        reason = str(error.msg)
    elif error is not None:
        reason = f"{type(error).__name__}: {error}"
    return Result(
        name=item.callspec.id if hasattr(item, "callspec") else item.name.removeprefix("test_"),
        group=item.path.stem.removeprefix("test_"),
        tolerance=needs.get("tolerance", ""),
        status=status,
        reason=reason,
        seconds=call.duration,
        **dict(item.user_properties),
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if report := terminalreporter.config.stash.get(REPORT, None):
        terminalreporter.write_line(f"{summarize(report.results)}; the report is {report.folder / 'gpu.md'}")
