"""Starts a new run with the config of a tracked run, in a new folder.

    scaleflow rerun RUN_ID
    scaleflow rerun RUN_ID training.epochs=40 model=cnn
    scaleflow rerun RUN_ID --config-dir my_conf --trust my_models

RUN_ID is the id of a run in MLflow, the folder of a run, or a model: models:/NAME/VERSION, models:/NAME@ALIAS or
models:/m-...
The run is looked up in `tracking.uri=...`, else in MLFLOW_TRACKING_URI, else in sqlite:///mlflow.db. The new run does
not use or change the checkpoints of the tracked run. Somebody else may have written a tracked config. That is why it
may name only code of scaleflow and Keras, and files in the current folder. Use --trust to allow more.

Exit code: 0 finished; 1 training failed; 2 the command cannot work, nothing was recorded; 130 or 143 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scaleflow.__main__ import entry
from scaleflow.api import launch_config
from scaleflow.commands.frame import run_command
from scaleflow.commands.tracked_run import make_run_parser, parse_command
from scaleflow.config.from_mlflow import find_config_dirs, find_store_options, reuse_config
from scaleflow.launcher.answer import to_printable
from scaleflow.launcher.display import Display
from scaleflow.launcher.named_runs import find_named_run
from scaleflow.runs.split_digest import SplitDigests

#: The tag of the new run that names the tracked run.
TAG = "scaleflow.rerun_of"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code, which means the same as that of a run."""
    return run_command(rerun, argv)


def rerun(typed: list[str]) -> int:
    words, _ = parse_command(make_run_parser("rerun", __doc__), typed)
    store, tracker, tracked = find_named_run(words.run_id, find_store_options(words))
    words = replace(words, tracked_dirs=find_config_dirs(tracked.command))
    composed = reuse_config(tracked.config, tracked.params, words)
    if composed.config.tracking.name == "mlflow" and composed.config.tracking.uri is None:
        composed.config.tracking.uri = store.uri
    Display(sys.stdout).print_line(f"rerun of {to_printable(tracked.name)}  ({tracked.run_id})")
    repeats = read_digests(tracker.fetch_run())
    return launch_config(composed, words.overrides, tags={TAG: tracked.run_id}, repeats=repeats)[0]


def read_digests(run: Any) -> SplitDigests:
    """Returns the digests of the data of a run of MLflow."""
    from scaleflow.tracking.inputs import read_dataset_inputs  # imports MLflow

    return read_dataset_inputs(run)


if __name__ == "__main__":
    entry("rerun")
