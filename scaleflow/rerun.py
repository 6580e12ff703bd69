"""Starts a new run with the config of a tracked run, in a new folder.

    python -m scaleflow.rerun RUN_ID
    python -m scaleflow.rerun RUN_ID training.epochs=40 model=cnn
    python -m scaleflow.rerun RUN_ID --config-dir my_conf --trust my_models

The run is looked up in `tracking.uri=...`, else in MLFLOW_TRACKING_URI, else in sqlite:///mlflow.db. The new run does
not use or change the checkpoints of the tracked run. Somebody else may have written a tracked config. That is why it
may name only code of scaleflow and Keras, and files in the current folder. Use --trust to allow more.

Exit code: 0 finished; 1 training failed; 2 the command cannot work, nothing was recorded; 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

from scaleflow.api import launch_config
from scaleflow.command import end_with, refuse, split_overrides, to_printable
from scaleflow.config.from_mlflow import RerunCommand, find_store_options, reuse_config
from scaleflow.errors import ConfigError
from scaleflow.launcher.display import Display
from scaleflow.launcher.resume import RUN_ID
from scaleflow.runs.split_digest import SplitDigests
from scaleflow.tracking.tracked_runs import choose_store, find_run

#: The tag of the new run that names the tracked run.
TAG = "scaleflow.rerun_of"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code, which means the same as that of `python -m scaleflow`."""
    try:
        words = parse_command(argument_parser("scaleflow.rerun", __doc__), argv)
        store = choose_store(find_store_options(words))
        tracker, tracked = find_run(words.run_id, store)
        composed = reuse_config(tracked.config, tracked.params, words)
        if composed.config.tracking.name == "mlflow" and composed.config.tracking.uri is None:
            composed.config.tracking.uri = store.uri
        Display(sys.stdout).print_line(f"rerun of {to_printable(tracked.name)}  ({tracked.run_id})")
        repeats = read_digests(tracker.fetch_run())
        return launch_config(composed, words.overrides, tags={TAG: tracked.run_id}, repeats=repeats)[0]
    except ConfigError as refusal:
        return refuse(str(refusal))


def read_digests(run: Any) -> SplitDigests:
    """Returns the digests of the data of a run of MLflow."""
    from scaleflow.tracking.inputs import read_dataset_inputs  # imports MLflow

    return read_dataset_inputs(run)


def argument_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Makes the parser of a command about a tracked run."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_id", help="the run's id in MLflow, 32 hexadecimal digits")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="an override of the run's config; GROUP=OPTION replaces a whole group",
    )
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="NAME",
        help="a module whose code may run, or a folder (with a /) whose files may be used; repeat the flag for several",
    )
    parser.add_argument(
        "--config-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder with your own config options; repeat the flag for several",
    )
    return parser


def parse_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> RerunCommand:
    typed = parser.parse_intermixed_args(split_overrides(list(sys.argv[1:] if argv is None else argv)))
    if not re.fullmatch(RUN_ID, typed.run_id):
        raise ConfigError(
            f"{typed.run_id}: expected the id of a run in MLflow (32 hexadecimal digits) as the first argument"
        )
    return RerunCommand(typed.run_id, typed.overrides, typed.config_dir, typed.trust)


if __name__ == "__main__":
    end_with(main)
