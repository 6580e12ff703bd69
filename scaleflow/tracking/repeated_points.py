"""Logs points of metrics, some of which the store may have from an earlier request."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

#: What databases say of a point that they have already.
IS_KNOWN = re.compile(r"UNIQUE constraint|duplicate key|Duplicate entry|IntegrityError", re.IGNORECASE)


def log_points(client: MlflowClient, run_id: str, metrics: Sequence[Metric]) -> None:
    """Logs points in one request.

    If the store has some of the points already, older versions of MLflow insert those of other metrics again, and fail.
    With the points of one metric in a request they do not.

    NaN is logged for the run alone: for a model, MLflow's SQL store keeps it as 0.0.
    """
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    metrics = [Metric(m.key, m.value, m.timestamp, m.step) if math.isnan(m.value) else m for m in metrics]
    try:
        client.log_batch(run_id, metrics=metrics)
    except MlflowException as error:
        keys = {metric.key for metric in metrics}
        if len(keys) == 1 or not IS_KNOWN.search(str(error)):
            raise
        for _, points in groupby(sorted(metrics, key=lambda each: each.key), lambda each: each.key):
            client.log_batch(run_id, metrics=list(points))
