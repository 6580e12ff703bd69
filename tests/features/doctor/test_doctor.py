"""The doctor on this machine, on broken ones, and its judgements on machines that are not here."""

from __future__ import annotations

import json
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from scaleflow.cluster import gpus
from scaleflow.features.doctor import command as doctor
from scaleflow.features.doctor import machine
from scaleflow.features.doctor.command import PRECISIONS, STRATEGIES, MachineFacts, judge_option
from scaleflow.interfaces.features import list_option_files
from tests.conftest import Command
from tests.processes import ROOT

KEYS = (
    *("versions", "system", "cpu", "memory", "tensorflow", "gpus", "tf_config", "variables", "tracking", "auto"),
    *("strategies", "precisions"),
)
TWO_WORKERS = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'


class Doctor(Command):
    """`python -m scaleflow doctor ...` in a folder of the test's."""

    module = "scaleflow doctor"

    def report(self, **environment: str) -> dict[str, Any]:
        """What `--json` prints, and nothing else."""
        ended = self("--json", **environment)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr == ""
        found = json.loads(ended.stdout)
        assert isinstance(found, dict)
        return found


@pytest.fixture
def examined(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# ---------------------------------------------------------------------------------------------
# Whole examinations
# ---------------------------------------------------------------------------------------------


def test_the_report_as_json(examined: Doctor) -> None:
    found = examined.report()
    assert (found.pop("exit_code"), found.pop("error")) == (0, None)
    assert sorted(found) == sorted(KEYS)
    assert found["versions"]["python"] == sys.version.split()[0]
    assert all(found["versions"].values())
    assert 0 < found["cpu"]["usable"] <= found["cpu"]["cores"]
    assert found["memory"]["total_mb"] >= found["memory"]["available_mb"] > 0
    assert found["tensorflow"]["works"]
    assert [device["name"] for device in found["tensorflow"]["devices"]] == ["CPU:0"]
    assert set(found["tensorflow"]["computes"].values()) == {None}
    assert {"built", "cuda", "cudnn", "cuda_found", "cudnn_found", "driver_found"} == set(found["tensorflow"]["cuda"])
    assert found["tf_config"] is None
    assert found["tracking"]["reachable"]
    assert found["tracking"]["uri"] == f"sqlite:///{examined.folder}/mlflow.db"
    assert found["auto"] == {
        "strategy": "one_device",
        "hardware": "cpu",
        "mixed": "mixed_bfloat16",
        "refusal": None,
    }
    for group, key in (("strategy", "strategies"), ("precision", "precisions")):
        options = {path.stem for path in list_option_files(group)} - {"auto"}
        assert set(found[key]) == options
        assert all(set(verdict) == {"works", "reason"} for verdict in found[key].values())
    assert found["strategies"]["one_device"]["works"]
    assert not found["strategies"]["tpu"]["works"]
    assert list(examined.folder.iterdir()) == []  # no store was made


@pytest.mark.slow
def test_the_report_as_text(examined: Doctor) -> None:
    password = {"MLFLOW_TRACKING_URI": f"http://me:sesame@127.0.0.1:{closed_port()}"}
    before = time.monotonic()
    found = examined.report(
        TF_CONFIG=TWO_WORKERS, TPU_NAME="mine", SLURM_JOB_ID="7", GCE_METADATA_HOST="127.0.0.1:1", **password
    )
    assert time.monotonic() - before < 200
    assert found["tf_config"] == {"role": "worker", "index": 1, "worker": 1, "peers": ["a:1", "b:1"]}
    text = doctor.format_report(found)
    for part in (
        *("tensorflow  2.", "cores usable", "MiB", "CPU:0", "TF_CONFIG ", "worker 1 of a:1, b:1", "SLURM_JOB_ID "),
        *("TPU_NAME", "http://****@127.0.0.1", "NOT reachable; ", "multi_worker ", "yes", "float32 "),
        *("built for CUDA", "strategy=auto    tpu", "precision=mixed  mixed_bfloat16"),
    ):
        assert part in text, part
    assert "sesame" not in text + json.dumps(found)
    assert re.search(r"tpu +no +TPU_NAME=mine: is a name", text)


#: A machine on which TensorFlow is broken: what its module does, and what the doctor says.
BROKEN = {
    "raise ImportError('libfoo.so: cannot open shared object file')": "ImportError: libfoo.so: cannot open shared",
    "import os; os.abort()": "was killed by SIGABRT",
    "import os; print('{}'); os._exit(3)": "ended with exit status 3",
}


def broken_tensorflow(folder: Path, code: str) -> str:
    """A PYTHONPATH on which `tensorflow` is this code."""
    (folder / "broken" / "tensorflow").mkdir(parents=True)
    (folder / "broken" / "tensorflow" / "__init__.py").write_text(code)
    return f"{folder / 'broken'}:{ROOT}"


@pytest.mark.parametrize("code", BROKEN)
def test_all_that_is_broken_is_reported(examined: Doctor, code: str) -> None:
    (examined.folder / "mlflow.db").write_text(
        "no database at all, and long enough that it can't be taken for one" * 40
    )
    path = broken_tensorflow(examined.folder, code)
    found = examined.report(PYTHONPATH=path, TF_CONFIG='{"cluster": 3}')
    assert not found["tensorflow"]["works"]
    assert BROKEN[code] in found["tensorflow"]["error"]
    assert found["versions"]["tensorflow"]  # what pip says is said all the same
    for verdict in (*found["strategies"].values(), *found["precisions"].values()):
        assert verdict == {"works": False, "reason": found["tensorflow"]["error"]}
    assert found["tf_config"]["error"].startswith("TF_CONFIG: expected the keys `cluster` and `task`")
    assert found["auto"]["refusal"] == found["tf_config"]["error"]
    assert not found["tracking"]["reachable"]
    assert "file is not a database" in found["tracking"]["detail"]
    shown = doctor.format_report(found)
    assert BROKEN[code] in shown
    assert "refused: TF_CONFIG: expected" in shown


def test_the_command_prints_its_report_whatever_is_broken_and_whoever_reads_it(examined: Doctor) -> None:
    path = broken_tensorflow(examined.folder, next(iter(BROKEN)))
    shown = examined(PYTHONPATH=path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "ImportError: libfoo.so" in shown.stdout
    assert "Traceback" not in shown.stdout
    with examined.start(PYTHONPATH=path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # somebody reads only the beginning
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_tensorflow_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", broken_tensorflow(tmp_path, "import time; time.sleep(600)"))
    monkeypatch.chdir(tmp_path)
    before = time.monotonic()
    found = doctor.examine(seconds=2)
    assert time.monotonic() - before < 120
    assert found["tensorflow"]["error"] == "TensorFlow did not answer within 2 s"
    assert "unknown" in doctor.format_report(found)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("--jsno", "--json, --help"),
        ("strategy=mirrored", "this command takes no KEY=VALUE"),
        ("http://me:sesame@host", "there is one word too many"),
    ],
)
def test_a_wrong_argument_is_refused_in_a_line(examined: Doctor, word: str, reason: str) -> None:
    ended = examined("--json", word)
    answer = json.loads(ended.stdout)
    assert (ended.returncode, answer) == (
        2,
        {"exit_code": 2, "error": ended.stderr.rstrip().removeprefix("scaleflow: ")},
    )
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("scaleflow: ")
    assert reason in ended.stderr
    assert ("did you mean --json?" in ended.stderr) == (word == "--jsno")
    assert "sesame" not in ended.stderr + ended.stdout


def test_help_says_what_each_key_is(examined: Doctor) -> None:
    ended = examined("--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert tuple(re.findall(r"^    ([a-z]\w*) ", ended.stdout, re.M)) == KEYS


# ---------------------------------------------------------------------------------------------
# The store
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def test_a_store_that_is_there_is_opened_to_read(here: Path) -> None:
    with sqlite3.connect(here / "mlflow.db") as store:
        store.execute("create table experiments (name text)")
    store.close()
    before = (here / "mlflow.db").read_bytes()
    assert doctor.check_store()["detail"] == "holds MLflow's tables"
    assert [path.name for path in here.iterdir()] == ["mlflow.db"]
    assert (here / "mlflow.db").read_bytes() == before


def test_a_store_elsewhere_is_not_looked_at(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:sesame@host/db")
    found = doctor.check_store()
    assert found["reachable"] is None
    assert found["uri"] == "postgresql://****@host/db"


def test_a_store_that_a_run_would_refuse_is_told_in_its_words(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    found = doctor.check_store()
    assert found["reachable"] is False
    assert "MLflow 3 does not store runs in plain folders" in found["detail"]


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # the name that http.server looks for
        self.send_response(200 if self.path == "/mlflow/health" else 404)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answer) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{listener.server_port}"
        listener.shutdown()


def test_a_server_that_answers_is_reachable(here: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:sesame@{server}/mlflow/")
    assert doctor.check_store() == {"uri": f"http://****@{server}/mlflow/", "reachable": True, "detail": "answers"}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{server}")
    assert doctor.check_store()["detail"] == "answers GET /health with 404"


def test_a_server_that_takes_connections_and_says_nothing_is_not(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{listener.getsockname()[1]}")
        before = time.monotonic()
        found = doctor.check_store()
    assert time.monotonic() - before < 60
    assert found["reachable"] is False
    assert "accepts connections but does not answer: timed out" in found["detail"]


# ---------------------------------------------------------------------------------------------
# Machines that are not here
# ---------------------------------------------------------------------------------------------

LAPTOP = MachineFacts(cores=8, has_bfloat16=True)
ONE_V100 = MachineFacts(gpus=1, capability=7.0)
EIGHT_H100 = MachineFacts(gpus=8, capability=9.0, workers=2)
OLD_GPU = MachineFacts(gpus=1, capability=6.1)
TPU_HOST = MachineFacts(tpu="TPU_NAME=local")
NO_TENSORFLOW = MachineFacts(failure="TensorFlow does not work: no")
WRONG_TF_CONFIG = MachineFacts(tf_config="TF_CONFIG: is not valid JSON")

STRATEGY_VERDICTS = [
    ("one_device", LAPTOP, True, "on CPU:0"),
    ("one_device", EIGHT_H100, True, "on GPU:0, one of 8"),
    ("mirrored", LAPTOP, True, "hardware.logical_devices=2"),
    ("mirrored", ONE_V100, True, "one replica on one GPU"),
    ("mirrored", EIGHT_H100, True, "one replica on each of 8 GPUs"),
    ("multi_worker", LAPTOP, True, "8 cores"),
    ("multi_worker", EIGHT_H100, True, "TF_CONFIG names 2 workers"),
    ("multi_worker", WRONG_TF_CONFIG, None, "cluster=tf_config is refused: TF_CONFIG: is not valid JSON"),
    ("parameter_server", LAPTOP, True, "8 cores"),
    ("parameter_server", ONE_V100, True, "1 GPU; strategy=mirrored uses them better"),
    ("parameter_server", WRONG_TF_CONFIG, None, "TF_CONFIG: is not valid JSON"),
    ("tpu", LAPTOP, False, "there is no TPU"),
    ("tpu", TPU_HOST, None, "TPU_NAME=local is set; not tried"),
    ("tpu", MachineFacts(tpu="TPU_NAME=x", no_tpu="TPU_NAME=x: nothing answers"), False, "nothing answers"),
    ("pipeline", LAPTOP, True, "hardware.logical_devices=2"),
    ("pipeline", EIGHT_H100, True, "stages on 8 GPUs"),
    ("pipeline", ONE_V100, None, "one GPU for all stages"),
    ("mirrored", NO_TENSORFLOW, False, "TensorFlow does not work: no"),
    ("one_of_tomorrow", LAPTOP, None, "does not know"),
]

PRECISION_VERDICTS = [
    ("float32", LAPTOP, True, "works on every device"),
    ("mixed", LAPTOP, True, "mixed_bfloat16: the CPU computes in bfloat16"),
    ("mixed", MachineFacts(), True, "mixed_bfloat16: correct, but slow"),
    ("mixed", EIGHT_H100, True, "mixed_float16: runs in tensor cores"),
    ("mixed_float16", LAPTOP, True, "correct, but slow on a CPU"),
    ("mixed_float16", TPU_HOST, True, "refused on the TPU"),
    ("mixed_float16", OLD_GPU, True, "tensor cores need compute capability 7.0 for float16, and this GPU has 6.1"),
    ("mixed_bfloat16", ONE_V100, True, "tensor cores need compute capability 8.0 for bfloat16"),
    ("mixed_bfloat16", EIGHT_H100, True, "compute capability 9.0"),
    (
        "mixed_bfloat16",
        MachineFacts(fails={"bfloat16": "no kernel"}),
        False,
        "in bfloat16 on the CPU failed: no kernel",
    ),
    ("float32", MachineFacts(gpus=1, fails={"float32": "no driver"}), False, "on the GPU failed: no driver"),
    ("mixed", NO_TENSORFLOW, False, "TensorFlow does not work: no"),
]


@pytest.mark.parametrize(("option", "found", "works", "reason"), STRATEGY_VERDICTS)
def test_a_strategy_is_judged(option: str, found: MachineFacts, works: bool | None, reason: str) -> None:
    verdict = judge_option(option, found, STRATEGIES)
    assert verdict.works is works
    assert reason in verdict.reason


@pytest.mark.parametrize(("option", "found", "works", "reason"), PRECISION_VERDICTS)
def test_a_precision_is_judged(option: str, found: MachineFacts, works: bool | None, reason: str) -> None:
    verdict = judge_option(option, found, PRECISIONS)
    assert verdict.works is works
    assert reason in verdict.reason


def test_there_is_a_judgement_for_every_option() -> None:
    assert set(doctor.list_options_on_disk("strategy")) <= set(STRATEGIES)
    assert set(doctor.list_options_on_disk("precision")) == set(PRECISIONS)


def test_gpus_are_told_with_the_driver_s_memory() -> None:
    tensorflow = {
        "works": True,
        "devices": [{"name": "GPU:0", "kind": "GPU", "model": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0"}],
        "cuda": {
            "built": True,
            "cuda": "12.5.1",
            "cudnn": "9",
            "cuda_found": "/x/libcudart.so.12",
            "cudnn_found": None,
            "driver_found": True,
        },
        "computes": {"float32": None, "float16": "InternalError: no"},
    }
    gpus = [{"index": 0, "name": "NVIDIA H100 80GB HBM3", "memory_mb": 81559, "free_mb": 81000, "driver": "555.1"}]
    rows = dict(doctor.tensorflow_rows({"tensorflow": tensorflow, "gpus": gpus}))
    assert rows["GPU:0"] == "NVIDIA H100 80GB HBM3, 81559 MiB, compute capability 9.0"
    assert rows["cuda"] == "built for CUDA 12.5.1 (found), cuDNN 9 (not found), the driver (found)"
    assert rows["float16"] == "fails: InternalError: no"


def test_the_driver_s_list_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(code: int, out: str) -> Callable[..., subprocess.CompletedProcess[str]]:
        return lambda words, **options: subprocess.CompletedProcess(words, code, out, "")

    monkeypatch.setattr(gpus.shutil, "which", lambda name: f"/usr/bin/{name}")
    listed = "0, NVIDIA A100, 40960, 40000, 555.42\n1, NVIDIA A100, 40960, [N/A], 555.42\n"
    monkeypatch.setattr(gpus.subprocess, "run", ended(0, listed))
    found = machine.list_gpus()
    assert found[0] == {"index": 0, "name": "NVIDIA A100", "memory_mb": 40960, "free_mb": 40000, "driver": "555.42"}
    assert found[1]["free_mb"] == "[N/A]"
    monkeypatch.setattr(gpus.subprocess, "run", ended(9, "NVIDIA-SMI has failed because ...\nmore"))
    with pytest.raises(OSError, match="nvidia-smi: NVIDIA-SMI has failed"):
        machine.list_gpus()


def tree(root: Path, **contents: str) -> Path:
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_new_control_groups_limit_cores_and_memory(tmp_path: Path) -> None:
    for name, text in {
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pod/box/memory.max": f"{2 << 30}\n",
        "sys/fs/cgroup/pod/memory.max": "max\n",
        "proc/cpuinfo": "model name\t: Some CPU\nflags\t\t: fpu avx2 amx_bf16\n",
    }.items():
        tree(tmp_path, **{name.replace("/", "__"): text})
    assert machine.cpu_limit(tmp_path) == 1.5
    assert machine.describe_memory(tmp_path)["limit_mb"] == 2048
    found = machine.describe_cpu(tmp_path)
    assert (found["model"], found["bfloat16"], found["limit"]) == ("Some CPU", True, 1.5)
    assert found["usable"] == min(1.5, found["allowed"])


def test_old_control_groups_limit_cores_and_memory(tmp_path: Path) -> None:
    for name, text in {
        "proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/\n0::/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{1 << 30}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }.items():
        tree(tmp_path, **{name.replace("/", "__"): text})
    assert machine.cpu_limit(tmp_path) is None
    assert machine.memory_limit(tmp_path) == 1 << 30
    tree(tmp_path, sys__fs__cgroup__cpu__x="")
    (tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("50000\n")
    assert machine.cpu_limit(tmp_path) == 0.5


def test_a_machine_that_tells_nothing_is_no_trouble(tmp_path: Path) -> None:
    assert machine.describe_memory(tmp_path)["limit_mb"] is None
    assert machine.describe_cpu(tmp_path)["limit"] is None


def test_variables_are_told_by_who_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "TPU_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOSTNAME", "box")
    assert machine.read_environment()["kubernetes"] == {}
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("TPU_NAME", "grpc://me:sesame@h:1")
    found = machine.read_environment()
    assert found["kubernetes"]["HOSTNAME"] == "box"
    assert found["slurm"]["SLURM_JOB_ID"] == "7"
    assert found["tpu"]["TPU_NAME"] == "grpc://****@h:1"
