"""Makes the report of kept predictions: a self-contained HTML page, with its tables and charts as files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from scaleflow.evaluation.analysis import Analysis
from scaleflow.evaluation.collector import EXAMPLE
from scaleflow.evaluation.outputs import OutputAnalysis
from scaleflow.evaluation.predictions import Predictions
from scaleflow.features.report.curves import draw_learning_curves
from scaleflow.features.report.feature import ReportOptions
from scaleflow.features.report.findings import Finding, KnownOfRun, find_all, judge_group_count
from scaleflow.features.report.mistakes import (
    MAX_SHOWN,
    MISTAKES,
    add_inputs,
    describe_rest,
    list_mistakes,
    show_mattered,
    show_mistakes,
)
from scaleflow.features.report.names import FINDINGS, REPORT
from scaleflow.features.report.slices import find_slices
from scaleflow.interfaces import EvaluationOptions
from scaleflow.interfaces.estimate import Estimate
from scaleflow.interfaces.formatting import to_json
from scaleflow.interfaces.hooks import ExampleReader, KeptPredictions
from scaleflow.pages.charts import draw_rates, to_file
from scaleflow.pages.files import to_csv, write_files
from scaleflow.pages.html import compose_section, make_charts, make_findings, make_page, make_table
from scaleflow.runs import RunFolder

#: Maximum number of examples (the first ones) whose inputs are read to divide them into slices.
MAX_READ = 100_000

#: Tables, in addition to the mistakes.
PER_CLASS = "per_class.csv"
SLICES = "slices.csv"
IMPORTANCE = "importance.csv"

#: Contact sheet of mistakes, and folder of charts.
PICTURES = "mistakes.png"
CHARTS = "charts"

Row = dict[str, Any]


@dataclass(frozen=True)
class ModelReport:
    """The result of making a report."""

    findings: Sequence[Finding]  # the most important first
    files: Sequence[Path]  # all files written, relative to the folder


def make_report(kept: KeptPredictions, known: KnownOfRun, more: Sequence[str] = ()) -> ModelReport:
    """Makes the report in the evaluation's folder.

    Args:
        known: further facts about the run.
        more: HTML sections to add at the end.

    Raises OSError if a file cannot be written, and errors from computing the analysis.
    """
    predictions = kept.predictions
    analysis = kept.analyse()
    options = kept.plan.evaluation
    most = kept.plan.of(ReportOptions).worst
    slices = list_slices(predictions, analysis.outputs, kept.reader, count=options.intervals)
    mistakes: list[Row] = []
    classes: list[Row] = []
    for output in analysis.outputs:
        mistakes += list_mistakes(predictions, output, most)
        classes += [{"output": output.name, **row} for row in output.classes]
    pictures = add_inputs(mistakes, kept.reader)
    findings = list_findings(predictions, analysis, slices, known, is_calibrated=bool(options.calibrate))
    curves = draw_learning_curves(known.curves, known.curve_unit)
    tables: dict[str, Sequence[Mapping[str, Any]]] = {
        PER_CLASS: classes,
        SLICES: slices,
        IMPORTANCE: known.columns,
        MISTAKES: mistakes,
    }
    contents: dict[str, str | bytes] = {name: to_csv(rows) for name, rows in tables.items() if rows}
    for output in analysis.outputs:
        for drawing in output.drawings:
            contents[f"{CHARTS}/{add_prefix(output, drawing.name)}.svg"] = to_file(drawing.svg)
    for drawing in curves:
        contents[f"{CHARTS}/{drawing.name}.svg"] = to_file(drawing.svg)
    if pictures is not None:
        contents[PICTURES] = pictures
    findings_as_dicts = [asdict(finding) for finding in findings]
    contents[FINDINGS] = json.dumps(to_json(findings_as_dicts), indent=1) + "\n"
    sections = [
        make_findings(findings),
        *[make_output_sections(output) for output in analysis.outputs],
        compose_section("Learning curves", make_charts(curves) if curves else ""),
        compose_section("Slices, the weakest first", make_table(show_slices(slices)), describe_rest(slices, SLICES)),
        compose_section("What the model uses", show_importance(known.columns)),
        compose_section("Mistakes, the worst first", *show_mistakes(mistakes, pictures)),
        compose_section("What mattered in them", show_mattered(known.mattered, kept.reader)),
        *more,
    ]
    contents[REPORT] = make_page(kept.title, describe_examples(predictions, analysis.outputs, options), sections)
    write_files(RunFolder(kept.folder).evaluation, contents)
    return ModelReport(findings, [Path(name) for name in contents])


def list_findings(
    predictions: Predictions, analysis: Analysis, slices: Sequence[Row], known: KnownOfRun, is_calibrated: bool
) -> list[Finding]:
    """Returns all findings, the most important first."""
    findings = [Finding("metric", f"{name} is missing: {why}", "") for name, why in analysis.missing.items()]
    findings += judge_group_count(predictions.units)
    findings += find_all(analysis.outputs, slices, known, is_calibrated=is_calibrated)
    return findings


def list_slices(
    predictions: Predictions, outputs: Sequence[OutputAnalysis], reader: ExampleReader, count: int
) -> list[Row]:
    """Returns the slices of all outputs, the weak ones first. With `count` 0 they have no intervals."""
    read = np.arange(min(len(predictions.table), MAX_READ))
    columns = reader.read_columns(predictions.column(EXAMPLE)[read])
    sliced = [name_measure_at_threshold(output) for output in outputs]
    for output in outputs:
        if len(output.facts.get("covered", ())):
            sliced.append(take_coverage(output))
    slices: list[Row] = []
    for output in sliced:
        slices += find_slices(predictions, output, columns, read=read, count=count)
    return sorted(slices, key=lambda row: not row["is_weak"])


def name_measure_at_threshold(output: OutputAnalysis) -> OutputAnalysis:
    """Renames the measure of an analysis to `..._at_threshold` if a threshold was chosen."""
    name = f"{output.measure}_at_threshold"
    if name in output.estimates:
        return replace(output, measure=name)
    return output


def take_coverage(output: OutputAnalysis) -> OutputAnalysis:
    """Returns an analysis of how often intervals or sets contain the target."""
    return replace(output, scores=output.facts["covered"], measure="coverage")


def describe_examples(predictions: Predictions, outputs: Sequence[OutputAnalysis], options: EvaluationOptions) -> str:
    """Returns a line that says which examples the numbers cover."""
    kept = f"{len(predictions.table):,}"
    which = f"all {kept}"
    if predictions.is_sample:
        which = f"a fixed sample of {kept} of the {predictions.examples:,}"
    weighted = ", weighted" if predictions.weights() is not None else ""
    line = f"The figures are of {which} examples of the {predictions.split} split{weighted}."
    for output in outputs:
        if len(output.rows) < len(predictions.table):
            label = f"{output.name}: " if output.name else ""
            line += f" {label}{len(output.rows):,} of them have a target and an output to compare with it."
    if options.intervals:
        over = f" over {predictions.units.describe()}" if predictions.units else ""
        line += f" In brackets: 95 % intervals{over}."
    return line


def add_prefix(output: OutputAnalysis, name: str) -> str:
    return f"{output.name}_{name}" if output.name else name


def make_output_sections(output: OutputAnalysis) -> str:
    """Returns the sections of one output: metrics and charts."""
    label = f"{output.name}: " if output.name else ""
    estimates = [{"metric": name, "value": estimate} for name, estimate in output.estimates.items()]
    tables = {
        "": estimates,
        "Confused most often": output.facts.get("confused", []),
        "Quantiles of the absolute error": output.facts.get("quantiles", []),
        f"Thresholds of the probability of {output.facts.get('positive')}": output.facts.get("thresholds", []),
    }
    metrics = ""
    for title, rows in tables.items():
        if rows:
            metrics += f"<div><h3>{escape(title)}</h3>{make_table(rows)}</div>"
    classes = output.classes
    if any("f1" in row for row in classes):
        classes = sorted(classes, key=lambda row: float(row["f1"].value))
    table = f"<h3>One by one, the weakest first</h3>{make_table(classes)}" if classes else ""
    sections = compose_section(f"{label}Metrics", f'<div class="side">{metrics}</div>')
    return sections + compose_section(f"{label}Charts", make_charts(output.drawings), table)


def show_importance(columns: Sequence[Mapping[str, Any]]) -> str:
    """Returns the importance of columns as bars, and how well each predicts alone; empty if none was measured."""
    shown = [row for row in columns if not math.isnan(row["importance"].value)][:MAX_SHOWN]
    if not shown:
        return ""
    names = [row["column"] for row in shown]
    estimates = [row["importance"] for row in shown]
    limit = 1e-9
    for estimate in estimates:
        limit = max(limit, estimate.high, estimate.value)
    bars = draw_rates("importance", names, estimates, limit=limit)
    rows = []
    for row in columns[:MAX_SHOWN]:
        rows.append({"column": row["column"], "alone": row.get("alone"), "used": not row["is_useless"]})
    measure = shown[0]["measure"]
    about = f"How much the {measure} grows if a column is shuffled; and how good a model of that column alone is."
    return f'<p class="faint">{about}</p><div class="side"><div>{bars}</div>{make_table(rows)}</div>'


def show_slices(slices: Sequence[Row]) -> list[Row]:
    """Returns the first slices as rows of the page."""
    shown = []
    for row in slices[:MAX_SHOWN]:
        line = {name: row[name] for name in ("output", "column", "slice", "examples", "share", "metric")}
        line["value"] = Estimate(row["value"], row["low"], row["high"])
        line["difference"] = row["difference"]
        line["weak"] = row["is_weak"] or None
        shown.append(line)
    return shown
