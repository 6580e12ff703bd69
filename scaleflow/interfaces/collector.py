"""Pauses Python's garbage collector. It takes a quarter of the time to import much code or to build
and export a model.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_collector() -> Iterator[None]:
    """Pauses the collector during the block. It would repeatedly search many new objects that all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
