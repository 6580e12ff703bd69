"""Runs a Keras script as `python SCRIPT` does, and reports all that its `fit` and `evaluate` returned.

A test compares the report with scaleflow's run of the same script. Floats are reported by `repr`, so that equal
reports mean equal bits.

`python tests/features/script/plain_run.py check [NAME ...]` runs scripts twice and says which are repeatable.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"

#: Packages that may be absent, with the scripts that need them.
NEEDED_PACKAGES = {
    "keras_tuner": ["tuner_search"],
    "keras_hub": ["hub_classifier"],
    "tensorflow_text": ["hub_classifier"],
}

#: Scripts whose two runs may differ, with the reason.
NOT_REPEATABLE: dict[str, str] = {}

MAX_SECONDS = 300.0


def list_scripts() -> list[Path]:
    """Returns all scripts and notebooks."""
    return sorted(path for path in SCRIPTS.iterdir() if path.suffix in (".py", ".ipynb"))


def find_missing_packages(script: Path) -> list[str]:
    """Returns the packages that the script needs and that are not installed."""
    needed = [package for package, scripts in NEEDED_PACKAGES.items() if script.stem in scripts]
    return [package for package in needed if importlib.util.find_spec(package) is None]


def run_plain(
    script: Path,
    folder: Path,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs a script in a process of its own, with `folder` as the current folder.

    Args:
        environment: variables that are added to this process's own.

    Returns:
        The report (see `Recorder`), with `output`: what the script printed.

    Raises:
        RuntimeError: if the script failed. The message has the end of its output.
    """
    return wait_for_report(start_plain(script, folder, arguments, environment), folder)


def run_plain_workers(script: Path, folder: Path, count: int) -> list[dict[str, Any]]:
    """Runs a script in several processes that find each other by TF_CONFIG, and returns the report of each."""
    addresses = find_addresses(count)
    processes = []
    folders = []
    for index in range(count):
        own_folder = folder / f"worker-{index}"
        own_folder.mkdir(parents=True)
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        processes.append(start_plain(script, own_folder, (), {"TF_CONFIG": json.dumps(config)}))
        folders.append(own_folder)
    try:
        return [wait_for_report(process, own) for process, own in zip(processes, folders, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def find_addresses(count: int) -> list[str]:
    """Returns addresses of this machine whose ports are free."""
    listeners = [socket.create_server(("localhost", 0)) for _ in range(count)]
    addresses = [f"localhost:{listener.getsockname()[1]}" for listener in listeners]
    for listener in listeners:
        listener.close()
    return addresses


def start_plain(
    script: Path,
    folder: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None,
) -> subprocess.Popen[str]:
    """Starts the process that `wait_for_report` waits for."""
    if script.suffix == ".ipynb":
        script = write_code_of_notebook(script, folder)
    variables = os.environ | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder.resolve()}/plain.db",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    variables |= environment or {}
    with (folder / "plain.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "record", "plain.json", str(script.resolve()), *arguments],
            cwd=folder,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def write_code_of_notebook(notebook: Path, folder: Path) -> Path:
    """Writes the code cells of a notebook to a script in the folder."""
    cells = json.loads(notebook.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = folder / f"{notebook.stem}.py"
    script.write_text("\n\n".join(code) + "\n")
    return script


def wait_for_report(process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    """Waits for a process of `start_plain` and reads its report."""
    try:
        code = process.wait(timeout=MAX_SECONDS)
    finally:
        process.kill()
        process.wait()
    output = (folder / "plain.log").read_text()
    if code != 0:
        raise RuntimeError(f"the script ended with exit code {code}:\n{output[-4000:]}")
    report: dict[str, Any] = json.loads((folder / "plain.json").read_text())
    report["output"] = output
    return report


class Recorder:
    """Keeps what `fit` and `evaluate` return, in the order of the calls.

    `report` is what becomes JSON:

    - `fits`: for each call of `fit`, the history (metric to the values of the epochs), the epochs, the class of the
      model, and a digest of its weights after the fit;
    - `evaluations`: the answer of each call of `evaluate` outside of `fit`;
    - `variables`: the script's own variables whose names hold `history`, and that are a History or a dict;
    - `seconds` and `cpu_seconds`: the time from the import of Keras to the end of the script.
    """

    def __init__(self) -> None:
        self.report: dict[str, Any] = {"fits": [], "evaluations": [], "variables": {}}
        self.start_clocks()
        self.running_fits = 0

    def start_clocks(self) -> None:
        self.start = time.perf_counter()
        self.cpu_start = time.process_time()

    def stop_clocks(self) -> None:
        self.report["seconds"] = round(time.perf_counter() - self.start, 2)
        self.report["cpu_seconds"] = round(time.process_time() - self.cpu_start, 2)

    def wrap_model(self, model_class: Any) -> None:
        """Replaces `fit` and `evaluate` of the class by recording ones, and starts the clocks."""
        self.start_clocks()
        model_class.fit = self.wrap_fit(model_class.fit)
        model_class.evaluate = self.wrap_evaluate(model_class.evaluate)

    def wrap_fit(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        def recording_fit(model: Any, *arguments: Any, **keywords: Any) -> Any:
            self.running_fits += 1
            try:
                history = fit(model, *arguments, **keywords)
            finally:
                self.running_fits -= 1
            self.report["fits"].append(
                {
                    "model": type(model).__name__,
                    "history": to_texts(history.history),
                    "epochs": list(history.epoch),
                    "weights": digest_weights(model),
                }
            )
            return history

        return recording_fit

    def wrap_evaluate(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def recording_evaluate(model: Any, *arguments: Any, **keywords: Any) -> Any:
            answer = evaluate(model, *arguments, **keywords)
            if self.running_fits == 0:
                self.report["evaluations"].append(to_texts(answer))
            return answer

        return recording_evaluate

    def add_variables(self, variables: Mapping[str, Any]) -> None:
        """Adds the histories among the script's variables."""
        for name, value in variables.items():
            values = getattr(value, "history", value)
            if "history" in name and isinstance(values, dict):
                self.report["variables"][name] = to_texts(values)


def to_texts(value: Any) -> Any:
    """Returns numbers as text that keeps every bit, in the same lists and dicts."""
    if isinstance(value, dict):
        return {str(key): to_texts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_texts(item) for item in value]
    if hasattr(value, "tolist"):
        return to_texts(value.tolist())
    if isinstance(value, (int, float)):
        return repr(float(value))
    return repr(value)


def digest_weights(model: Any) -> str:
    """Returns a digest of the bits of all weights."""
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(weight.tobytes())
    return digest.hexdigest()


class ImportWatcher(importlib.abc.MetaPathFinder):
    """Calls the recorder as soon as the script has imported Keras's Model.

    Keras is not imported before the script, because a script may set variables of the environment that count only
    before that.
    """

    MODULE = "keras.src.models.model"

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            self.recorder.wrap_model(module.Model)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def record_script(report: Path, script: str, arguments: Sequence[str]) -> None:
    """Runs the script in this process as `__main__`, and writes the report."""
    # The script may change the current folder.
    report = report.resolve()
    recorder = Recorder()
    sys.meta_path.insert(0, ImportWatcher(recorder))
    sys.path[0] = str(Path(script).parent)
    sys.argv = [script, *arguments]
    try:
        variables = runpy.run_path(script, run_name="__main__")
        recorder.add_variables(variables)
    finally:
        recorder.stop_clocks()
        report.write_text(json.dumps(recorder.report, indent=1))


def find_differences(first: Any, second: Any, place: str = "") -> list[str]:
    """Returns the places at which two reports differ in numbers. The script's output and time do not count."""
    if isinstance(first, dict) and isinstance(second, dict) and set(first) == set(second):
        names = [name for name in first if name not in ("output", "seconds", "cpu_seconds")]
        return [text for name in names for text in find_differences(first[name], second[name], f"{place}/{name}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        differences = []
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            differences += find_differences(one, other, f"{place}/{index}")
        return differences
    if first != second:
        return [f"{place}: {first} and {second}"]
    return []


def check_scripts(names: Sequence[str]) -> None:
    """Runs scripts twice, and prints the seconds and differences of each."""
    for script in list_scripts():
        if names and script.stem not in names:
            continue
        missing = find_missing_packages(script)
        if missing:
            print(f"{script.stem:22} needs {', '.join(missing)}", flush=True)
            continue
        try:
            print(f"{script.stem:22} {check_script(script)}", flush=True)
        except RuntimeError as error:
            print(f"{script.stem:22} {error}", flush=True)


def check_script(script: Path) -> str:
    """Runs a script twice, and returns what came out in a line."""
    reports = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            reports.append(run_plain(script, Path(folder)))
    differences = find_differences(reports[0], reports[1])
    verdict = "repeatable"
    if differences:
        verdict = f"DIFFERS at {differences[0]}"
    seconds = min(report["seconds"] for report in reports)
    cpu_seconds = min(report["cpu_seconds"] for report in reports)
    fits = len(reports[0]["fits"])
    evaluations = len(reports[0]["evaluations"])
    variables = ", ".join(reports[0]["variables"])
    counts = f"{fits} fits, {evaluations} evaluations, variables {variables}"
    return f"{seconds:5.1f} s {cpu_seconds:5.1f} s CPU  {verdict}; {counts}"


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    if command == "record":
        record_script(Path(words[0]), words[1], words[2:])
    else:
        check_scripts(words)
