"""Describes a run in the store, in Markdown: its result, how to load its model and resume it, and its command."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence

import yaml

from scaleflow.config.words import quote_override
from scaleflow.interfaces import name_command
from scaleflow.interfaces.features import find_untrained_runs, list_compared_models, report_problems
from scaleflow.interfaces.formatting import format_number
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.provenance.tags import read_run_tags
from scaleflow.tracking.uri import format_loading

#: MLflow's maximum length of a description, in characters.
MAX_LENGTH = 8000

#: Maximum length of a command, and of the reason for an end, in characters.
MAX_PART = 2000

#: Maximum number of metrics in the table of results, and in the first line.
MAX_METRICS = 20
MAX_NAMED = 3

#: The space between two columns of a table.
SPACE = "&emsp;"

#: The number of lines of a table before its first row.
HEAD_LINES = 2

BASELINE_NOTE = "The baseline is the best constant prediction: the most frequent class, or the mean."

LEFT_OUT = "*The rest is omitted: MLflow accepts at most 8,000 characters.*"


def describe_run(files: RunFolder, state: RunState, store: str, model_uri: str | None) -> str:
    """Returns the description of a run.

    Args:
        model_uri: the URI of the model that the run has logged; None without a model.
    """
    trains = find_untrained_runs(state.params) is None
    parts = [  # MLflow's UI shows the first few lines, and the others after a click
        describe_status(state),
        describe_length(state),
        describe_loading(store, model_uri),
        describe_resuming(files, state) if trains else "",
        format_results(state) if trains else "",
        *format_variants(state),
        describe_command(files),
    ]
    return join_parts(parts)


def format_variants(state: RunState) -> list[str]:
    """Returns a table of the model's variants for each kind."""
    tables: list[str] = []
    for kind in dict.fromkeys(kind for kind, _ in state.model.variants):
        with report_problems(kind, "the table of its variants of the model is left out"):
            described = [variant.describe() for variant in state.model.variants.values() if variant.event == kind]
            measures: list[str] = []
            for _, values in described:
                measures += [name for name in values if name not in measures]
            rows = [[kind, *measures]]
            for label, values in described:
                rows.append([label, *(format_optional(values.get(measure)) for measure in measures)])
            tables.append(format_table(rows))
    return tables


def describe_loading(store: str | None, model_uri: str | None, model: str = "the model") -> str:
    """Returns Python code that loads a model; empty if the store has no model."""
    if store is None or model_uri is None:
        return ""
    loading = "\n".join(format_loading(store, model_uri))
    return f"Load {model}:\n\n{format_code_block('python', loading)}"


def describe_command(files: RunFolder) -> str:
    """Returns the command, and the overrides that it does not contain, as in a sweep or a script."""
    command = read_run_tags(files.path).get("scaleflow.command", "")
    typed = {simplify_word(word) for word in split_words(command)}
    overrides = [word for word in read_overrides(files) if simplify_word(word) not in typed]
    parts = []
    if command:
        parts += ["The command:", format_code_block("sh", cut_text(command, "the tag scaleflow.command"))]
    if overrides:
        words = cut_text(shlex.join(overrides), f"the file {files.overrides.name}")
        parts += ["This run's overrides:", format_code_block("sh", words)]
    return "\n\n".join(parts)


def split_words(command: str) -> list[str]:
    """Splits a command line, which may have been cut, into words."""
    try:
        return shlex.split(command)
    except ValueError:  # the command was cut inside quotes
        return command.split()


def simplify_word(word: str) -> str:
    """Removes the quotes and backslashes of a word: Hydra's sweepers quote overrides differently."""
    return re.sub(r"['\"\\]", "", word)


def read_overrides(files: RunFolder) -> list[str]:
    """Returns the overrides in a run's folder; empty if they cannot be read."""
    try:
        words = yaml.safe_load(files.overrides.read_text())
    except (OSError, yaml.YAMLError):
        return []
    if not isinstance(words, list):
        return []
    return [str(word) for word in words]


def describe_status(state: RunState) -> str:
    """Returns the first line: how the run ended, and its most important results."""
    if state.status is None:
        return "**RUNNING.** The results follow when the run ends."
    if state.status == "FINISHED" and state.result is not None:
        text = ""
        with report_problems(state.result.event, "the description of its result is left out"):
            text = state.result.describe()
        return f"**FINISHED.** {text}".strip()
    if state.status == "FINISHED":
        first = list(state.results.items())[:MAX_NAMED]
        line = f"**FINISHED** after {state.step} steps"
        results = ", ".join(f"{name.replace('/', ' ')} {format_number(value)}" for name, value in first)
        return f"{line}: {results}." if results else f"{line}."
    reason = format_code_block("text", cut_text(state.error, "the tag scaleflow.error"))
    return f"**{state.status}** at step {state.step}:\n\n{reason}"


def describe_length(state: RunState) -> str:
    """Describes the length that a resume set; empty if the params have the current length."""
    words = [f"{key}={json.dumps(value)}" for key, value in state.resumed_length.items()]
    if not words:
        return ""
    return f"Resumed with `{' '.join(words)}`: the params have the length with which the run began."


def format_results(state: RunState) -> str:
    """Returns a table of the last metrics with their baselines: of test and validation, otherwise of training."""
    values = state.metrics_of("test") | state.metrics_of("val") or state.metrics_of("train")
    if not values:
        return ""
    compared = list_compared_models()
    columns: dict[str, Mapping[str, float | None]] = {"baseline": state.baseline}
    for model in compared:
        columns[model] = {name: state.find_fitted_baselines(name).get(model) for name in values}
    for title, column in list(columns.items()):
        if all(column.get(name) is None for name in values):
            del columns[title]
    rows = [["metric", "value", *columns]]
    for name, value in values.items():
        baselines = [format_optional(column.get(name)) for column in columns.values()]
        rows.append([name, format_number(value), *baselines])
    parts = [format_table(pad_cells(rows[: MAX_METRICS + 1]))]
    if len(values) > MAX_METRICS:
        parts.append(f"and {len(values) - MAX_METRICS} more metrics")
    note = BASELINE_NOTE if "baseline" in columns else ""
    if not compared.keys().isdisjoint(columns):
        note += f" {describe_compared(compared, state)}"
    if note:
        parts.append(note)
    return "\n\n".join(parts)


def describe_compared(compared: Mapping[str, str], state: RunState) -> str:
    """Returns a sentence about the models that features fitted for comparison, and their training rows."""
    text = ", ".join(f"{model} {about}" for model, about in compared.items())
    rows = f"{state.fitted_rows:,} of these rows" if state.fitted_rows else "the same rows"
    return f"{text[:1].upper()}{text[1:]}, fitted to {rows}."


def format_optional(value: float | None) -> str:
    return "" if value is None else format_number(value)


def describe_resuming(files: RunFolder, state: RunState) -> str:
    """Returns the command that resumes a run, or that trains a finished run longer."""
    words = f"{name_command()} {quote_override('resume', files.path)}"
    host = read_run_tags(files.path).get("scaleflow.host")
    where = "in the folder of the command below"
    if host:
        where += f", on {host}"
    if state.status == "FINISHED":
        if state.checkpoint is None:
            return ""
        longer = f"{words} {shlex.quote(lengthen_training(state))}"
        return f"Train it longer, {where}:\n\n{format_code_block('sh', longer)}"
    start = f"from step {state.checkpoint}" if state.checkpoint else "from its newest checkpoint, or from the beginning"
    lead = "If it is interrupted, resume it" if state.status is None else "Resume it"
    return f"{lead} {start}, {where}:\n\n{format_code_block('sh', words)}"


def lengthen_training(state: RunState) -> str:
    """Returns the override that doubles the current length of a finished run."""
    steps = state.length.get("max_steps", 0)
    epochs = state.length.get("epochs", 0)
    limit = state.resumed_length.get("training.max_steps", state.params.get("training.max_steps"))
    if str(limit) == str(steps):
        return f"training.max_steps={2 * steps}"
    return f"training.epochs={2 * epochs}"


# Markdown ------------------------------------------------------------------------------------


def format_code_block(language: str, text: str) -> str:
    """Returns a fenced code block. Its fence is longer than any fence in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def pad_cells(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Adds space to the widest cells of each column, because MLflow's UI puts none between columns."""
    widths = [len(max(column, key=len)) for column in zip(*rows, strict=True)]
    padded = []
    for row in rows:
        cells = []
        for cell, width in zip(row, widths, strict=True):
            is_wide = len(cell) > width - 3
            cells.append(cell + SPACE if is_wide else cell)
        padded.append(cells)
    return padded


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table. The first row is the head."""
    lines = []
    for row in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, f"|{'---|' * len(rows[0])}")
    return "\n".join(lines)


def format_long_table(rows: Sequence[Sequence[str]], longest: int, more: str, total: int | None = None) -> str:
    """Returns the first rows of a table with wide columns, as many as fit into `longest` characters.

    Args:
        more: the line with the number of rows that are left out.
        total: the number of rows without the head; None: all rows are passed.
    """
    lines = format_table(pad_cells(rows)).split("\n")
    missing = (len(rows) - 1 if total is None else total) + HEAD_LINES - len(lines)
    size = sum(len(line) + 1 for line in lines) + len(more.format(len(rows))) + 2
    while size > longest and len(lines) > HEAD_LINES:
        last = lines.pop()
        size -= len(last) + 1
        missing += 1
    if missing:
        lines += ["", more.format(missing)]
    return "\n".join(lines)


def cut_text(text: str, source: str) -> str:
    """Cuts a long text, and appends where the rest is."""
    if len(text) <= MAX_PART:
        return text
    end = f"... (cut; {source} has more)"
    return text[: MAX_PART - len(end)] + end


def join_parts(parts: Sequence[str]) -> str:
    """Joins the parts that are not empty, up to MLflow's limit. A part that does not fit ends the text."""
    text = ""
    room = MAX_LENGTH - len(LEFT_OUT) - 2
    for part in parts:
        if not part:
            continue
        if len(text) + len(part) + 2 > room:
            return f"{text}\n\n{LEFT_OUT}".strip()
        text = f"{text}\n\n{part}".strip()
    return text
