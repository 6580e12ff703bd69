"""Writes the predictions of a tracked model for the rows of a table.

    scaleflow predict RUN_ID --input new.parquet --output predictions.parquet
    scaleflow predict RUN_ID --input new.csv --output predictions.csv --keep id,town
    scaleflow predict RUN_ID --input 'days/*.parquet' --output predictions/ --resume
    scaleflow predict RUN_ID --input new.csv --output out.csv hardware=cpu hardware.logical_devices=2
    scaleflow predict RUN_ID --input prompts/ --output texts.csv --tokens 200
    scaleflow predict RUN_ID --input new.csv --output features.parquet --layer dense_1

The input is a CSV, TSV, Parquet, Feather or JSON lines file, a glob, a folder, or such an address in an object store
(s3://, gs://, abfs://). It is read in pieces, so it may be larger than the memory. An output that ends in .parquet or
.csv is one file. Another name, or one that ends in /, is a folder of shards, part-00000.parquet and so on. If the
command is stopped, finished shards stay, and --resume continues after them.

The table is read as the run read its own: kinds of columns, dates, encoding, header, delimiter, missing values. The
last lines count, by column, bad rows, unknown categories and missing values that the model replaced. A bad row has a
value that the model cannot take: text for a number, say, or a missing number that the model cannot replace.

Columns of the output: for classes `prediction`, `probability` and `probability_CLASS`, for numbers `prediction`. With
several outputs their names come first. The SavedModel computes on all GPUs of this machine, or on its CPU; overrides of
the config groups `hardware` and `strategy` choose other devices.
A language model (dataset=tokens) continues prompts: the column `prompt` of a table, or .txt and .md files of which each
is one. --tokens, --temperature, --top-k, --top-p and --seed say how, as those of `scaleflow generate`.
RUN_ID is the id of a run in MLflow, the folder of a run, or a model: models:/NAME/VERSION, models:/NAME@ALIAS or
models:/m-... A run stands for the model that is its result.
The run is looked up in `tracking.uri=...`, else in MLFLOW_TRACKING_URI, else in sqlite:///mlflow.db.

Exit code: 0 all predictions are written; 1 it failed; 2 the command cannot work; 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.commands.frame import CommandParser, make_main
from scaleflow.commands.tracked_run import add_run_id, answer_model, find_run, format_model_rows
from scaleflow.config.compose import CommandWords, compose_config
from scaleflow.config.policies import Policy
from scaleflow.dataset.reading.files import identify_in_store
from scaleflow.errors import ConfigError, RunError, read_reason
from scaleflow.features.predict.language_model import (
    add_sampling_flags,
    explain_no_language_model,
    is_language_model,
    load_language_model,
    read_sampling,
)
from scaleflow.files.cache import identify_file
from scaleflow.files.object_store import is_store_address
from scaleflow.interfaces import LearnedState, Plan, Tracking, name_leaves
from scaleflow.interfaces.events import Event, Note
from scaleflow.interfaces.sampling import Sampling
from scaleflow.launcher.command_exit import Outcome
from scaleflow.launcher.display import IMPORTING, BarDisplay, Display, display_for
from scaleflow.launcher.prepare import make_plan
from scaleflow.launcher.processes.stop import Stopped, StopRequest, catch_stop_signals
from scaleflow.runs.run import Run, locate_run

if TYPE_CHECKING:
    from scaleflow.evaluation.predictions import PredictionColumns
    from scaleflow.features.predict.bad_rows import RowReport
    from scaleflow.features.predict.chunks import PredictionTask, RowModel
    from scaleflow.features.predict.output import Output
    from scaleflow.features.predict.reading import InputForm, RowSource

#: The command composes a config, and predicts in one process.
PREDICT = Policy(work="predictions")

#: Overrides that this command accepts.
OVERRIDES = re.compile(
    r"strategy|hardware|tracking\.uri"
    r"|hardware\.(devices|logical_devices|memory_growth|memory_limit_mb|intra_op_threads|inter_op_threads|deterministic)"
)

#: Choices for a row that the model cannot take.
ON_BAD = ("raise", "skip", "empty")

#: Default number of rows per shard.
SHARD_ROWS = 1_000_000

#: Seconds between two progress lines, if there is no terminal.
LINE_SECONDS = 5.0

#: With an unexpected error, this many bytes of native libraries' output are shown.
SHOWN_BYTES = 4000


@make_main
def main(words: list[str]) -> Outcome:
    typed = make_predict_parser().parse_intermixed_args(words)
    with display_for() as display:
        return predict(typed, display)


def make_predict_parser() -> argparse.ArgumentParser:
    parser = CommandParser("predict", __doc__)
    add_run_id(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="an override of hardware, strategy or tracking.uri"
    )
    parser.add_argument("--input", required=True, metavar="PATH", help="a file, a glob or a folder")
    parser.add_argument(
        "--output", required=True, metavar="PATH", help="a .parquet or .csv file, or a folder of shards"
    )
    parser.add_argument(
        "--keep", default="", metavar="COLUMNS", help="columns of the input to copy, with commas, or all"
    )
    parser.add_argument(
        "--columns",
        default="",
        metavar="COLUMNS",
        help="for a model whose inputs have no names: the columns with its values, in its order, with commas",
    )
    parser.add_argument(
        "--delimiter", metavar="CHARACTER", help="between the fields of a CSV file (default: that of the run's dataset)"
    )
    parser.add_argument(
        "--on-bad",
        choices=ON_BAD,
        default=ON_BAD[0],
        help="what to do with a bad row: end with exit code 1 (raise, the default), leave it out (skip), or write it "
        "with empty predictions (empty)",
    )
    parser.add_argument(
        "--probabilities", action="store_true", help="a column for each class, even if there are more than 20"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="what each column, each word of a text or each part of a picture contributes",
    )
    parser.add_argument("--layer", metavar="NAME", help="columns NAME_0 and so on: what a layer of the model returns")
    parser.add_argument("--logits", action="store_true", help="a column for each logit, after the predictions")
    parser.add_argument(
        "--batch-size",
        type=parse_positive,
        metavar="ROWS",
        help="rows that a device computes at once (default: 1024, fewer for large examples)",
    )
    parser.add_argument(
        "--shard-rows",
        type=parse_positive,
        metavar="ROWS",
        help=f"rows of the input for a shard (default: {SHARD_ROWS:,})",
    )
    add_sampling_flags(parser)
    parser.add_argument("--resume", action="store_true", help="skip the finished shards of the output folder")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    return parser


def parse_positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 1")
    return int(text)


def predict(typed: argparse.Namespace, display: Display) -> Outcome:
    """Checks the command, then computes and writes the predictions.

    Raises ConfigError if a check fails, and RunError after that.
    """
    sampling = read_sampling(typed)
    plan = make_prediction_plan(typed)
    output = open_checked_output(typed)
    display.begin_phase("reading the run and its model from MLflow")
    run, _ = find_run(CommandWords(typed.overrides, run_id=typed.run_id), needs_run=False)
    continues_texts = is_language_model(run.learned_state)
    check_model_flags(typed, run, sampling, continues_texts)
    state = read_state(run)
    if continues_texts:
        sampling = sampling or Sampling()
        state = replace(state, schema={})  # there is nothing to compare prompts with

    with tempfile.TemporaryDirectory(prefix="scaleflow-predict-") as folder:

        @cache
        def load() -> LoadedModel:
            with hide_errors():
                if sampling is not None:
                    return load_prompt_model(plan, run, Path(folder), sampling)
                return load_predictor(plan, run, Path(folder), typed.batch_size, typed.layer)

        if continues_texts:
            task = make_text_task(typed, state, output)
        else:
            layer = load().extra if typed.layer is not None else {}  # only the model knows the shape of a layer
            task = make_task(typed, state, output, extra=layer)
        with output.lock(), catch_stop_signals() as stop:
            manifest = describe_task(typed, run, task)
            if sampling is not None:
                manifest["sampling"] = asdict(sampling)
            first = output.find_first(manifest, typed.resume)
            display.begin_phase(f"{IMPORTING} and loading the model")
            loaded = load()
            if typed.explain:
                loaded = add_reasons(loaded, state, task)
            display.end_phase()
            for note in loaded.notes:
                display.show_event(note)
            output.begin(manifest, first)
            written = write_with_progress(typed, task, loaded.model, output, first, stop, display)
    return report_predictions(run, task, output, loaded.devices, written, stop, display)


@dataclass(frozen=True)
class LoadedModel:
    """A model on its devices."""

    model: RowModel
    devices: str  # in words
    notes: Sequence[Note] = ()  # what the user should know about the devices or the cost
    extra: Mapping[str, Any] = field(default_factory=dict)  # a layer's values without rows, by name


@dataclass(frozen=True)
class WrittenPredictions:
    """What a command has written."""

    rows: int  # rows read
    bad: int  # those of them without a prediction
    skipped: int  # rows of earlier commands in the output folder
    seconds: float
    report: RowReport  # how the rows differ from training


def open_checked_output(typed: argparse.Namespace) -> Output:
    """Checks `--input` and `--output`. Raises ConfigError if the input is missing or the output cannot be written."""
    from scaleflow.features.predict.inputs import list_input_files
    from scaleflow.features.predict.output import open_output

    list_input_files(typed.input)
    output = open_output(typed.output, typed.overwrite, typed.resume)
    if typed.shard_rows and not output.is_folder:
        raise ConfigError(f"--shard-rows {typed.shard_rows}: is for a folder of shards; use --output FOLDER/")
    return output


def check_model_flags(typed: argparse.Namespace, run: Run, sampling: Sampling | None, continues_texts: bool) -> None:
    """Raises ConfigError for flags that the kind of model does not take."""
    if sampling is not None and not continues_texts:
        raise explain_no_language_model(run)
    if continues_texts and (typed.explain or typed.layer is not None):
        flag = "--explain" if typed.explain else f"--layer {typed.layer}"
        raise ConfigError(f"{flag}: this model continues texts, of which it is not known; leave it out")


def add_reasons(loaded: LoadedModel, state: LearnedState, task: PredictionTask) -> LoadedModel:
    """Returns a model that also computes the reasons of `--explain`, with a note about their cost."""
    from scaleflow.features.predict.reasons import ExplainingModel, describe_cost, make_explainer

    explainer = make_explainer(state, task.predicted)
    model = ExplainingModel(loaded.model, explainer)
    notes = [*loaded.notes, Note(describe_cost(explainer))]
    return replace(loaded, model=model, notes=notes)


def write_with_progress(
    typed: argparse.Namespace,
    task: PredictionTask,
    model: RowModel,
    output: Output,
    first: int,
    stop: StopRequest,
    display: Display,
) -> WrittenPredictions:
    """Writes the shards from number `first` on, and shows the progress."""
    from scaleflow.features.predict.bad_rows import RowReport

    report = RowReport(typed.on_bad, task.source.name, task.form.state, counted=task.form.categories)
    began = time.monotonic()
    skipped = output.count_rows(first)
    with show_progress(display, task.source.rows) as advance, divert_native_errors():
        rows, bad = write_predictions(
            task, model, output, first=first, report=report, advance=advance, check_stop=stop.check
        )
    seconds = time.monotonic() - began
    return WrittenPredictions(rows, bad, skipped, seconds=seconds, report=report)


def report_predictions(
    run: Run,
    task: PredictionTask,
    output: Output,
    devices: str,
    written: WrittenPredictions,
    stop: StopRequest,
    display: Display,
) -> Outcome:
    """Prints the summary, and returns the outcome of the command. A stopped command prints no summary."""
    new_columns = task.list_columns_unknown_to_run()
    values = {
        **answer_model(run),
        "output": str(output.path),
        "rows": written.rows,
        "counts": {
            "there before": written.skipped,
            "new columns": new_columns,
            **written.report.to_counts(written.bad),
        },
    }
    if stop.is_set():
        hint = ""
        if output.is_folder:
            hint = f"; {output.count_finished()} shard(s) are whole, --resume continues"
        return Outcome(stop.exit_code, lambda: values, error=f"stopped by {stop.signal_name}{hint}")

    before = f", after {written.skipped:,} that were there" if written.skipped else ""
    speed = f"{written.rows / written.seconds:,.0f} rows/s"
    lines = [*format_model_rows(run), ("on", devices), ("rows", f"{written.rows:,}{before}, {speed}")]
    if new_columns:
        lines.append(("new columns", f"{', '.join(new_columns)}: not in training, not used"))
    lines += written.report.describe(written.bad, bool(written.skipped))
    lines.append(("output", str(output.path)))
    display.print_summary(lines)
    return Outcome(read=lambda: values)


def read_state(run: Run) -> LearnedState:
    """Returns a run's learned state. `reading` is completed by the options of its dataset."""
    dataset = None if run.is_deleted else run.config.get("dataset")
    options = dataset if isinstance(dataset, dict) else {}
    return replace(run.learned_state, reading={**options, **run.learned_state.reading})


def make_prediction_plan(typed: argparse.Namespace) -> Plan:
    """Returns the plan that selects the devices. Raises ConfigError for overrides of anything else."""
    locate_run(typed.run_id, Tracking())  # rejects a bad id before anything is imported
    for override in CommandWords(typed.overrides).parsed:
        key = str(override.key_or_group)
        if override.is_sweep_override() or override.is_delete() or not OVERRIDES.fullmatch(key):
            raise ConfigError(
                f"{override.input_line}: this command takes one value each of hardware=..., its keys for devices and "
                "threads, strategy=... and tracking.uri=...; the model computes as it was saved"
            )
    return make_plan(compose_config(typed.overrides), PREDICT)


def make_task(
    typed: argparse.Namespace, state: LearnedState, output: Output, extra: Mapping[str, Any]
) -> PredictionTask:
    """Opens the table and checks that the model can take it. Raises ConfigError if it cannot.

    `extra` has the model's results besides its outputs: arrays without rows, by name.
    """

    from scaleflow.evaluation.predictions import PredictionColumns
    from scaleflow.features.predict.inputs import open_input
    from scaleflow.features.predict.reading import InputForm, drop_unfit_names, match_columns
    from scaleflow.features.predict.reasons import ExtendedColumns, make_explainer

    selected = split_names(typed.columns)
    source = open_input(typed.input, typed.delimiter, state, selected=selected)
    columns = match_columns(state, source.schema, selected or source.values)
    outputs = {name: drop_unfit_names(described) for name, described in name_leaves(state.outputs).items()}
    if typed.logits and all(described.kind == "regression" for described in outputs.values()):
        raise ConfigError("--logits: this model predicts values, and has no logits; leave it out")
    predicted = PredictionColumns(outputs, typed.probabilities, typed.logits)
    if typed.explain:
        extra = {**extra, **make_explainer(state, predicted).make_empty()}
    if extra:
        predicted = ExtendedColumns(outputs, typed.probabilities, typed.logits, extra=extra)
    return complete_task(typed, source, InputForm(state, columns), predicted=predicted, output=output)


def make_text_task(typed: argparse.Namespace, state: LearnedState, output: Output) -> PredictionTask:
    """Opens the prompts of a language model: text files, or a table. Raises ConfigError if there are none."""
    from scaleflow.features.predict.chunks import TextColumns, choose_prompt_column
    from scaleflow.features.predict.inputs import open_table, open_text_files
    from scaleflow.features.predict.reading import InputForm

    source: RowSource | None = open_text_files(typed.input)
    if source is not None:
        (column,) = source.values
    else:
        source = open_table(typed.input, typed.delimiter)
        column = choose_prompt_column(source.schema.names, split_names(typed.columns), state.reading.get("column"))
    return complete_task(typed, source, InputForm(state, {"": [column]}), predicted=TextColumns({}), output=output)


def complete_task(
    typed: argparse.Namespace, source: RowSource, form: InputForm, predicted: PredictionColumns, output: Output
) -> PredictionTask:
    """Adds the kept columns and the output's schema to a task. Raises ConfigError if they cannot be written."""
    import pyarrow

    from scaleflow.features.predict.chunks import PredictionTask
    from scaleflow.features.predict.output import check_schema
    from scaleflow.features.predict.reading import name_columns

    names = source.schema.names
    labels = list(source.labels)
    if typed.keep == "all" and "all" not in names:
        keep = labels or names
    else:
        keep = split_names(typed.keep) or labels
    absent = [name for name in keep if name not in names]
    if absent:
        raise ConfigError(f"--keep {', '.join(absent)}: there is no such column; {name_columns(names, absent[0])}")
    fields = []
    for name in keep:
        type_ = source.schema.field(name).type
        fields.append(pyarrow.field(name, to_plain_type(type_)))
    schema = check_schema(output, pyarrow.schema(fields), predicted.make_schema())
    shard_rows = (typed.shard_rows or SHARD_ROWS) if output.is_folder else None
    return PredictionTask(source, form, keep, predicted=predicted, schema=schema, shard_rows=shard_rows)


def split_names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def to_plain_type(type_: Any) -> Any:
    """Returns the type of a column without dictionary encoding, which may differ between a table's files."""
    from pyarrow import types

    return type_.value_type if types.is_dictionary(type_) else type_


def describe_task(typed: argparse.Namespace, run: Run, task: PredictionTask) -> dict[str, Any]:
    """Returns the facts that must match to continue a folder of shards."""
    return {
        "run": run.run_id,
        "model": run.model.model_id,
        "input": identify_input_files(typed.input, task.source.files),
        "columns": task.form.columns,
        "output columns": [[field.name, str(field.type)] for field in task.schema],
        "delimiter": task.source.delimiter,
        "shard-rows": task.shard_rows,
        "on-bad": typed.on_bad,
    }


def identify_input_files(path: str, files: Sequence[str]) -> list[list[Any]]:
    """Returns for each file its address, and values that change with its content. `path` is `--input`."""
    if is_store_address(path):
        stored = identify_in_store(path)
        return [[file, *stored[file]] for file in files]
    identified = []
    for file in files:
        address = str(Path(file).absolute())
        identified.append([address, *identify_file(file)[1:]])
    return identified


@contextlib.contextmanager
def hide_errors() -> Iterator[None]:
    """Hides all output to standard error during the block: TensorFlow's libraries log there when they start."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    shown = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(shown, 2)
        os.close(shown)


@contextlib.contextmanager
def divert_native_errors() -> Iterator[None]:
    """Keeps native libraries from writing to standard error, such as libjpeg with warnings about pictures.

    Python's own standard error still works. If an unexpected error ends the block, the end of the hidden text is shown.
    """
    stream = sys.stderr
    is_own = writes_to_terminal(sys.stderr)
    stream.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as log, os.fdopen(shown, "w", buffering=1) as terminal:
        os.dup2(log.fileno(), 2)
        sys.stderr = terminal if is_own else stream
        try:
            yield
        except (RunError, ConfigError):  # their messages explain the problem
            raise
        except Exception:
            log.seek(max(0, log.seek(0, os.SEEK_END) - SHOWN_BYTES))
            terminal.write(log.read().decode(errors="replace"))
            raise
        finally:
            terminal.flush()
            os.dup2(shown, 2)
            sys.stderr = stream


def writes_to_terminal(stream: Any) -> bool:
    """Returns whether a Python stream writes to the process's standard error. In a notebook it does not."""
    try:
        return bool(stream.fileno() == 2)
    except (AttributeError, OSError, ValueError):
        return False


def load_prompt_model(plan: Plan, run: Run, folder: Path, sampling: Sampling) -> LoadedModel:
    """Sets up the devices, then downloads and loads a language model."""
    from scaleflow.features.predict.chunks import PromptModel

    model = PromptModel(load_language_model(plan, run, folder), sampling)
    return LoadedModel(model, "one prompt at a time")


def load_predictor(plan: Plan, run: Run, folder: Path, batch_size: int | None, layer: str | None) -> LoadedModel:
    """Sets up the devices, then downloads and loads the model.

    Raises ConfigError if the model cannot be loaded, or has no such layer.
    """
    from scaleflow.tracking.saved_models import download_saved_model
    from scaleflow.tracking.tracked_runs import download_model

    saved_model = download_saved_model(run.tracker, run.model, folder)
    from scaleflow.worker.keras_import import import_keras
    from scaleflow.worker.runtime import setup_runtime

    import_keras()
    events: list[Event] = []
    runtime = setup_runtime(plan, events.append)
    from scaleflow.features.predict.compute import DistributedModel

    try:
        model = DistributedModel(saved_model, runtime.strategy, batch_size)
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        reason = read_reason(error)
        raise ConfigError(f"the SavedModel of the run cannot be loaded: {reason[:300]}") from error
    if layer is not None:
        model.add_layer(download_model(run.tracker, run.model, folder / "keras"), layer)
    replicas = len(runtime.devices.names)
    plural = "s" if replicas > 1 else ""
    devices = f"{replicas} {runtime.devices.kind}{plural}, {model.batch_size:,} rows at once"
    notes = [event for event in events if isinstance(event, Note)]
    return LoadedModel(model, devices, notes, extra=model.extra)


def write_predictions(
    task: PredictionTask,
    model: RowModel,
    output: Output,
    first: int,
    report: RowReport,
    advance: Callable[[int], None],
    check_stop: Callable[[], None],
) -> tuple[int, int]:
    """Writes the shards from number `first` on. Returns the number of rows read, and how many of them are bad.

    If `check_stop` raises Stopped, it ends early without the unfinished shard.
    """
    from scaleflow.features.predict.chunks import read_ahead, read_chunks

    rows = 0
    predicted = 0
    shard_rows = task.shard_rows or sys.maxsize
    chunks_ahead = read_ahead(read_chunks(task, model, report, skip=first * shard_rows))
    shards = itertools.groupby(chunks_ahead, key=lambda chunk: chunk.rows.first // shard_rows)
    with contextlib.suppress(Stopped):
        advance(first * shard_rows)
        for number, chunks in shards:
            with output.open_shard(number, task.schema) as writer:
                for chunk in chunks:
                    check_stop()
                    table, count = chunk.predict(task, model, report)
                    writer.write_table(table)
                    rows += len(chunk.is_good)
                    predicted += count
                    advance(len(chunk.is_good))
        if not rows and not first:  # the table has no rows
            with output.open_shard(0, task.schema):
                pass
    return rows, rows - predicted


@contextlib.contextmanager
def show_progress(display: Display, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yields a function that adds to the number of predicted rows shown: in a bar on a terminal, else in lines.

    `total` is the number of all rows; None: unknown.
    """
    rows = 0
    printed_at = time.monotonic()

    def print_rows(count: int) -> None:
        nonlocal rows, printed_at
        rows += count
        if time.monotonic() - printed_at >= LINE_SECONDS:
            of_total = "" if total is None else f" of {total:,}"
            display.print_line(f"{rows:,}{of_total} rows")
            printed_at = time.monotonic()

    if not isinstance(display, BarDisplay):
        yield print_rows
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress("rows", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), transient=True) as bar:
        yield partial(bar.advance, bar.add_task("", total=total))
