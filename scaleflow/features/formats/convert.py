"""Exports a tracked model in further formats, and proves each in its own runtime on the test split of its run.

    scaleflow convert RUN_ID export.formats=[onnx]
    scaleflow convert models:/house/3 export.formats=[litert,litert_int8] export.int8_loss=0.02

The formats are keras, litert, litert_int8, onnx and openvino. Each becomes an artifact of the logged model, beside its
SavedModel. It is loaded in its own runtime, in a process of its own, and compared with the model: the largest
difference of the outputs, the metrics of the whole split, the size, and the time of one example on this machine with
one thread. The figures are metrics of the run, export/FORMAT/accuracy, /mb, /ms, and a table among its artifacts.

A format that differs by more than export.tolerance, or loses more than export.int8_loss, is not stored.
RUN_ID is the id of a run in MLflow, the folder of a run, or a model: models:/NAME/VERSION, models:/NAME@ALIAS or
models:/m-... A run stands for the model that is its result.
The run is looked up in `tracking.uri=...`, else in MLFLOW_TRACKING_URI, else in sqlite:///mlflow.db.

Exit code: 0 all formats are good; 1 a format is not, or it failed; 2 the command cannot work; 130 or 143 interrupted.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scaleflow.commands.frame import make_main
from scaleflow.commands.tracked_run import (
    answer_model,
    find_run,
    format_model_rows,
    make_evaluation_plan,
    make_run_parser,
    parse_command,
    show_notes,
)
from scaleflow.config.compose import CommandWords
from scaleflow.config.policies import DATA, Policy
from scaleflow.config.typed_folder import in_typed_folder
from scaleflow.errors import ConfigError, RunError, read_reason
from scaleflow.features.formats.events import FormatExported
from scaleflow.features.formats.feature import has_formats
from scaleflow.features.formats.formats import check_formats, check_plan
from scaleflow.features.formats.record import log_formats
from scaleflow.features.formats.task import export_formats, make_format_table
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.command_exit import FAILED, FINISHED, Outcome
from scaleflow.launcher.display import Display, display_for, hidden_display
from scaleflow.launcher.processes.stop import StopRequest, catch_stop_signals
from scaleflow.runs.run import Run
from scaleflow.tracking.saved_models import download_exported

#: Config sections that the command takes from the run.
CONVERT = Policy((*DATA, "export"), "evaluations")


@make_main
def main(typed: list[str]) -> Outcome:
    words, _ = parse_command(make_run_parser("convert", __doc__), typed)
    with display_for() as display, catch_stop_signals() as stop:
        run, formats = convert_tracked_model(words, display, stop)
        rows = list(format_model_rows(run))
        for exported in formats:
            rows += exported.list_rows()
        display.print_summary(rows)
    shown = [{"name": exported.name, **asdict(exported)} for exported in formats]
    code = FAILED if any(exported.error for exported in formats) else FINISHED
    return Outcome(code, lambda: {**answer_model(run), "formats": shown})


def convert_tracked_model(
    words: CommandWords, display: Display, stop: StopRequest
) -> tuple[Run, Sequence[FormatExported]]:
    """Converts a tracked model and records the formats. Returns the run, and the measurements of each format.

    Raises ConfigError if it cannot begin, and RunError if the formats could not be recorded.
    """
    for override in words.parsed:
        names = override.value()
        if override.key_or_group == "export.formats" and isinstance(names, list):
            check_formats(list(map(str, names)))
    display.begin_phase("reading the run and its model from MLflow")
    run, words = find_run(words)
    plan = make_evaluation_plan(show_notes(run.reuse_config(words, CONVERT), display))
    if not has_formats(plan):
        raise ConfigError("export.formats: is null; name the formats to make, such as export.formats=[onnx]")
    check_plan(plan)
    with tempfile.TemporaryDirectory(prefix="scaleflow-convert-") as folder:
        exported = download_exported(run.tracker, run.model, Path(folder))
        formats = export_formats(plan, exported, display.show_event, log=Path(folder, "log"), should_stop=stop.is_set)
        stop.check()
        display.begin_phase("recording the formats in MLflow")
        try:
            log_formats(run.tracker, run.model, formats, table=make_format_table(formats))
        except Exception as error:  # a store may raise anything
            raise RunError(f"the formats could not be recorded: {mask_secrets(read_reason(error))}") from error
    return run, formats


@in_typed_folder
def convert_model(run_id: str, *overrides: str, trust: Sequence[str] = ()) -> Any:
    """Exports a tracked model in further formats, as `scaleflow convert` does.

    Args:
        run_id: a run, its folder or a model, as on the command line.
        overrides: such as "export.formats=[onnx]".
        trust: modules whose code may run, as `--trust`.

    Returns:
        A dict by the name of the format: its values, `error`, and the split that it was compared on.

    Raises:
        ConfigError: if the command cannot work.
        RunError: if it failed, or the formats could not be recorded.
    """
    with hidden_display() as display:
        words = CommandWords(list(overrides), run_id=run_id, trusted=list(trust))
        _, formats = convert_tracked_model(words, display, StopRequest())
    results = {}
    for exported in formats:
        results[exported.name] = {
            **exported.values,
            "split": exported.split,
            "examples": exported.examples,
            "error": exported.error or None,
        }
    return results
