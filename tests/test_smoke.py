from pathlib import Path


def double(n):
    import tensorflow as tf
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()]*3)
    return len(tf.config.list_logical_devices("CPU")) * n


def test_isolated(isolated):
    assert isolated(double, 2) == 6


def test_plan(plan):
    assert plan().training.epochs == 20
