"""Fits the baselines of a run in the launcher, while its workers train."""

import json
import threading
from typing import Any

from scaleflow.runs import RunFolder


def begin_baselines(files: RunFolder) -> None:
    """Starts a thread that fits baselines to the rows that the worker has written, if there are some.

    The worker reports the metrics when it ends the run.
    """
    if files.baseline_data.exists():
        threading.Thread(target=fit_and_write, args=(files,), name="baselines", daemon=True).start()


def fit_and_write(files: RunFolder) -> None:
    """Fits the baselines, writes their metrics, and deletes the rows. A failure leaves the run without baselines."""
    import numpy as np

    from scaleflow.evaluation.baseline_models import BaselineData, fit_baselines, lower_priority

    lower_priority()
    try:
        data, outputs = BaselineData.load(files.baseline_data), dict[str, Any]()
        values = fit_baselines(data, outputs)
        if data.keeps_outputs:
            outputs |= {} if data.test_weights is None else {"weights": data.test_weights}
            np.savez(files.baseline_outputs, targets=data.test_targets, **outputs)
        part = files.baselines.with_suffix(".part")
        part.write_text(json.dumps(values), encoding="utf-8")
        part.replace(files.baselines)
    except (OSError, ValueError):  # the folder is gone, the disk is full, or scikit-learn cannot fit this table
        pass
    finally:
        files.baseline_data.unlink(missing_ok=True)
