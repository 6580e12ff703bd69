"""How the work is spread over devices: a `tf.distribute` strategy from its name."""

from scaleflow.strategy.pipeline import birthplace, pipelined
from scaleflow.strategy.synchronous import create, resolve

__all__ = ["birthplace", "create", "pipelined", "resolve"]
