"""Creates the `tf.distribute` strategy of a process from its name, and divides models.

Models are divided into the stages of a pipeline, and into segments that the backward pass computes again.
"""

from scaleflow.strategy.make import create_strategy, resolve_strategy, serve
from scaleflow.strategy.pipeline_parallelism import divide_model, variable_scope
from scaleflow.strategy.segments import recompute_layers, recompute_segments
