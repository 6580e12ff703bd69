"""How the work is spread over devices: a `tf.distribute` strategy from its name."""

from scaleflow.strategy.make import create, resolve
from scaleflow.strategy.pipeline import birthplace, pipelined
from scaleflow.strategy.servers import serve

__all__ = ["birthplace", "create", "pipelined", "resolve", "serve"]
