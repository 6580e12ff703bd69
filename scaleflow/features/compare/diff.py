"""Compares two runs: config, code, packages, data, machine and results.

    scaleflow diff RUN_A RUN_B
    scaleflow diff RUN_A RUN_B --on last_week.csv

A run is the id of a run in MLflow, the folder of a run or of a job of a sweep, or a model: models:/NAME/VERSION,
models:/NAME@ALIAS or models:/m-...

A difference of a metric is more than noise if its 95 % interval does not contain 0. The interval comes from the repeats
of the jobs, or from resamples of the test examples whose predictions both runs kept. With --on FILE, both models are
evaluated on all rows of that file or folder, and these results are compared.

Exit code: 0 the runs were compared, whether they differ or not; 2 there is no such run.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from scaleflow.commands.frame import CommandParser, make_main
from scaleflow.commands.tracked_run import make_evaluation_task, make_plan_on, run_evaluation
from scaleflow.config.compose import CommandWords
from scaleflow.config.policies import DATA, Policy
from scaleflow.features.compare.results import MetricDifference
from scaleflow.interfaces import Tracking, name_command
from scaleflow.interfaces.events import MetricsLogged
from scaleflow.launcher.command_exit import Outcome
from scaleflow.launcher.display import display_for
from scaleflow.launcher.processes.stop import catch_stop_signals
from scaleflow.runs import RunFolder
from scaleflow.runs.run import Run, locate_run
from scaleflow.worker.evaluate import ALL

#: With --on, each run's model is evaluated as the run was.
COMPARE = Policy((*DATA, "evaluation"), "evaluations")


@make_main
def main(words: list[str]) -> Outcome:
    parser = CommandParser("diff", __doc__)
    parser.add_argument("first", metavar="RUN_A", help="the first run")
    parser.add_argument("second", metavar="RUN_B", help="the second run")
    parser.add_argument("--on", metavar="FILE", help="compare the results on all rows of this data")
    parser.add_repeated(
        "--trust", "NAME", "with --on: a module whose code may run, or a folder (with a /) whose files may be used"
    )
    parser.add_argument("--uri", help="the tracking store (default: MLFLOW_TRACKING_URI, or mlflow.db in this folder)")
    options = parser.parse_args(words)
    for named in (options.first, options.second):
        if not RunFolder(Path(named).expanduser()).events.is_file():
            locate_run(named, Tracking())  # rejects a bad id before anything is imported
    from scaleflow.features.compare.runs import compare_runs
    from scaleflow.features.compare.tables import print_comparison, to_values

    comparison = compare_runs(options.first, options.second, options.uri)
    if options.on is not None:
        tested = compare_on(options, [*name_command("diff").split(), *words])
        comparison = replace(comparison, results=tested)
    print_comparison(comparison, sys.stdout)
    return Outcome(read=lambda: to_values(comparison))


def compare_on(options: argparse.Namespace, line: list[str]) -> list[MetricDifference]:
    """Evaluates both runs' models on the data that the user named, and compares their metrics."""
    from scaleflow.features.compare.results import compare_metrics

    runs = []
    with (
        tempfile.TemporaryDirectory(prefix="scaleflow-diff-") as temporary,
        display_for() as display,
        catch_stop_signals() as stop,
    ):
        for number, named in enumerate((options.first, options.second)):
            folder = Path(temporary, str(number))
            folder.mkdir()
            run = Run.find(named, Tracking(uri=options.uri))
            words = run.complete(CommandWords(run_id=named, trusted=options.trust, line=line))
            plan = make_plan_on(options.on, run, words, policy=COMPARE)
            task = make_evaluation_task(run, words, plan, folder=folder, named=run)
            events = run_evaluation(plan, task, folder, stop=stop, display=display)
            points = {}
            for event in events:
                if isinstance(event, MetricsLogged):
                    for name, value in event.values.items():
                        points[f"{ALL}/{name}"] = [(event.step, value)]
            evaluated = Run(folder)
            evaluated.points = points
            runs.append(evaluated)
        metrics = compare_metrics(runs[0], runs[1], has_same_data=True)
    file_name = Path(options.on).name
    return [replace(metric, name=f"{file_name}: {metric.name.removeprefix(f'{ALL}/')}") for metric in metrics]
