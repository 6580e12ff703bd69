"""Says in what two runs differ: config, code, packages, data, machine, and results.

    scaleflow diff RUN_A RUN_B
    scaleflow diff RUN_A RUN_B --html diff.html

A run is the id of a run in MLflow, the folder of a run or of a job of a sweep, or a model: models:/NAME/VERSION,
models:/NAME@ALIAS or models:/m-...
A difference of a metric is more than noise if 95 % of what repeats of the jobs show, or of resamples of the test
examples whose predictions both runs kept, is on one side of 0.

Exit code: 0 the runs were compared, whether they differ or not; 2 there is no such run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from scaleflow.commands.frame import CommandParser, check_page, run_command
from scaleflow.commands.process import end_with
from scaleflow.interfaces import Tracking
from scaleflow.launcher.answer import ANSWER
from scaleflow.launcher.named_runs import locate_run
from scaleflow.runs import RunFolder


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    return run_command(diff, argv)


def diff(words: list[str]) -> int:
    parser = CommandParser("diff", __doc__)
    parser.add_argument("first", metavar="RUN_A", help="the first run")
    parser.add_argument("second", metavar="RUN_B", help="the second run")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write everything that differs to a page")
    parser.add_argument("--uri", help="the tracking store (default: MLFLOW_TRACKING_URI, or mlflow.db in this folder)")
    options = parser.parse_args(words)
    for named in (options.first, options.second):
        if not RunFolder(Path(named).expanduser()).events.is_file():
            locate_run(named, Tracking())  # refuses what is no run before anything is imported
    if options.html is not None:
        check_page("--html", options.html)
    from scaleflow.comparison.runs import compare_runs
    from scaleflow.comparison.tables import print_comparison, to_page, to_values

    comparison = compare_runs(options.first, options.second, options.uri)
    print_comparison(comparison, sys.stdout)
    if options.html is not None:
        options.html.write_text(to_page(comparison), encoding="utf-8")
        print(f"\nwritten to {options.html}")
    ANSWER.read = lambda: to_values(comparison)
    return 0


if __name__ == "__main__":
    end_with(main)
