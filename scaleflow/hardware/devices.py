"""Configures TensorFlow's devices. Must run before any TensorFlow operation."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import Hardware


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
    found = bool(tf.config.list_physical_devices("GPU"))
    if options.name == "gpu" and not found:
        raise ConfigError("hardware=gpu: TensorFlow finds no GPU on this machine; use hardware=cpu, or hardware=auto")
    if not found and options.memory_limit_mb is not None:
        raise ConfigError(
            f"hardware.memory_limit_mb={options.memory_limit_mb}: there is no GPU, and a CPU cannot have a memory "
            "limit; leave it null"
        )
    return found


def choose_devices(
    physical: list[tf.config.PhysicalDevice], options: Hardware, kind: str
) -> list[tf.config.PhysicalDevice]:
    """Returns the physical devices that `hardware.devices` names, all of them if it is null."""
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
