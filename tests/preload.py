"""Preloaded into the session's forkserver: what nearly every child imports anyway."""

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

import scaleflow.cli
import scaleflow.dataset
import scaleflow.hardware
import scaleflow.launcher.job
import scaleflow.model
import scaleflow.optimizer
import scaleflow.precision
import scaleflow.strategy
import scaleflow.tracking.store
import scaleflow.training  # noqa: F401
