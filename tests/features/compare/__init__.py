from pathlib import Path
from typing import Any

from scaleflow.runs.run import Run


def fake_run(folder: Path, **known: Any) -> Run:
    """A finished run of which some things are known, and nothing is read."""
    run = Run(folder)
    empty = {"params": {}, "settings": {}, "points": {}, "weights": "", "repeats": (), "run_id": None}
    vars(run).update({"name": "a", "status": "FINISHED", **empty, **known})
    return run
