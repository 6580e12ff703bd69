"""Sets up TensorFlow's devices; has to run before any operation does."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.hardware.tpu import connect_tpu
from scaleflow.interfaces import Hardware


@dataclass(frozen=True)
class Devices:
    """What a run computes on.

    Attributes:
        kind: `CPU`, `GPU` or `TPU`.
        names: the logical devices, such as `CPU:0`.
        tpu: where the TPU is, for the strategy that is made over it.
    """

    kind: str
    names: tuple[str, ...]
    tpu: tf.distribute.cluster_resolver.TPUClusterResolver | None = None


def configure_devices(options: Hardware) -> Devices:
    """Applies `hardware` and gives the logical devices.

    Raises:
        ConfigError: if there are fewer or other devices than asked for.
    """
    set_threads(options)
    if options.deterministic:
        tf.config.experimental.enable_op_determinism()
    if options.name == "tpu":
        return configure_tpu(options)
    kind = "GPU" if wants_gpu(options) else "CPU"
    if kind == "CPU":
        tf.config.set_visible_devices([], "GPU")
    chosen = choose_devices(tf.config.list_physical_devices(kind), options, kind)
    tf.config.set_visible_devices(chosen, kind)
    for device in chosen:
        divide_device(device, options, kind)
    # Counted, not listed: listing starts the runtime, which a multi-worker strategy still has to configure.
    names = tuple(f"{kind}:{i}" for i in range(len(chosen) * options.logical_devices))
    return Devices(kind, names)


def configure_tpu(options: Hardware) -> Devices:
    """The cores of a TPU, all of them."""
    if options.tpu is None:
        raise ConfigError("hardware=tpu: there is no TPU; give hardware.tpu=grpc://HOST:8470, or use hardware=auto")
    resolver = connect_tpu(options.tpu)
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
            f"hardware.memory_limit_mb={options.memory_limit_mb}: there is no GPU here, and a CPU takes no memory "
            "limit; leave it null"
        )
    return found


def choose_devices(
    physical: list[tf.config.PhysicalDevice], options: Hardware, kind: str
) -> list[tf.config.PhysicalDevice]:
    """The physical devices that `hardware.devices` names, all of them where it is null."""
    if options.devices is None:
        return physical
    if max(options.devices) >= len(physical):
        found = len(physical)
        split = -(-len(options.devices) // found)
        divided = f", or hardware.logical_devices={split} to divide {'it' if found == 1 else 'each'}"
        raise ConfigError(
            f"hardware.devices={options.devices}: found {found} {kind}{'s' if found != 1 else ''}; use "
            f"hardware.devices={list(range(found))}{divided if split > 1 else ''}"
        )
    return [physical[i] for i in options.devices]


def divide_device(device: tf.config.PhysicalDevice, options: Hardware, kind: str) -> None:
    """Divides a physical device into its logical ones, and limits their memory."""
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
