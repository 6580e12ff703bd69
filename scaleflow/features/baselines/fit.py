"""Fits baselines in a separate process: `python -m scaleflow.features.baselines.fit FOLDER`.

FOLDER is a run's folder. The process reads the rows there and writes the metrics and, if the run requests them, the
outputs. It imports neither TensorFlow nor `scaleflow.runs`, because the run waits for it at its end.
"""

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from scaleflow.errors import read_reason
from scaleflow.features.baselines.files import BaselineFiles

#: Niceness of the process: training processes go first.
NICE = 5

#: Key in the file of metrics: why the baselines could not be fitted.
FAILED_FIT = "not fitted"


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    threading.Thread(target=end_with_worker, daemon=True).start()
    fit_and_write(BaselineFiles(Path(sys.argv[1])))


def end_with_worker() -> None:
    """Ends this process when the worker closes standard input or dies."""
    os.read(0, 1)
    os._exit(1)


def fit_and_write(files: BaselineFiles) -> None:
    """Fits the baselines, writes their metrics, and deletes the rows.

    If that fails, the run has no baselines, and the file of metrics has the reason.
    """
    try:
        values = fit_rows(files)
        part = files.metrics.with_suffix(".part")
        part.write_text(json.dumps(values), encoding="utf-8")
        part.replace(files.metrics)
    except Exception as error:  # a full disk, little memory, or a table that scikit-learn cannot fit
        with contextlib.suppress(OSError):
            reason = f"{type(error).__name__}: {read_reason(error)}"
            files.metrics.write_text(json.dumps({FAILED_FIT: reason}), encoding="utf-8")
    finally:
        files.rows.unlink(missing_ok=True)


def fit_rows(files: BaselineFiles) -> dict[str, float]:
    """Fits the baselines and returns their metrics. Writes their outputs if the run requests them."""
    import numpy as np

    from scaleflow.features.baselines.models import BaselineData, fit_baselines

    data = BaselineData.load(files.rows)
    outputs: dict[str, Any] = {}
    values = fit_baselines(data, outputs)
    if data.keeps_outputs:
        if data.test_weights is not None:
            outputs["weights"] = data.test_weights
        np.savez(files.outputs, targets=data.test_targets, **outputs)
    return values


if __name__ == "__main__":
    main()
