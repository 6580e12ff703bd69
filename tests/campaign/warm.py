"""Preloaded into the process that a campaign's commands and servers are forked from."""

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

import scaleflow.cli
import scaleflow.tracking.package
import scaleflow.tracking.store  # noqa: F401
from scaleflow.launcher.server import preload

preload()
