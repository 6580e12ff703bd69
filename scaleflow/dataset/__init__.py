"""Dataset sources, and the input pipeline that all of them share.

Its names are loaded when they are first used: the launcher imports modules of this package that need no TensorFlow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaleflow.dataset.own import make_source
    from scaleflow.dataset.pipeline.augment import augment_feed
    from scaleflow.dataset.pipeline.blocks import check_shards, describe_shards
    from scaleflow.dataset.pipeline.cache import is_mapped, preprocess_inputs, sample_rows
    from scaleflow.dataset.pipeline.feed_factory import make_feed
    from scaleflow.dataset.pipeline.feeds import find_places
    from scaleflow.dataset.pipeline.matched_source import match_source, read_targets
    from scaleflow.dataset.pipeline.records import decode_records
    from scaleflow.dataset.pipeline.splits import (
        LEFT_OUT,
        UNLABELLED,
        Splits,
        limit_evaluation,
        prepare_splits,
        repeat_first_batch,
    )
    from scaleflow.dataset.pipeline.unreadable import UnreadableExample, explain_read_error
    from scaleflow.dataset.pipeline.whole_source import WholeSource
    from scaleflow.dataset.reading.text import Text

__all__ = [
    "LEFT_OUT",
    "UNLABELLED",
    "Splits",
    "Text",
    "UnreadableExample",
    "WholeSource",
    "augment_feed",
    "check_shards",
    "decode_records",
    "describe_shards",
    "explain_read_error",
    "find_places",
    "is_mapped",
    "limit_evaluation",
    "make_feed",
    "make_source",
    "match_source",
    "prepare_splits",
    "preprocess_inputs",
    "read_targets",
    "repeat_first_batch",
    "sample_rows",
]

#: The modules that define these names.
MODULES = (
    "pipeline.splits",
    "pipeline.augment",
    "pipeline.blocks",
    "pipeline.cache",
    "pipeline.feed_factory",
    "pipeline.feeds",
    "pipeline.matched_source",
    "own",
    "pipeline.unreadable",
    "pipeline.whole_source",
    "reading.text",
)


def __getattr__(name: str) -> Any:
    for module in MODULES if name in __all__ else ():
        defined = vars(import_module(f"{__name__}.{module}"))
        if name in defined:
            return defined[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
