"""The conditions of a promotion, and the record of the decision."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from scaleflow.errors import RunError
from scaleflow.features.promotion.feature import PromotionOptions
from scaleflow.interfaces.formatting import format_number

if TYPE_CHECKING:
    from scaleflow.evaluation.comparison import ScoreComparison

#: Maximum number of characters of the reasons in a tag.
MAX_TAG = 2000


@dataclass(frozen=True)
class Condition:
    """A condition of a promotion."""

    text: str  # the condition, with its numbers
    holds: bool


@dataclass(frozen=True)
class Decision:
    """The decision whether a candidate becomes the champion, and why.

    Attributes:
        is_promoted: whether every condition holds.
        conditions: conditions in the order of checking.
        comparison: comparison with the champion; None without a champion.
        smoke: measurements of the served candidate.
    """

    conditions: Sequence[Condition]
    comparison: ScoreComparison | None = None
    smoke: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_promoted(self) -> bool:
        return all(condition.holds for condition in self.conditions)

    @property
    def reasons(self) -> list[str]:
        """Conditions that do not hold."""
        return [condition.text for condition in self.conditions if not condition.holds]


def describe_comparison(comparison: ScoreComparison, options: PromotionOptions) -> Condition:
    """Returns the condition that the candidate is better than the champion.

    If few examples differ, all may be better by chance. The interval does not show that, but a sign test does.
    """
    gain, low, high = comparison.gain
    interval = f"{low:+.4g} to {high:+.4g}"
    if gain >= 0:
        how = f"better by {gain:.4g} ({interval}"
    else:
        how = f"worse by {-gain:.4g} (gain {interval}"
    text = (
        f"{comparison.metric} {comparison.value.value:.4g}, the champion {comparison.other:.4g}: {how}, "
        f"{options.confidence:.0%} confidence) on {comparison.examples:,} examples"
    )
    if comparison.on:
        text += f" of {comparison.on}"
    if comparison.over:
        text += f" in {comparison.over}"
    if comparison.left_out:
        who = "a model" if comparison.on else "the champion"
        text += f", without {comparison.left_out:,} that {who} was trained on"
    if not low > options.tolerance:
        return Condition(f"{text}; the lower end is not above {options.tolerance:g}", False)
    least = math.ceil(-math.log2(1 - options.confidence))
    if comparison.differ < least and options.tolerance >= 0:
        return Condition(f"{text}; only {comparison.differ} of them differ, and {least} are needed", False)
    return Condition(text, True)


def to_values(comparison: ScoreComparison) -> dict[str, Any]:
    """Returns a comparison as plain values, for the record of a decision and the result of `scaleflow.promote_model`.

    The candidate's own value has no interval, because the interval of the gain decides.
    """
    gain, low, high = comparison.gain
    return {
        "metric": comparison.metric,
        "is_error": comparison.is_error,
        "examples": comparison.examples,
        "left_out": comparison.left_out,
        "candidate": comparison.value.value,
        "champion": comparison.other,
        "gain": gain,
        "low": low,
        "high": high,
        "better": comparison.better,
        "worse": comparison.worse,
        "differ": comparison.differ,
        "on": comparison.on,
        "over": comparison.over,
    }


def check_floor(key: str, value: float, floor: float, is_error: bool) -> Condition:
    """Returns the condition of `promotion.at_least`: a minimum for a metric, a maximum for an error."""
    holds = value <= floor if is_error else value >= floor
    word = "at most" if is_error else "at least"
    text = f"{key} {value:.4g}, {word} {floor:g}"
    return Condition(text if holds else f"{text} is needed", holds)


def make_record(decision: Decision, candidate: str, champion: str | None) -> dict[str, Any]:
    """Returns the record of a decision, for a tag.

    Args:
        candidate: id of the candidate's logged model.
        champion: version of the champion it was compared with; None without a champion.
    """
    return {
        "is_good": decision.is_promoted,
        "reasons": "; ".join(decision.reasons)[:MAX_TAG],
        "model": candidate,
        "compared_with": champion,
        "comparison": None if decision.comparison is None else to_values(decision.comparison),
        "smoke": dict(decision.smoke),
    }


#: MLflow's file with an example request for a model.
EXAMPLE = "serving_input_example.json"

#: Maximum difference of a served output from the trained model's, relative to its largest value (at least 1).
TOLERANCE = {"float32": 1e-4, "mixed_float16": 1e-2, "mixed_bfloat16": 5e-2}

#: Number of requests for the median time.
REQUESTS = 20

#: Seconds to wait for the server to start, and for one answer.
START_SECONDS = 180.0
ANSWER_SECONDS = 30.0

#: Maximum seconds for installing an environment.
INSTALL_SECONDS = 900.0

#: Runs a command. When standard input is closed, ends it with everything that it started: MLflow also starts a shell.
GUARDED = 'exec 3<&0; (read -r _ <&3; kill -9 0) & "$@" & wait $!'

#: Seconds between two checks of the server.
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class SmokeTest:
    """The result of serving a model.

    Attributes:
        conditions: the model answers, its answers are right, and it keeps the limits.
        values: `ms` per request (median), `mb` of memory, `difference` from the trained model, and the number of
            `packages` in a clean environment.
    """

    conditions: list[Condition]
    values: dict[str, float]


def check_served_model(
    model: Path, options: PromotionOptions, policy: str, folder: Path, begin_phase: Callable[[str], None]
) -> SmokeTest:
    """Serves a logged model, sends the example recorded with it, and compares the answers.

    Args:
        folder: folder for an environment and the server's log.
    """
    python = Path(sys.executable)
    values = dict[str, float]()
    conditions: list[Condition] = []
    try:
        if options.environment == "clean":
            begin_phase("installing the requirements of the model")
            python = install_environment(model / "requirements.txt", folder / "environment")
            values["packages"] = count_packages(python)
        begin_phase("serving the model")
        with serve_folder(model, python, folder / "server.log") as (address, process):
            difference = measure_served_difference(address, model)
            values["difference"] = difference
            values["ms"] = measure_answers(address, model)
            values["mb"] = measure_memory(process)
    except RunError as error:
        return SmokeTest([Condition(f"the served model failed: {error}", False)], values)
    allowed = TOLERANCE.get(policy, TOLERANCE["float32"])
    is_right = difference <= allowed
    text = f"served, it answers as the trained model: the largest difference is {difference:.2g}"
    conditions.append(Condition(text if is_right else f"{text}, and {allowed:.2g} is allowed", is_right))
    for key, unit in (("ms", "ms for an answer"), ("mb", "MB of memory")):
        limit = getattr(options, f"most_{key}")
        holds = limit is None or values[key] <= limit
        more = ""
        if limit is not None:
            more = f", at most {limit:g}"
            if not holds:
                more += " is needed"
        conditions.append(Condition(f"{format_number(values[key])} {unit}{more}", holds))
    return SmokeTest(conditions, values)


def install_environment(requirements: Path, folder: Path) -> Path:
    """Installs requirements in a new environment and returns its Python. Raises RunError if that fails."""
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "-r", str(requirements)],
    ):
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, env=variables)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"its requirements were not installed within {INSTALL_SECONDS:g} s") from error
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
            raise RunError(f"its requirements cannot be installed: {(lines or ['?'])[-1].strip()[:300]}")
    return folder / "bin" / "python"


def count_packages(python: Path) -> float:
    """Returns the number of packages in an environment."""
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    return float(len(json.loads(listed.stdout)))


@contextlib.contextmanager
def serve_folder(model: Path, python: Path, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Serves a model during the block. Yields its address and the process. The server ends with this process.

    Raises RunError if the server does not start.
    """
    port = find_free_port()
    command = [python, "-m", "mlflow", "models", "serve", "-m", model, "--env-manager", "local"]
    hidden = ("PYTHONPATH", "PYTHONHOME", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    variables["PATH"] = f"{python.parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", GUARDED, "serve", *map(str, command), "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=log.parent,  # another folder may have an `mlflow.db`
            env=variables,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not is_answering(address):
            if process.poll() is not None or time.monotonic() > deadline:
                reason = "it does not answer" if process.poll() is None else f"it ended with code {process.returncode}"
                lines = log.read_text(errors="replace").strip().splitlines()
                raise RunError(f"{reason}: {(lines or [''])[-1][:300]}")
            time.sleep(POLL_SECONDS)
        yield address, process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_answering(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ping", timeout=2.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def request_predictions(address: str, payload: Mapping[str, Any]) -> Any:
    """Sends a request and returns the predictions. Raises RunError if there is no valid answer."""
    content = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/invocations", json.dumps(payload).encode(), content)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
            return json.loads(response.read())["predictions"]
    except urllib.error.HTTPError as error:
        with error:
            reason = error.read().decode(errors="replace")
        raise RunError(f"it answers {error.code}: {reason[:300]}") from error
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"it does not answer: {error}") from error


def measure_served_difference(address: str, model: Path) -> float:
    """Returns the largest difference between served and trained outputs, relative to each output's largest value.

    Raises RunError if the answers have another number, shape, or NaNs, or are the same for all examples.
    """
    payload = json.loads((model / EXAMPLE).read_text())
    predictions = request_predictions(address, payload)
    with np.load(model / "data" / "example_outputs.npz") as arrays:
        expected = dict(arrays)
    count = len(next(iter(expected.values())))
    is_answered = isinstance(predictions, list) and len(predictions) == count
    if not is_answered or not all("prediction" in " ".join(row) for row in predictions):
        raise RunError(f"it does not answer with {count} predictions: {str(predictions)[:200]}")
    outputs = request_predictions(address, {**payload, "params": {"output": "logits"}})
    difference = 0.0
    for name, values in expected.items():  # each relative to itself: a large output must not hide a small one's fault
        served = np.asarray(outputs[name] if isinstance(outputs, dict) else outputs, np.float64)
        if served.shape != values.shape:
            raise RunError(f"it returns outputs of shape {served.shape}, expected {values.shape}")
        if not np.array_equal(np.isnan(served), np.isnan(values)):
            raise RunError("its outputs are NaN where those of the trained model are not")
        served = np.nan_to_num(served)
        trained = np.nan_to_num(values)
        largest = float(np.max(np.abs(trained), initial=1.0))
        difference = max(difference, float(np.max(np.abs(served - trained), initial=0.0)) / largest)
        if is_same_for_all(served) and not is_same_for_all(trained):
            raise RunError(f"it gives all {count} recorded examples the same answer, and the trained model does not")
    return difference


def is_same_for_all(values: Any) -> bool:
    """Returns whether all examples have equal values, [n, ...]."""
    return bool(np.all(values == values[:1]))


def measure_answers(address: str, model: Path) -> float:
    """Returns the median time of an answer to the recorded example, in ms."""
    payload = json.loads((model / EXAMPLE).read_text())
    times = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        request_predictions(address, payload)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def measure_memory(process: subprocess.Popen[bytes]) -> float:
    """Returns the memory of a process and its children, in MB."""
    parent = psutil.Process(process.pid)
    total = 0
    for member in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += member.memory_info().rss
    return total / 1e6
