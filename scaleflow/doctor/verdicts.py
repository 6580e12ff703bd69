"""Which strategies and precisions work on a machine, each with its reason.

A verdict is a judgement from what was found; `python -m scaleflow strategy=... training.max_steps=3` is a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: NVIDIA's generations by compute capability (docs.nvidia.com/deeplearning/performance/mixed-precision-training):
#: tensor cores take float16 from Volta on, and bfloat16 from Ampere on.
TENSOR_CORES = {"float16": 7.0, "bfloat16": 8.0}


@dataclass(frozen=True)
class MachineFacts:
    """What a judgement rests on.

    Attributes:
        failure: why TensorFlow does not work here, if it does not.
        gpus: how many TensorFlow finds.
        capability: the lowest compute capability among them.
        cores: of the CPU, that may be used.
        has_bfloat16: whether the CPU multiplies bfloat16 itself.
        workers: how many TF_CONFIG names; 0 where it is not set.
        tf_config: what is wrong with TF_CONFIG, if something is.
        tpu: what tells of a TPU, such as `TPU_NAME=local`; None where nothing does.
        no_tpu: why there is none, or why it can't be reached.
        fails: dtypes in which a small multiplication failed, and how.
    """

    failure: str | None = None
    gpus: int = 0
    capability: float | None = None
    cores: float = 1.0
    has_bfloat16: bool = False
    workers: int = 0
    tf_config: str | None = None
    tpu: str | None = None
    no_tpu: str | None = None
    fails: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "GPU" if self.gpus else "CPU"


@dataclass(frozen=True)
class Verdict:
    """Whether an option works here, None where that can't be told, and why."""

    works: bool | None
    reason: str


Judge = Callable[[MachineFacts], Verdict]


def judge_strategy(name: str, machine: MachineFacts) -> Verdict:
    """The verdict on an option of the group `strategy`."""
    return judge_option(name, machine, STRATEGIES)


def judge_precision(name: str, machine: MachineFacts) -> Verdict:
    """The verdict on an option of the group `precision`."""
    return judge_option(name, machine, PRECISIONS)


def judge_option(name: str, machine: MachineFacts, judges: Mapping[str, Judge]) -> Verdict:
    if machine.failure is not None:
        return Verdict(False, machine.failure)
    if name not in judges:
        return Verdict(None, "the doctor does not know this option")
    return judges[name](machine)


# ---------------------------------------------------------------------------------------------
# Strategies
# ---------------------------------------------------------------------------------------------


def judge_one_device(machine: MachineFacts) -> Verdict:
    return Verdict(True, f"on {machine.device}:0" + (f", one of {machine.gpus}" if machine.gpus > 1 else ""))


def judge_mirrored(machine: MachineFacts) -> Verdict:
    if machine.gpus > 1:
        return Verdict(True, f"a replica on each of {machine.gpus} GPUs")
    if machine.gpus == 1:
        return Verdict(True, "one replica: there is one GPU; hardware.logical_devices and .memory_limit_mb divide it")
    return Verdict(True, "one replica on the CPU; hardware.logical_devices=2 makes two, to try it, no faster")


def judge_multi_worker(machine: MachineFacts) -> Verdict:
    if machine.tf_config is not None:
        return Verdict(None, f"on this machine with cluster=local; cluster=tf_config is refused: {machine.tf_config}")
    if machine.workers > 1:
        return Verdict(True, f"TF_CONFIG names {machine.workers} workers; whether they answer shows at the start")
    return Verdict(
        True, f"processes on this machine, which share {describe_sharing(machine)}; several machines take TF_CONFIG"
    )


def judge_parameter_server(machine: MachineFacts) -> Verdict:
    if machine.tf_config is not None:
        return Verdict(None, f"on this machine with cluster=local; cluster=tf_config is refused: {machine.tf_config}")
    return Verdict(
        True, f"processes on this machine, which share {describe_sharing(machine)}; several machines take TF_CONFIG"
    )


def judge_tpu(machine: MachineFacts) -> Verdict:
    if machine.tpu is None or machine.no_tpu is not None:
        return Verdict(False, machine.no_tpu or "there is no TPU")
    return Verdict(None, f"{machine.tpu} is there; it was not tried, which would take it from whoever uses it")


def judge_pipeline(machine: MachineFacts) -> Verdict:
    if machine.gpus > 1:
        return Verdict(True, f"stages on {machine.gpus} GPUs")
    if machine.gpus == 1:
        return Verdict(None, "there is one GPU for all stages; hardware.logical_devices and .memory_limit_mb divide it")
    return Verdict(True, "stages on the CPU with hardware.logical_devices=2, to try it")


def describe_sharing(machine: MachineFacts) -> str:
    """What processes of one machine share, in words."""
    if machine.gpus:
        return f"{machine.gpus} GPU{'s' if machine.gpus > 1 else ''}, for which strategy=mirrored is made"
    return f"{machine.cores:g} core{'s' if machine.cores != 1 else ''}"


STRATEGIES: Mapping[str, Judge] = {
    "one_device": judge_one_device,
    "mirrored": judge_mirrored,
    "multi_worker": judge_multi_worker,
    "parameter_server": judge_parameter_server,
    "tpu": judge_tpu,
    "pipeline": judge_pipeline,
}


# ---------------------------------------------------------------------------------------------
# Precisions
# ---------------------------------------------------------------------------------------------


def judge_float32(machine: MachineFacts) -> Verdict:
    return dtype_failure("float32", machine) or Verdict(True, "everywhere")


def judge_mixed_float16(machine: MachineFacts) -> Verdict:
    if failed := dtype_failure("float16", machine):
        return failed
    if machine.gpus:
        return Verdict(True, has_tensor_cores("float16", machine))
    return Verdict(True, "right, but slow on a CPU; precision=mixed picks bfloat16 there" + explain_not_on_tpu(machine))


def judge_mixed_bfloat16(machine: MachineFacts) -> Verdict:
    if failed := dtype_failure("bfloat16", machine):
        return failed
    if machine.gpus:
        return Verdict(True, has_tensor_cores("bfloat16", machine))
    own = "the CPU multiplies bfloat16 itself" if machine.has_bfloat16 else "right, but slow: the CPU converts bfloat16"
    return Verdict(True, own)


def judge_mixed(machine: MachineFacts) -> Verdict:
    name, judge = ("mixed_float16", judge_mixed_float16) if machine.gpus else ("mixed_bfloat16", judge_mixed_bfloat16)
    verdict = judge(machine)
    return Verdict(verdict.works, f"{name}: {verdict.reason}")


def dtype_failure(dtype: str, machine: MachineFacts) -> Verdict | None:
    if dtype in machine.fails:
        return Verdict(
            False, f"a small multiplication in {dtype} on the {machine.device} failed: {machine.fails[dtype]}"
        )
    return None


def has_tensor_cores(dtype: str, machine: MachineFacts) -> str:
    if machine.capability is None:
        return "TensorFlow does not say what the GPU can"
    if machine.capability >= TENSOR_CORES[dtype]:
        return f"in tensor cores (compute capability {machine.capability})"
    return (
        f"right, but no faster: tensor cores take {dtype} from compute capability {TENSOR_CORES[dtype]} on, "
        f"and this is {machine.capability}"
    )


def explain_not_on_tpu(machine: MachineFacts) -> str:
    return "; refused on the TPU" if machine.tpu and not machine.no_tpu else ""


PRECISIONS: Mapping[str, Judge] = {
    "float32": judge_float32,
    "mixed": judge_mixed,
    "mixed_float16": judge_mixed_float16,
    "mixed_bfloat16": judge_mixed_bfloat16,
}
