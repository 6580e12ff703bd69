"""Imports Keras without its slow optional dependencies, and measures the time."""

import sys
import time

from scaleflow.interfaces.collector import pause_collector

#: Keras imports these packages if they are installed, for wrappers and plots that a worker does not use. They add a
#: second or more to every start. A model or dataset can still import them as usual.
NOT_FOR_KERAS = ("sklearn", "matplotlib", "matplotlib.pyplot", "pandas")

#: How long the import took, in seconds, in this process or the fork server, and when it ended, since the epoch.
import_seconds = 0.0
imported_at = 0.0


def import_keras() -> None:
    """Imports Keras, unless it is already imported, and records the duration."""
    global import_seconds, imported_at
    if "keras" in sys.modules:
        return
    began = time.monotonic()
    hidden = [name for name in NOT_FOR_KERAS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import fail
    try:
        with pause_collector():
            import keras  # noqa: F401
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
        imported_at = time.time()
        import_seconds = time.monotonic() - began
