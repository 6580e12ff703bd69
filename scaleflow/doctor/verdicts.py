"""Judges which strategies and precisions work on a machine, with reasons.

A verdict follows from the facts and runs nothing. `python -m scaleflow strategy=... training.max_steps=3` tries one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: The compute capability from which NVIDIA's tensor cores take a dtype: float16 from Volta on, bfloat16 from Ampere on
#: (docs.nvidia.com/deeplearning/performance/mixed-precision-training).
TENSOR_CORES = {"float16": 7.0, "bfloat16": 8.0}


@dataclass(frozen=True)
class MachineFacts:
    """The facts that verdicts follow from."""

    failure: str | None = None  # why TensorFlow does not work here; None if it works
    gpus: int = 0  # how many GPUs TensorFlow finds
    capability: float | None = None  # the lowest compute capability of these GPUs; None if unknown
    cores: float = 1.0  # CPU cores that this process may use
    has_bfloat16: bool = False  # whether the CPU computes bfloat16 natively
    workers: int = 0  # how many processes TF_CONFIG names; 0 if it is not set
    tf_config: str | None = None  # what is wrong with TF_CONFIG; None if nothing is
    tpu: str | None = None  # the setting that names a TPU, such as `TPU_NAME=local`; None if there is none
    no_tpu: str | None = None  # why there is no TPU, or why it cannot be reached
    fails: Mapping[str, str] = field(default_factory=dict)  # dtype -> how a small multiplication in it failed

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
    """Returns the verdict on an option; `judges` is `STRATEGIES` or `PRECISIONS`."""
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


def judge_float32(machine: MachineFacts) -> Verdict:
    return dtype_failure("float32", machine) or Verdict(True, "works on every device")


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
    """Returns the verdict on a 16-bit dtype; `on_cpu` is the reason on a machine without a GPU."""
    if failed := dtype_failure(dtype, machine):
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
    "float32": judge_float32,
    "mixed": judge_mixed,
    "mixed_float16": judge_mixed_float16,
    "mixed_bfloat16": judge_mixed_bfloat16,
}
