"""`scaleflow doctor`: shows what this machine has, and which strategies and precisions work on it.

The keys of the object that --json prints instead, besides exit_code and error (sizes in MiB):

    versions    python, scaleflow, tensorflow, keras, mlflow, hydra-core, numpy; null: not installed
    system      the operating system
    cpu         model, cores, allowed (by affinity), limit (by control groups), usable, bfloat16
    memory      total_mb, available_mb, limit_mb (by control groups)
    tensorflow  works, error, devices [name, kind, model, compute_capability], cuda [built; cuda, cudnn: the versions
                it was built for; cuda_found, cudnn_found, driver_found], computes {dtype: null, or why it failed}
    gpus        the GPUs that NVIDIA's driver reports: [index, name, memory_mb, free_mb, driver]
    tf_config   role, index, worker, peers; null: TF_CONFIG is not set
    variables   the environment variables that are set, by group: slurm, kubernetes, tpu, tensorflow
    tracking    uri, reachable (null: not checked), detail
    auto        strategy, hardware, mixed: the choices of a command without arguments; refusal: why it is refused
    strategies  {option: works (null: unknown), reason}
    precisions  {option: works (null: unknown), reason}

A value that cannot be determined is replaced by {"error": reason}. Exit code: 0; 2 for a wrong argument.
"""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scaleflow.cluster.tpu import explain_no_tpu, explain_unreachable, find_tpu
from scaleflow.commands.frame import CommandParser, make_main
from scaleflow.config.compose import compose_config
from scaleflow.config.policies import LOOK
from scaleflow.errors import ConfigError
from scaleflow.features.doctor import machine
from scaleflow.interfaces import Tracking
from scaleflow.interfaces.features import list_option_files
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.command_exit import JSON, Outcome
from scaleflow.launcher.prepare import make_plan
from scaleflow.launcher.processes.server_start import make_process_environment
from scaleflow.launcher.processes.worker_process import describe_exit
from scaleflow.tracking.uri import PROBE_SECONDS, resolve_store

#: Minimum compute capability for a dtype in NVIDIA's tensor cores: Volta for float16, Ampere for bfloat16
#: (docs.nvidia.com/deeplearning/performance/mixed-precision-training).
TENSOR_CORES = {"float16": 7.0, "bfloat16": 8.0}


@dataclass(frozen=True)
class MachineFacts:
    """The facts that verdicts are based on."""

    failure: str | None = None  # why TensorFlow does not work here; None: it works
    gpus: int = 0  # number of GPUs that TensorFlow finds
    capability: float | None = None  # lowest compute capability of these GPUs; None: unknown
    cores: float = 1.0  # CPU cores that this process may use
    has_bfloat16: bool = False  # whether the CPU computes bfloat16 natively
    workers: int = 0  # number of processes in TF_CONFIG; 0: not set
    tf_config: str | None = None  # fault of TF_CONFIG; None: no fault
    tpu: str | None = None  # setting that names a TPU, such as `TPU_NAME=local`; None: no TPU
    no_tpu: str | None = None  # why there is no TPU, or why it cannot be reached
    fails: Mapping[str, str] = field(default_factory=dict)  # dtype -> why a small multiplication failed

    @property
    def device(self) -> str:
        return "GPU" if self.gpus else "CPU"


@dataclass(frozen=True)
class Verdict:
    """Whether an option works here (None: unknown), and why."""

    works: bool | None
    reason: str


Judge = Callable[[MachineFacts], Verdict]


def judge_option(name: str, machine: MachineFacts, judges: Mapping[str, Judge]) -> Verdict:
    """Returns the verdict on an option. `judges` is `STRATEGIES` or `PRECISIONS`."""
    if machine.failure is not None:
        return Verdict(False, machine.failure)
    if name not in judges:
        return Verdict(None, "the doctor does not know this option")
    return judges[name](machine)


def judge_one_device(machine: MachineFacts) -> Verdict:
    return Verdict(True, f"on {machine.device}:0" + (f", one of {machine.gpus}" if machine.gpus > 1 else ""))


def judge_mirrored(machine: MachineFacts) -> Verdict:
    if machine.gpus > 1:
        return Verdict(True, f"one replica on each of {machine.gpus} GPUs")
    if machine.gpus == 1:
        return Verdict(
            True, "one replica on one GPU; hardware.logical_devices with hardware.memory_limit_mb divides it"
        )
    return Verdict(True, "one replica on the CPU; hardware.logical_devices=2 makes two, for a trial, not for speed")


def judge_multi_worker(machine: MachineFacts) -> Verdict:
    if machine.workers > 1:
        return Verdict(True, f"TF_CONFIG names {machine.workers} workers; not checked whether they answer")
    return judge_parameter_server(machine)


def judge_parameter_server(machine: MachineFacts) -> Verdict:
    if machine.tf_config is not None:
        return Verdict(
            None, f"works on this machine with cluster=local; cluster=tf_config is refused: {machine.tf_config}"
        )
    shared = f"{machine.cores:g} core{'s' if machine.cores != 1 else ''}"
    if machine.gpus:
        shared = f"{machine.gpus} GPU{'s' if machine.gpus > 1 else ''}; strategy=mirrored uses them better"
    return Verdict(True, f"processes on this machine share {shared}; for several machines set TF_CONFIG")


def judge_tpu(machine: MachineFacts) -> Verdict:
    if machine.tpu is None or machine.no_tpu is not None:
        return Verdict(False, machine.no_tpu or "there is no TPU")
    return Verdict(None, f"{machine.tpu} is set; not tried, because a trial would take the TPU from its current user")


def judge_pipeline(machine: MachineFacts) -> Verdict:
    if machine.gpus > 1:
        return Verdict(True, f"stages on {machine.gpus} GPUs")
    if machine.gpus == 1:
        return Verdict(
            None, "one GPU for all stages; hardware.logical_devices with hardware.memory_limit_mb divides it"
        )
    return Verdict(True, "stages on the CPU with hardware.logical_devices=2, for a trial")


STRATEGIES: Mapping[str, Judge] = {
    "one_device": judge_one_device,
    "mirrored": judge_mirrored,
    "multi_worker": judge_multi_worker,
    "parameter_server": judge_parameter_server,
    "tpu": judge_tpu,
    "pipeline": judge_pipeline,
}


def judge_mixed_float16(machine: MachineFacts) -> Verdict:
    on_tpu = "; refused on the TPU" if machine.tpu and not machine.no_tpu else ""
    on_cpu = f"correct, but slow on a CPU; precision=mixed selects bfloat16{on_tpu}"
    return judge_half_precision("float16", machine, on_cpu)


def judge_mixed_bfloat16(machine: MachineFacts) -> Verdict:
    on_cpu = "correct, but slow: the CPU converts bfloat16 to float32"
    if machine.has_bfloat16:
        on_cpu = "the CPU computes in bfloat16"
    return judge_half_precision("bfloat16", machine, on_cpu)


def judge_mixed(machine: MachineFacts) -> Verdict:
    name, judge = ("mixed_float16", judge_mixed_float16) if machine.gpus else ("mixed_bfloat16", judge_mixed_bfloat16)
    verdict = judge(machine)
    return Verdict(verdict.works, f"{name}: {verdict.reason}")


def judge_half_precision(dtype: str, machine: MachineFacts, on_cpu: str) -> Verdict:
    """Returns the verdict on a 16-bit dtype. `on_cpu` is the reason on a machine without a GPU."""
    failed = dtype_failure(dtype, machine)
    if failed:
        return failed
    if not machine.gpus:
        return Verdict(True, on_cpu)
    if machine.capability is None:
        return Verdict(True, "TensorFlow does not report the GPU's compute capability")
    if machine.capability >= TENSOR_CORES[dtype]:
        return Verdict(True, f"runs in tensor cores (compute capability {machine.capability})")
    return Verdict(
        True,
        f"correct, but no faster: tensor cores need compute capability {TENSOR_CORES[dtype]} for {dtype}, and this "
        f"GPU has {machine.capability}",
    )


def dtype_failure(dtype: str, machine: MachineFacts) -> Verdict | None:
    if dtype not in machine.fails:
        return None
    return Verdict(False, f"a small multiplication in {dtype} on the {machine.device} failed: {machine.fails[dtype]}")


PRECISIONS: Mapping[str, Judge] = {
    "float32": lambda machine: dtype_failure("float32", machine) or Verdict(True, "works on every device"),
    "mixed": judge_mixed,
    "mixed_float16": judge_mixed_float16,
    "mixed_bfloat16": judge_mixed_bfloat16,
}


#: Maximum seconds for the probe. Importing TensorFlow takes seconds, many on a busy machine.
TENSORFLOW_SECONDS = 90.0

#: Keys of the probe's answer.
ANSWERS = ("versions", "devices", "cuda", "kind", "strategy", "mixed", "computes")

Report = dict[str, Any]


@make_main
def main(words: list[str]) -> Outcome:
    CommandParser("doctor", __doc__).parse_args(words)
    report = examine()
    if JSON not in sys.argv:
        print(format_report(report))
    return Outcome(read=lambda: report)


def examine(seconds: float = TENSORFLOW_SECONDS) -> Report:
    """Returns the report. Faults of the machine are part of it and raise nothing. TensorFlow may take `seconds`."""
    with start_tensorflow_probe() as process:  # runs in parallel with the other checks
        report: Report = {
            "versions": try_check(machine.read_versions),
            "system": try_check(machine.describe_system),
            "cpu": try_check(machine.describe_cpu),
            "memory": try_check(machine.describe_memory),
            "tensorflow": {},
            "gpus": try_check(machine.list_gpus),
            "tf_config": try_check(machine.describe_tf_config),
            "variables": try_check(machine.read_environment),
            "tracking": try_check(check_store),
        }
        answer = read_answer(process, seconds)
    report["tensorflow"] = answer
    report["versions"] = {**report["versions"], **answer.pop("versions", {})}
    facts = gather_facts(report)
    report["auto"] = try_check(lambda: resolve_auto(answer))
    report["strategies"] = try_check(lambda: judge_options("strategy", STRATEGIES, facts))
    report["precisions"] = try_check(lambda: judge_options("precision", PRECISIONS, facts))
    for key in ("kind", "strategy", "mixed"):  # reported under `auto`
        answer.pop(key, None)
    return report


def try_check(check: Callable[[], Any]) -> Any:
    """Returns the result of `check`, or `{"error": reason}` if it raises, so that later checks still run."""
    try:
        return check()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {
            "error": mask_secrets(lines[0] if isinstance(error, ConfigError) else f"{type(error).__name__}: {lines[0]}")
        }


@contextlib.contextmanager
def start_tensorflow_probe() -> Iterator[subprocess.Popen[str]]:
    """Starts the process that probes TensorFlow, and kills it at the end.

    Its log and its answer have separate pipes.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "scaleflow.features.doctor.tensorflow_probe"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=make_process_environment(),
        text=True,
        errors="replace",
        process_group=0,  # keeps Ctrl-C from the child
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_answer(process: subprocess.Popen[str], seconds: float) -> Report:
    """Returns the probe's answer, or an answer with the reason for its failure."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return unfit_answer(f"TensorFlow did not answer within {seconds:g} s")
    try:
        answer = json.loads(out.splitlines()[-1])
        return {"works": True, "error": None, **{key: answer[key] for key in ANSWERS}}
    except (LookupError, TypeError, ValueError):
        last = err.strip().splitlines()[-1:] or [""]
        reason = last[0] if process.returncode == 1 else f"its process {describe_exit(process.returncode)}; {last[0]}"
        return unfit_answer(f"TensorFlow does not work: {reason}")


def unfit_answer(reason: str) -> Report:
    return {"works": False, "error": mask_secrets(reason), "devices": [], "cuda": None, "computes": {}}


def list_options_on_disk(group: str) -> list[str]:
    """Returns the options of a config group that have a file, except `auto`."""
    return [path.stem for path in list_option_files(group) if path.stem != "auto"]


def judge_options(group: str, judges: Mapping[str, Judge], facts: MachineFacts) -> dict[str, Any]:
    return {option: vars(judge_option(option, facts, judges)) for option in list_options_on_disk(group)}


def gather_facts(report: Report) -> MachineFacts:
    """Returns the facts of the report that the verdicts need."""
    tensorflow = report["tensorflow"]
    config = report["tf_config"] or {}
    gpus = [device for device in tensorflow["devices"] if device["kind"] == "GPU"]
    capabilities = [float(gpu["compute_capability"]) for gpu in gpus if gpu["compute_capability"]]
    tpu, no_tpu = locate_tpu()
    return MachineFacts(
        failure=tensorflow["error"],
        gpus=len(gpus),
        capability=min(capabilities, default=None),
        cores=report["cpu"].get("usable", 1.0),
        has_bfloat16=report["cpu"].get("bfloat16", False),
        workers=len(config.get("peers", ())),
        tf_config=config.get("error"),
        tpu=tpu,
        no_tpu=no_tpu,
        fails={dtype: why for dtype, why in tensorflow["computes"].items() if why is not None},
    )


def locate_tpu() -> tuple[str | None, str | None]:
    """Returns (the TPU's address and its source, why the TPU cannot be used). Either may be None."""
    try:
        address = find_tpu(None)
    except ConfigError as refusal:
        return None, str(refusal)
    if address is None:
        return None, explain_no_tpu()
    reason = explain_unreachable(address)
    return str(address), None if reason is None else f"{address}: {reason}"


def resolve_auto(answer: Report) -> dict[str, Any]:
    """Resolves `strategy=auto hardware=auto precision=mixed` on this machine, or returns why they are refused."""
    try:
        plan = make_plan(compose_config(()), LOOK)  # `check_store` contacts the store
    except ConfigError as refusal:
        return {"strategy": None, "hardware": None, "mixed": None, "refusal": mask_secrets(str(refusal))}
    kind = "TPU" if plan.hardware.name == "tpu" else answer.get("kind")
    strategy = plan.strategy.name if not plan.strategy.is_auto else answer.get("strategy")
    mixed = answer.get("mixed", {}).get(kind)
    return {"strategy": strategy, "hardware": kind.lower() if kind else None, "mixed": mixed, "refusal": None}


def check_store() -> dict[str, Any]:
    """Checks the default tracking store without creating it."""
    asked = os.environ.get("MLFLOW_TRACKING_URI", "").strip() or "sqlite:///mlflow.db"
    try:
        uri = resolve_store(Tracking()).uri or asked
    except ConfigError as refusal:
        return {"uri": mask_secrets(asked), "reachable": False, "detail": str(refusal)}
    if uri.startswith("sqlite:///"):
        reachable, detail = check_store_file(Path(uri.removeprefix("sqlite:///")))
    elif uri.startswith(("http://", "https://")):
        reachable, detail = check_store_server(uri)
    else:
        reachable = None
        detail = "not checked: neither a file nor a server over http"
    return {"uri": mask_secrets(uri), "reachable": reachable, "detail": mask_secrets(detail)}


def check_store_file(path: Path) -> tuple[bool, str]:
    if not path.exists():
        return True, "does not exist yet; the first run creates it"
    try:
        store = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=PROBE_SECONDS)
        with contextlib.closing(store):
            (tables,) = store.execute("select count(*) from sqlite_master where name = 'experiments'").fetchone()
    except sqlite3.Error as error:
        return False, f"cannot be read as an SQLite database: {error}"
    return True, "holds MLflow's tables" if tables else "is empty; the first run creates MLflow's tables"


def check_store_server(uri: str) -> tuple[bool, str]:
    """Returns whether a server that accepts connections also answers, and details."""
    parts = urlsplit(uri)
    connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = connect(parts.hostname or "", parts.port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health")
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        return False, f"accepts connections but does not answer: {str(error) or type(error).__name__}"
    finally:
        connection.close()
    return True, "answers" if status < 400 else f"answers GET /health with {status}"


def format_report(report: Report) -> str:
    blocks = [
        format_section("versions", report["versions"].items()),
        format_section(
            "machine",
            [
                ("system", failure_of(report["system"]) or report["system"]),
                ("cpu", failure_of(report["cpu"]) or cpu_line(report["cpu"])),
                ("memory", failure_of(report["memory"]) or memory_line(report["memory"])),
            ],
        ),
        format_section("tensorflow", tensorflow_rows(report)),
        format_section("environment", environment_rows(report)),
        format_section("strategies", verdict_rows(report["strategies"])),
        format_section("precisions", verdict_rows(report["precisions"])),
        format_section("auto", auto_rows(report["auto"])),
    ]
    return "\n\n".join(blocks)


def format_section(title: str, rows: Any) -> str:
    shown = [(word, "not installed" if value is None else str(value)) for word, value in rows]
    width = max((len(word) for word, _ in shown), default=0)
    return "\n".join([title, *(f"  {word:<{width}}  {value}" for word, value in shown)])


ReportRows = list[tuple[str, str]]


def failure_of(part: Any) -> str | None:
    """Returns why a part of the report is unknown, or None if it is known."""
    if isinstance(part, Mapping) and part.get("error"):
        return f"unknown: {part['error']}"
    return None


def cpu_line(cpu: Mapping[str, Any]) -> str:
    limits = [f"{cpu['cores']} in the machine"]
    limits += [f"{cpu['allowed']} by affinity"] if cpu["allowed"] != cpu["cores"] else []
    limits += [f"{cpu['limit']:g} by control groups"] if cpu["limit"] is not None else []
    return f"{cpu['usable']:g} cores usable ({', '.join(limits)}), {cpu['model']}"


def memory_line(memory: Mapping[str, Any]) -> str:
    limit = "" if memory["limit_mb"] is None else f", limited to {memory['limit_mb']} MiB"
    return f"{memory['total_mb']} MiB, {memory['available_mb']} free{limit}"


def tensorflow_rows(report: Report) -> ReportRows:
    tensorflow = report["tensorflow"]
    if not tensorflow["works"]:
        return [("broken", tensorflow["error"])]
    rows = []
    for device in tensorflow["devices"]:
        rows.append((device["name"], device_line(device, report["gpus"])))
    rows.append(("cuda", cuda_line(tensorflow["cuda"])))
    failure = failure_of(report["gpus"])
    if failure:
        rows.append(("driver", failure))
    for dtype, reason in tensorflow["computes"].items():
        if reason is not None:
            rows.append((dtype, f"fails: {reason}"))
    return rows


def device_line(device: Mapping[str, Any], gpus: Any) -> str:
    """Formats a TensorFlow device. A GPU's memory is taken from nvidia-smi's first GPU of the same model."""
    if device["kind"] != "GPU":
        return "the processor"
    known = gpus if isinstance(gpus, list) else []
    matches = [gpu for gpu in known if gpu["name"] == device["model"]]
    memory = f", {matches[0]['memory_mb']} MiB" if matches else ""
    return f"{device['model']}{memory}, compute capability {device['compute_capability']}"


def cuda_line(cuda: Mapping[str, Any]) -> str:
    if not cuda["built"]:
        return "TensorFlow was built without it"
    libraries = [(f"CUDA {cuda['cuda']}", cuda["cuda_found"]), (f"cuDNN {cuda['cudnn']}", cuda["cudnn_found"])]
    libraries += [("the driver", cuda["driver_found"])]
    return "built for " + ", ".join(f"{name} ({'found' if is_found else 'not found'})" for name, is_found in libraries)


def environment_rows(report: Report) -> ReportRows:
    config = report["tf_config"]
    store = report["tracking"]
    if config is None:
        tf_config = "not set"
    elif config.get("error"):
        tf_config = config["error"]
    else:
        tf_config = f"{config['role']} {config['index']} of {', '.join(config['peers'])}" if "peers" in config else ""
    reach = {True: "reachable", False: "NOT reachable", None: "unknown"}
    tracking = failure_of(store) or f"{store['uri']}: {reach[store['reachable']]}; {store['detail']}"
    rows = [("TF_CONFIG", tf_config), ("tracking", tracking)]
    for variables in report["variables"].values():
        if isinstance(variables, Mapping):
            rows += variables.items()
    return rows


def verdict_rows(verdicts: Mapping[str, Any]) -> ReportRows:
    reason = failure_of(verdicts)
    if reason:
        return [("error", reason)]
    words = {True: "yes", False: "no", None: "?"}
    width = max(map(len, verdicts), default=0)
    return [(f"{option:<{width}}  {words[v['works']]:<3}", v["reason"]) for option, v in verdicts.items()]


def auto_rows(auto: Mapping[str, Any]) -> ReportRows:
    reason = failure_of(auto) or (auto["refusal"] and f"refused: {auto['refusal']}")
    if reason:
        return [("", reason)]
    words = {"strategy=auto": "strategy", "hardware=auto": "hardware", "precision=mixed": "mixed"}
    return [(word, auto[key] or "unknown") for word, key in words.items()]
