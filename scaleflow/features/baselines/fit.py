"""Fits baselines in their own process: `python -m scaleflow.features.baselines.fit ROWS METRICS OUTPUTS`.

The arguments are paths of files: it reads the rows, and writes the metrics, and outputs if the rows ask for them. It
imports neither TensorFlow nor `scaleflow.runs`, because the run waits for it at its end.
"""

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from scaleflow.errors import read_reason
from scaleflow.interfaces import FAILED_FIT

#: The priority of the process: those that train go first.
NICE = 5


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    threading.Thread(target=end_with_worker, daemon=True).start()
    rows, metrics, outputs = sys.argv[1:]
    fit_and_write(Path(rows), Path(metrics), Path(outputs))


def end_with_worker() -> None:
    """Ends this process when the worker has closed standard input, or is gone."""
    os.read(0, 1)
    os._exit(1)


def fit_and_write(rows: Path, metrics: Path, outputs: Path) -> None:
    """Fits the baselines, writes their metrics, and deletes the rows. A failure leaves the run without baselines.

    Then the file of their metrics has the reason.
    """
    try:
        import numpy as np

        from scaleflow.features.baselines.models import BaselineData, fit_baselines

        data = BaselineData.load(rows)
        answers: dict[str, Any] = {}
        values = fit_baselines(data, answers)
        if data.keeps_outputs:
            if data.test_weights is not None:
                answers["weights"] = data.test_weights
            np.savez(outputs, targets=data.test_targets, **answers)
        part = metrics.with_suffix(".part")
        part.write_text(json.dumps(values), encoding="utf-8")
        part.replace(metrics)
    except Exception as error:  # such as a full disk, little memory, or a table that scikit-learn cannot fit
        with contextlib.suppress(OSError):
            reason = f"{type(error).__name__}: {read_reason(error)}"
            metrics.write_text(json.dumps({FAILED_FIT: reason}), encoding="utf-8")
    finally:
        rows.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
