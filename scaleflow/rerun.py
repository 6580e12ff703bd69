"""Starts a new run with the config of a tracked run, in a new folder.

    python -m scaleflow.rerun RUN_ID
    python -m scaleflow.rerun RUN_ID training.epochs=40 model=cnn
    python -m scaleflow.rerun RUN_ID --config-dir my_conf --trust my_models

The run is looked up in `tracking.uri=...`, else MLFLOW_TRACKING_URI, else sqlite:///mlflow.db. Its checkpoints are not
used or changed. `config/trust.py` says which code, files and addresses a tracked config may name.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from scaleflow.api import launch_config
from scaleflow.command import end_with, refuse, split_overrides, to_printable
from scaleflow.config.from_mlflow import RerunCommand, find_store_options, reuse_config
from scaleflow.errors import ConfigError
from scaleflow.launcher.resume import RUN_ID
from scaleflow.tracking.tracked_runs import choose_store, find_run

#: The tag of the new run that names the tracked run.
TAG = "scaleflow.rerun_of"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code, which means the same as that of `python -m scaleflow`."""
    try:
        words = parse_command(argument_parser("scaleflow.rerun", __doc__), argv)
        store = choose_store(find_store_options(words))
        _, tracked = find_run(words.run_id, store)
        composed = reuse_config(tracked.config, tracked.params, words)
        if composed.config.tracking.name == "mlflow" and composed.config.tracking.uri is None:
            composed.config.tracking.uri = store.uri
        print(f"again: {to_printable(tracked.name)}  ({tracked.run_id})", flush=True)
        return launch_config(composed, words.overrides, tags={TAG: tracked.run_id})[0]
    except ConfigError as refusal:
        return refuse(str(refusal))


def argument_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Makes the parser of a command about a tracked run."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_id", help="the run's id in MLflow, 32 hexadecimal digits")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what is to be otherwise; GROUP=OPTION too")
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="NAME",
        help="a module whose code may be followed, or a folder whose files may be read; again for each",
    )
    parser.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="with options of your own")
    return parser


def parse_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> RerunCommand:
    typed = parser.parse_intermixed_args(split_overrides(list(sys.argv[1:] if argv is None else argv)))
    if not re.fullmatch(RUN_ID, typed.run_id):
        raise ConfigError(f"{typed.run_id}: expected the id of a run in MLflow first, 32 hexadecimal digits")
    return RerunCommand(typed.run_id, typed.overrides, typed.config_dir, typed.trust)


if __name__ == "__main__":
    end_with(main)
