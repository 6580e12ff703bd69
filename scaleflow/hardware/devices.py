"""Configures TensorFlow's devices before the first TensorFlow operation, and has a table of GPUs' peak speeds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import Debug, Hardware


@dataclass(frozen=True)
class Devices:
    """The devices that a run computes on."""

    kind: str  # `CPU`, `GPU` or `TPU`
    names: tuple[str, ...]  # the logical devices, such as `CPU:0`
    tpu: tf.distribute.cluster_resolver.TPUClusterResolver | None = None  # the connected TPU, for its strategy


def configure_devices(options: Hardware) -> Devices:
    """Applies the config group `hardware` and returns the logical devices.

    Raises ConfigError if the machine does not have the devices, or they cannot be divided like that.
    """
    try:
        return apply_options(options)
    except RuntimeError as error:  # with debug.inline, in a process where TensorFlow already runs
        reason = read_reason(error).rstrip(".")
        raise ConfigError(
            f"hardware={options.name}: TensorFlow has already started in this process with other devices ({reason}); "
            "remove debug=inline, or start a new process, such as a new kernel of the notebook"
        ) from error


def apply_options(options: Hardware) -> Devices:
    set_threads(options)
    if options.deterministic:
        tf.config.experimental.enable_op_determinism()
    if options.name == "tpu":
        return configure_tpu(options.tpu)
    kind = "GPU" if wants_gpu(options) else "CPU"
    if kind == "CPU":
        tf.config.set_visible_devices([], "GPU")
    chosen = choose_devices(tf.config.list_physical_devices(kind), options, kind)
    tf.config.set_visible_devices(chosen, kind)
    for device in chosen:
        divide_device(device, options, kind)
    # Listing logical devices would start the runtime, which a multi-worker strategy still has to configure.
    names = tuple(f"{kind}:{i}" for i in range(len(chosen) * options.logical_devices))
    return Devices(kind, names)


def configure_tpu(address: str | None) -> Devices:
    """Connects this process to a TPU, initialises it and returns its cores.

    If something other than a TPU listens at the address, TensorFlow waits for ever; the launcher then ends the process.
    """
    if address is None:
        raise ConfigError("hardware=tpu: there is no TPU; set hardware.tpu=grpc://HOST:8470, or use hardware=auto")
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, OSError, RuntimeError, ValueError) as error:
        reason = str(getattr(error, "message", None) or error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"hardware.tpu={address}: TensorFlow {tf.__version__} finds no TPU there ({reason[0][:160]}); this needs "
            "a TensorFlow that is built for TPUs, and a TPU that no other process uses; otherwise use "
            "strategy=mirrored"
        ) from error
    cores = tf.config.list_logical_devices("TPU")
    return Devices("TPU", tuple(f"TPU:{i}" for i in range(len(cores))), resolver)


def set_threads(options: Hardware) -> None:
    if options.intra_op_threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(options.intra_op_threads)
    if options.inter_op_threads is not None:
        tf.config.threading.set_inter_op_parallelism_threads(options.inter_op_threads)


def wants_gpu(options: Hardware) -> bool:
    if options.name == "cpu":
        return False
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    if options.name == "gpu" and not has_gpu:
        raise ConfigError("hardware=gpu: TensorFlow finds no GPU on this machine; use hardware=cpu, or hardware=auto")
    if not has_gpu and options.memory_limit_mb is not None:
        raise ConfigError(
            f"hardware.memory_limit_mb={options.memory_limit_mb}: there is no GPU, and a CPU cannot have a memory "
            "limit; leave it null"
        )
    return has_gpu


def choose_devices(
    physical: list[tf.config.PhysicalDevice], options: Hardware, kind: str
) -> list[tf.config.PhysicalDevice]:
    """Returns the physical devices with the indices `hardware.devices`, or all of them if it is null."""
    if options.devices is None:
        return physical
    if max(options.devices) >= len(physical):
        count = len(physical)
        logical_devices = -(-len(options.devices) // count)
        divided = f", or hardware.logical_devices={logical_devices} to divide {'it' if count == 1 else 'each'}"
        raise ConfigError(
            f"hardware.devices={options.devices}: found {count} {kind}{'s' if count != 1 else ''}; use "
            f"hardware.devices={list(range(count))}{divided if logical_devices > 1 else ''}"
        )
    return [physical[i] for i in options.devices]


def divide_device(device: tf.config.PhysicalDevice, options: Hardware, kind: str) -> None:
    if kind == "GPU" and options.memory_growth and options.memory_limit_mb is None:
        tf.config.experimental.set_memory_growth(device, True)
    if options.logical_devices > 1 or options.memory_limit_mb is not None:
        if kind == "GPU" and options.memory_limit_mb is None:
            raise ConfigError(
                f"hardware.logical_devices={options.logical_devices}: dividing a GPU needs hardware.memory_limit_mb, "
                "the memory of each logical device"
            )
        logical = tf.config.LogicalDeviceConfiguration(memory_limit=options.memory_limit_mb)
        tf.config.set_logical_device_configuration(device, [logical] * options.logical_devices)


def apply_debug(debug: Debug) -> None:
    """Configures this process. Call it before any operation runs."""
    if debug.placement:
        tf.debugging.set_log_device_placement(True)
    if debug.nan:
        tf.debugging.enable_check_numerics()
    if debug.eager:
        tf.config.run_functions_eagerly(True)


TERA = 1e12

#: Dense operations per second of the tensor cores in units of 10^12 (data sheets often give twice as much, for sparse
#: matrices). float32 is TF32, which TensorFlow uses for float32 matrices from Ampere on; before, it is plain float32.
#: None: no tensor cores for that dtype. The first pattern that matches counts.
#: Sources: NVIDIA's data sheets: B200 (DGX B200), H200, H100 (SXM, PCIe, NVL), A100, A30, A10, L40S, L4, V100, T4.
PEAKS: Sequence[tuple[str, float, float, float | None]] = (
    # pattern, float32, float16, bfloat16
    (r"\bB200\b", 1125.0, 2250.0, 2250.0),
    (r"\bH200 NVL\b", 417.5, 835.5, 835.5),
    (r"\bH200\b", 494.5, 989.5, 989.5),
    (r"\bH100 PCIe\b", 378.0, 756.5, 756.5),
    (r"\bH100 NVL\b", 417.5, 835.5, 835.5),
    (r"\bH100\b", 494.5, 989.5, 989.5),
    (r"\bA100\b", 156.0, 312.0, 312.0),
    (r"\bA30\b", 82.0, 165.0, 165.0),
    (r"\bA10\b", 62.5, 125.0, 125.0),
    (r"\bL40S\b", 183.0, 362.0, 362.0),
    (r"\bL4\b", 60.0, 121.0, 121.0),
    (r"\bV100-SXM2\b", 15.7, 125.0, None),
    (r"\bV100-PCIE\b", 14.0, 112.0, None),
    (r"\bT4\b", 8.1, 65.0, None),
)


def device_peak(name: str, policy: str) -> float | None:
    """Returns a device's peak operations per second under a dtype policy, None if unknown."""
    for pattern, float32, float16, bfloat16 in PEAKS:
        if re.search(pattern, name):
            peak = {"float32": float32, "mixed_float16": float16, "mixed_bfloat16": bfloat16}.get(policy)
            return None if peak is None else peak * TERA
    return None


def process_peak(kind: str, policy: str, count: int) -> float | None:
    """Returns the peak operations per second of this process's first `count` GPUs, None if unknown or no GPU."""
    if kind != "GPU":
        return None
    used = tf.config.get_visible_devices("GPU")[:count]
    details = [tf.config.experimental.get_device_details(gpu) for gpu in used]
    peaks = [device_peak(gpu_details.get("device_name", ""), policy) for gpu_details in details]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if known and len(known) == len(peaks) else None
