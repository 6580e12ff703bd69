"""Dataset sources, and the code that they share: rows are divided, preprocessed and made into batches.

Its names are loaded when they are first used: the launcher imports modules of this package that need no TensorFlow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaleflow.dataset.batches.blocks import check_shards as check_shards
    from scaleflow.dataset.batches.blocks import describe_shards as describe_shards
    from scaleflow.dataset.batches.feed_factory import make_feed as make_feed
    from scaleflow.dataset.batches.feeds import find_places as find_places
    from scaleflow.dataset.batches.matched_source import LevelledSource as LevelledSource
    from scaleflow.dataset.batches.matched_source import WholeSource as WholeSource
    from scaleflow.dataset.batches.matched_source import match_source as match_source
    from scaleflow.dataset.batches.matched_source import read_targets as read_targets
    from scaleflow.dataset.batches.orders import Permutation as Permutation
    from scaleflow.dataset.batches.preprocessing import preprocess_inputs as preprocess_inputs
    from scaleflow.dataset.batches.preprocessing import sample_rows as sample_rows
    from scaleflow.dataset.batches.records import decode_records as decode_records
    from scaleflow.dataset.batches.sorted_data import describe_first_examples as describe_first_examples
    from scaleflow.dataset.batches.sorted_data import describe_stream_order as describe_stream_order
    from scaleflow.dataset.batches.splits import LEFT_OUT as LEFT_OUT
    from scaleflow.dataset.batches.splits import UNLABELLED as UNLABELLED
    from scaleflow.dataset.batches.splits import Splits as Splits
    from scaleflow.dataset.batches.splits import limit_evaluation as limit_evaluation
    from scaleflow.dataset.batches.splits import prepare_splits as prepare_splits
    from scaleflow.dataset.batches.splits import repeat_first_batch as repeat_first_batch
    from scaleflow.dataset.batches.unreadable import explain_read_error as explain_read_error
    from scaleflow.dataset.own import make_source as make_source
    from scaleflow.dataset.reading.text import Text as Text

#: By module, the names that it defines.
NAMES = {
    "own": ("make_source",),
    "batches.orders": ("Permutation",),
    "batches.blocks": ("check_shards", "describe_shards"),
    "batches.feed_factory": ("make_feed",),
    "batches.feeds": ("find_places",),
    "batches.matched_source": ("LevelledSource", "WholeSource", "match_source", "read_targets"),
    "batches.preprocessing": ("preprocess_inputs", "sample_rows"),
    "batches.records": ("decode_records",),
    "batches.sorted_data": ("describe_first_examples", "describe_stream_order"),
    "batches.splits": ("LEFT_OUT", "UNLABELLED", "Splits", "limit_evaluation", "prepare_splits", "repeat_first_batch"),
    "batches.unreadable": ("explain_read_error",),
    "reading.text": ("Text",),
}


def __getattr__(name: str) -> Any:
    for module, names in NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
