"""Writes the predictions of a tracked model for the rows of a table.

    scaleflow predict RUN_ID --input new.parquet --output predictions.parquet
    scaleflow predict RUN_ID --input new.csv --output predictions.csv --keep id,town
    scaleflow predict RUN_ID --input 'days/*.parquet' --output predictions/ --resume
    scaleflow predict RUN_ID --input new.csv --output out.csv hardware=cpu hardware.logical_devices=2

The input is a CSV, TSV, Parquet, Feather or JSON lines file, a glob, or a folder. It is read in pieces, so it may be
larger than the memory. An output that ends in .parquet or .csv is one file. Another name, or one that ends in /, is a
folder of shards, part-00000.parquet and so on. If the command is stopped, finished shards stay, and --resume continues
after them.

Columns of the output: for classes `prediction`, `probability` and `probability_CLASS`, for numbers `prediction`. With
several outputs their names come first. The SavedModel computes on all GPUs of this machine, or on its CPU; overrides of
the config groups `hardware` and `strategy` choose other devices.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scaleflow.commands.frame import run_command
from scaleflow.commands.parser import CommandParser
from scaleflow.commands.tracked_run import add_run_id, answer_model, format_model_rows, make_one_process_plan
from scaleflow.config.compose import compose_config, resolve_config
from scaleflow.config.from_mlflow import RerunCommand, find_store_options, load_config
from scaleflow.config.hydra_errors import parse_overrides
from scaleflow.errors import ConfigError
from scaleflow.events import Event, Note
from scaleflow.interfaces import Plan, Tracking
from scaleflow.launcher.answer import ANSWER, FINISHED, write_error
from scaleflow.launcher.display import BarDisplay, Display, display_for
from scaleflow.launcher.named_runs import find_named_run, locate_run
from scaleflow.launcher.stop import catch_stop_signals
from scaleflow.tracking.tracked_runs import TrackedRun

if TYPE_CHECKING:
    from scaleflow.predict.columns import OutputColumns
    from scaleflow.predict.compute import DistributedModel
    from scaleflow.predict.output import Output
    from scaleflow.predict.source import Rows, TableSource

T = TypeVar("T")

#: The overrides that this command uses.
OVERRIDES = re.compile(
    r"strategy|hardware|tracking\.uri"
    r"|hardware\.(devices|logical_devices|memory_growth|memory_limit_mb|intra_op_threads|inter_op_threads|deterministic)"
)

#: Rows of a shard, if the user does not say it.
SHARD_ROWS = 1_000_000

#: The most rows, and the most batches, that are read and converted at once.
CHUNK_ROWS, CHUNK_BATCHES = 16_384, 16

#: Without a terminal, seconds between two lines about the progress.
LINE_SECONDS = 5.0


@dataclass(frozen=True)
class Task:
    """What is predicted.

    Attributes:
        source: the table.
        columns: of the table, for each input of the model.
        keep: columns that are copied to the output.
        missing: words that mean a missing value; None: text is taken as it is.
        predicted: the columns that the outputs become.
        schema: of the output.
        shard_rows: rows of a shard; None: one file.
    """

    source: TableSource
    columns: dict[str, list[str]]
    keep: Sequence[str]
    missing: Sequence[str] | None
    predicted: OutputColumns
    schema: Any
    shard_rows: int | None

    @property
    def read(self) -> list[str]:
        """The columns that are read."""
        return list(dict.fromkeys([*(name for names in self.columns.values() for name in names), *self.keep]))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 all predictions are written, 1 failed, 2 refused, 130 or 143 interrupted.
    """
    return run_command(predict_words, argv)


def predict_words(words: list[str]) -> int:
    typed = make_parser().parse_intermixed_args(words)
    with contextlib.closing(display_for()) as display:
        return predict(typed, display)


def make_parser() -> argparse.ArgumentParser:
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
        "--probabilities", action="store_true", help="a column for each class, even if there are more than 20"
    )
    parser.add_argument(
        "--batch-size",
        type=parse_positive,
        metavar="ROWS",
        help="rows that a device computes at once (default: 1024, fewer for large examples)",
    )
    parser.add_argument(
        "--shard-rows", type=parse_positive, metavar="ROWS", help=f"rows of a shard (default: {SHARD_ROWS:,})"
    )
    parser.add_argument("--resume", action="store_true", help="skip the finished shards of the output folder")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    return parser


def parse_positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 1")
    return int(text)


def predict(typed: argparse.Namespace, display: Display) -> int:
    """Checks the command, and computes and writes the predictions. Raises ConfigError before, RunError after."""
    plan = make_prediction_plan(typed)
    from scaleflow.predict.output import open_output
    from scaleflow.predict.source import find_files

    find_files(typed.input)
    output = open_output(typed.output, typed.overwrite, typed.resume)
    if typed.shard_rows and not output.is_folder:
        raise ConfigError(f"--shard-rows {typed.shard_rows}: is for a folder of shards; use --output FOLDER/")
    display.begin_stage("reading the run and its model from MLflow")
    options = find_store_options(RerunCommand(typed.run_id, typed.overrides))
    store, tracker, tracked = find_named_run(typed.run_id, options)
    from scaleflow.tracking.saved_models import describe_model, download_saved_model

    description = describe_model(tracker, tracked, store)
    task = make_task(typed, tracked, description, output)
    with output.lock(), tempfile.TemporaryDirectory(prefix="scaleflow-predict-") as folder:
        manifest = describe_task(typed, tracked, task)
        first = output.find_first(manifest, typed.resume)
        model_folder = download_saved_model(tracker, tracked, store, Path(folder))
        with catch_stop_signals() as stop:
            display.begin_stage("importing TensorFlow and loading the model")
            with hide_errors():
                model, devices, notes = load_model(plan, model_folder, typed.batch_size)
            display.end_stage()
            for note in notes:
                display.show_event(note)
            if not first:
                output.begin(manifest)
            began, skipped = time.monotonic(), output.count_rows(first)
            rows = write_predictions(
                task, model, output, first, Progress(display, task.source.count_rows()), stop.is_set
            )
            seconds = time.monotonic() - began
    values = {**answer_model(tracked), "output": str(output.path)}
    ANSWER.read = lambda: {**values, "rows": rows, "counts": {"there before": skipped}}
    if stop.is_set():
        done = f"; {output.count_finished()} shard(s) are whole, --resume continues" if output.is_folder else ""
        write_error(f"stopped by {stop.signal_name}{done}")
        return stop.exit_code
    display.print_summary(
        [
            *format_model_rows(tracked),
            ("on", devices),
            (
                "rows",
                f"{rows:,}{f', after {skipped:,} that were there' if skipped else ''}, {rows / seconds:,.0f} rows/s",
            ),
            ("output", str(output.path)),
        ]
    )
    return FINISHED


def make_prediction_plan(typed: argparse.Namespace) -> Plan:
    """Makes the plan that names the devices. Raises ConfigError for other options, several processes or a TPU."""
    locate_run(typed.run_id, Tracking())  # refuses another word before anything is imported
    for override in parse_overrides(typed.overrides):
        key = str(override.key_or_group)
        if override.is_sweep_override() or override.is_delete() or not OVERRIDES.fullmatch(key):
            raise ConfigError(
                f"{override.input_line}: this command takes one value each of hardware=..., its keys for devices and "
                "threads, strategy=... and tracking.uri=...; the model computes as it was saved"
            )
    composed = compose_config(typed.overrides)
    return make_one_process_plan(resolve_config(composed.config), composed, "predictions")


def make_task(typed: argparse.Namespace, tracked: TrackedRun, description: Any, output: Output) -> Task:
    """Opens the table and checks that the model can take it. Raises ConfigError if it cannot."""
    import pyarrow

    from scaleflow.predict.columns import OutputColumns, choose_columns
    from scaleflow.predict.output import check_schema
    from scaleflow.predict.source import open_table

    options = load_config(tracked.config, tracked.run_id).get("dataset")
    options = options if isinstance(options, dict) else {}
    delimiter, missing, target = (options.get(key) for key in ("delimiter", "missing", "target"))
    source = open_table(typed.input, typed.delimiter, delimiter if isinstance(delimiter, str) else ",")
    names = source.schema.names
    columns = choose_columns(
        description.inputs, source.schema, split_names(typed.columns), target if isinstance(target, str) else None
    )
    keep = names if typed.keep == "all" and "all" not in names else split_names(typed.keep)
    if absent := [name for name in keep if name not in names]:
        raise ConfigError(f"--keep {', '.join(absent)}: there is no such column; the table has {', '.join(names)}")
    kept = pyarrow.schema([pyarrow.field(name, plain_type(source.schema.field(name).type)) for name in keep])
    predicted = OutputColumns(description.outputs, typed.probabilities)
    is_words = isinstance(missing, list) and all(isinstance(word, str) for word in missing)
    return Task(
        source,
        columns,
        keep,
        missing if is_words else None,
        predicted,
        check_schema(output, kept, predicted.make_schema()),
        (typed.shard_rows or SHARD_ROWS) if output.is_folder else None,
    )


def split_names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def plain_type(type_: Any) -> Any:
    """Returns the type of a column without pyarrow's encoding, which the files of a table need not share."""
    from pyarrow import types

    return type_.value_type if types.is_dictionary(type_) else type_


def describe_task(typed: argparse.Namespace, tracked: TrackedRun, task: Task) -> dict[str, Any]:
    """Returns what has to be the same when a folder of shards is continued."""
    files = [Path(path) for path in task.source.files]
    return {
        "run": tracked.run_id,
        "model": tracked.model_id,
        "input": [[str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns] for path in files],
        "columns": task.columns,
        "output columns": [[field.name, str(field.type)] for field in task.schema],
        "delimiter": task.source.delimiter,
        "shard-rows": task.shard_rows,
    }


@contextlib.contextmanager
def hide_errors() -> Iterator[None]:
    """Hides what is written to standard error while the block lasts: TensorFlow's libraries log their start there."""
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


def load_model(plan: Plan, folder: Path, batch_size: int | None) -> tuple[DistributedModel, str, list[Note]]:
    """Sets up the devices and loads the model. Returns it, the devices in words, and notes about them."""
    from scaleflow.worker.build import setup_runtime
    from scaleflow.worker.keras_import import import_keras

    import_keras()
    events: list[Event] = []
    runtime = setup_runtime(plan, events.append)
    from scaleflow.predict.compute import DistributedModel

    try:
        model = DistributedModel(folder, runtime.strategy, batch_size)
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise ConfigError(f"the SavedModel of the run cannot be loaded: {reason[:300]}") from error
    replicas = len(runtime.devices)
    words = f"{replicas} {runtime.kind}{'s' if replicas > 1 else ''}, {model.batch_size:,} rows at once"
    return model, words, [event for event in events if isinstance(event, Note)]


def write_predictions(
    task: Task, model: DistributedModel, output: Output, first: int, progress: Progress, must_stop: Callable[[], bool]
) -> int:
    """Writes the shards from number `first`, and returns the number of their rows. Ends early if `must_stop` says so:
    the shard that is not whole is then left out.
    """
    rows = 0
    shards = itertools.groupby(read_ahead(read_chunks(task, model, first)), key=lambda chunk: chunk.shard)
    with contextlib.suppress(Interrupted), progress:
        progress.advance(first * (task.shard_rows or 0))
        for number, chunks in shards:
            with output.open_shard(number, task.schema) as writer:
                for chunk in chunks:
                    if must_stop():
                        raise Interrupted
                    predicted = task.predicted.convert(model.predict(chunk.inputs, chunk.rows))
                    writer.write_table(make_table(task, chunk.rows, predicted))
                    rows += chunk.count
                    progress.advance(chunk.count)
        if not rows and not first:  # a table without rows
            with output.open_shard(0, task.schema):
                pass
    return rows


@dataclass(frozen=True)
class Chunk:
    """Rows that are computed together.

    Attributes:
        shard: the number of the shard that they belong to.
        rows: the rows, with the columns that are read.
        inputs: of the model, by name.
    """

    shard: int
    rows: Sequence[Rows]
    inputs: dict[str, Any]

    @property
    def count(self) -> int:
        return sum(len(piece.table) for piece in self.rows)


class Interrupted(Exception):
    """A signal has asked for the end."""


def read_chunks(task: Task, model: DistributedModel, first: int) -> Iterator[Chunk]:
    """Yields the rows of the shards from number `first`, converted for the model."""
    from scaleflow.predict.compute import convert_inputs
    from scaleflow.predict.source import take_chunks

    largest = model.batch_size * max(1, min(CHUNK_BATCHES, CHUNK_ROWS // model.batch_size))
    rows = task.source.read(task.read, largest, skip=first * (task.shard_rows or 0))
    places = divide_shards(first, largest, task.shard_rows)
    for (shard, _), chunk in take_chunks(rows, places):
        yield Chunk(shard, chunk, convert_inputs(model.inputs, task.columns, chunk, task.missing))


def divide_shards(first: int, largest: int, shard_rows: int | None) -> Iterator[tuple[int, int]]:
    """Yields the shard and the number of rows of each chunk, without an end."""
    for shard in itertools.count(first):
        left = shard_rows or sys.maxsize
        while left:
            yield shard, min(left, largest)
            left -= min(left, largest)


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields the items, while a thread makes the next one."""
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(next, items, None)
        while (item := ahead.result()) is not None:
            ahead = pool.submit(next, items, None)
            yield item


def make_table(task: Task, rows: Sequence[Rows], predicted: dict[str, Any]) -> Any:
    """Returns the kept columns and the predictions of some rows."""
    import pyarrow

    kept = pyarrow.schema([task.schema.field(name) for name in task.keep])
    pieces = [piece.table.select(list(task.keep)).cast(kept) for piece in rows]
    table = pyarrow.concat_tables(pieces)
    arrays = [*table.columns, *predicted.values()]
    return pyarrow.Table.from_arrays(arrays, schema=task.schema)


class Progress:
    """Shows how many rows are predicted: a bar on a terminal, a line now and then elsewhere.

    Args:
        display: prints the lines.
        total: the number of rows; None if it is not known.
    """

    def __init__(self, display: Display, total: int | None) -> None:
        self._display = display
        self._total = total
        self._rows = 0
        self._bar: Any = None
        self._task: Any = None
        self._printed_at = time.monotonic()

    def __enter__(self) -> Progress:
        if isinstance(self._display, BarDisplay):
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, transient=True)
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, rows: int) -> None:
        self._rows += rows
        if self._bar is not None:
            self._bar.update(self._task, completed=self._rows)
        elif time.monotonic() - self._printed_at >= LINE_SECONDS:
            total = "" if self._total is None else f" of {self._total:,}"
            self._display.print_line(f"{self._rows:,}{total} rows")
            self._printed_at = time.monotonic()
