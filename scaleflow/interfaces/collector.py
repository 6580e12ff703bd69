"""Python's garbage collector, which takes a quarter of the time of a large import, or to build and export a model."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_collector() -> Iterator[None]:
    """Pauses the collector: it would search many new objects that stay again and again, and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
