"""Prints the best job of a sweep: its result, its overrides, and how to load its model.

    scaleflow best PARENT
    scaleflow best multirun/2026-11-22/10-02-36-199103 --json

PARENT is the id of the sweep's run in MLflow, or the sweep's folder. The jobs are ranked by the sweep's `sweep.metric`.
While the sweep runs, the best job so far is printed.

Exit code: 0 there is a best job; 2 there is no such sweep, or no finished job has the metric.
"""

import os
import shlex
import sys

from scaleflow.api import to_job_result
from scaleflow.commands.frame import CommandParser, make_main
from scaleflow.interfaces import Tracking
from scaleflow.interfaces.formatting import format_number
from scaleflow.interfaces.secret_masking import register_resolver
from scaleflow.launcher.command_exit import Outcome
from scaleflow.launcher.display import Display
from scaleflow.sweep.ranking import find_best_job
from scaleflow.sweep.sweep_report import choose_results, make_loading_row


@make_main
def main(words: list[str]) -> Outcome:
    parser = CommandParser("best", __doc__)
    parser.add_argument("parent", metavar="PARENT", help="the id of a sweep's run in MLflow, or the folder of a sweep")
    parser.add_argument("--uri", help="the tracking store that has the run (default: as that of a run)")
    options = parser.parse_args(words)
    register_resolver()
    best = find_best_job(options.parent, Tracking(uri=options.uri))
    job = to_job_result(best)
    result = job.result
    values = {
        "job": job.number,
        "overrides": job.overrides,
        "metric": best.metric,
        "value": result.metrics.get(best.metric),
        "run_id": result.run_id,
        "status": result.status,
        "metrics": result.metrics,
        "model": result.model_uri,
        "folder": str(result.folder),
    }
    names = choose_results(result.metrics, best.metric, most=3)
    Display(sys.stdout).print_summary(
        [
            ("job", f"#{job.number} {shlex.join(job.overrides)}".strip()),
            *((name.replace("/", " "), format_number(result.metrics[name])) for name in names),
            ("output", os.path.relpath(result.folder)),
            *([("run", result.run_id)] if result.run_id else []),
            make_loading_row(result.model_uri, best.run.address, result.folder),
        ]
    )
    return Outcome(read=lambda: values)
