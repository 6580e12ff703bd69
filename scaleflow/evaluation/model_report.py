"""Makes the report of a split's predictions: one HTML page that loads nothing, and its tables and charts as files.

It shows how the metrics and the learning rate went, the worst mistakes, and the labels that are probably wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scaleflow.evaluation import FINDINGS, REPORT
from scaleflow.evaluation.collector import EXAMPLE
from scaleflow.evaluation.findings import Finding, KnownOfRun, find_all, judge_units
from scaleflow.evaluation.outputs import OutputAnalysis, analyse_output
from scaleflow.evaluation.own_metrics import Metrics, measure_own
from scaleflow.evaluation.predictions import FILE, ID, ROW, Predictions, name_column
from scaleflow.evaluation.slices import find_slices
from scaleflow.interfaces import EvaluationOptions, name_leaves, name_metric
from scaleflow.interfaces.figure import Figure
from scaleflow.interfaces.formatting import OF_STEPS, format_number, to_json
from scaleflow.pages.charts import Chart, Drawing, draw_rates, to_file
from scaleflow.pages.files import to_csv, write_files
from scaleflow.pages.html import compose_section, make_charts, make_findings, make_page, make_table, shorten_value
from scaleflow.pages.pictures import IN_A_ROW, SIDE, draw_sheet, to_data_address

#: The most metrics that are drawn.
MOST_METRICS = 4

Points = Sequence[tuple[float, float]]


def draw_learning_curves(curves: Mapping[str, Points], unit: str) -> list[Drawing]:
    """Draws the metrics of training and validation, the loss first, and the learning rate and the gradients' norm.

    Args:
        curves: points by the name of the metric: `train/loss`, `val/loss`, `train/learning_rate`.
        unit: what their first numbers count.
    """
    metrics = [name.removeprefix("train/") for name in curves if name.startswith("train/") and name not in OF_STEPS]
    metrics.sort(key=lambda name: (name != "loss", f"val/{name}" not in curves))
    drawings = []
    for metric in metrics[:MOST_METRICS]:
        parts = {"training": curves[f"train/{metric}"], "validation": curves.get(f"val/{metric}", ())}
        drawing = draw_lines(metric, {name: points for name, points in parts.items() if points}, unit)
        drawings += [drawing] if drawing else []
    of_steps = [draw_lines(title, {"": curves.get(name, ())}, unit) for name, title in OF_STEPS.items()]
    return [*drawings, *filter(None, of_steps)]


def draw_lines(title: str, lines: Mapping[str, Points], unit: str) -> Drawing | None:
    """Draws lines by name, the second one dashed; None if one of them has less than two points."""
    known = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in lines.items()}
    if any(len(points) < 2 for points in known.values()):
        return None
    x, y = ([point[axis] for points in known.values() for point in points] for axis in (0, 1))
    chart = Chart(title, (min(x), max(x)), (min(y), max(y)), labels=(unit, title))
    texts = []
    for kind, (name, points) in zip(("line", "line other"), known.items(), strict=False):
        chart.add_line([x for x, _ in points], [y for _, y in points], kind)
        if name:
            dashes = ", dashed" if kind != "line" else ""
            texts.append(f"{name}{dashes}: {format_number(points[-1][1])} at the end")
    caption = "; ".join(texts).capitalize()
    return Drawing(f"curve_{title.replace(' ', '_').replace('/', '_')}", title, chart.to_svg(), caption=caption)


Array = np.ndarray[Any, Any]


class InputReader(Protocol):
    """Reads the raw inputs of examples, given by their ascending indices in the split: [n] int64."""

    def read_columns(self, examples: Array) -> Mapping[str, Array]:
        """Returns the inputs with one value each, and the columns of `evaluation.slices`, by name: [n]."""

    def read_pictures(self, examples: Array) -> Array | None:
        """Returns pictures [n, height, width, channels] uint8; None if no input is a picture."""


def list_mistakes(predictions: Predictions, analysis: OutputAnalysis, most: int) -> list[Row]:
    """Returns a row for each of the worst mistakes, and of the labels that are probably wrong, which come first."""
    suspects = analysis.suspects[:most]
    places = [*suspects, *[place for place in analysis.worst[:most] if place not in set(suspects.tolist())]]
    columns = [name for name in (EXAMPLE, FILE, ROW, ID) if predictions.has(name)]
    kept = predictions.table.take(analysis.rows[np.array(places, np.int64)])
    shown = [name for name in kept.column_names if is_shown(name, analysis.name, predictions)]
    rows = []
    for n, values in enumerate(kept.select([*columns, *shown]).to_pylist()):
        prefix = f"{analysis.name}_" if analysis.name else ""
        row = {"output": analysis.name, **{name.removeprefix(prefix): value for name, value in values.items()}}
        if analysis.is_error:
            row["error"] = float(analysis.scores[places[n]])
        rows.append({**row, "suspected_label": True if n < len(suspects) else None})
    return rows


def is_shown(name: str, output: str, predictions: Predictions) -> bool:
    """Returns whether a column of an output is shown with its mistakes: not the probabilities of all classes."""
    start = name_column(output, "")
    if not name.startswith(start) or (not output and name in (EXAMPLE, FILE, ROW, ID)):
        return False
    rest = name.removeprefix(start)
    kinds = ("prediction", "probability", "loss", "correct", "mean_error", "positions", "target", "target_probability")
    return rest in kinds or (rest.startswith(("target_", "prediction_")) and rest != "target_rank")


def add_inputs(rows: Sequence[Row], reader: InputReader) -> bytes | None:
    """Adds raw inputs with one value to rows. Returns a contact sheet of their pictures, PNG; None without any."""
    if not rows:
        return None
    examples = np.unique([row[EXAMPLE] for row in rows])
    columns = reader.read_columns(examples)
    at = {int(example): n for n, example in enumerate(examples)}
    for row in rows:
        row |= {name: shorten_value(values[at[row[EXAMPLE]]]) for name, values in columns.items() if name not in row}
    pictures = reader.read_pictures(examples)
    if pictures is None:
        return None
    for n, row in enumerate(rows):
        row["picture"] = n
    return draw_sheet([pictures[at[row[EXAMPLE]]] for row in rows])


def dim_pictures(pictures: Array, grids: Sequence[Array]) -> list[Array]:
    """Returns pictures whose parts are the darker, the less they mattered."""
    dimmed = []
    for picture, grid in zip(pictures, grids, strict=True):
        places = [np.arange(side) * len(grid) // side for side in picture.shape[:2]]
        factors = 0.15 + 0.85 * grid[places[0]][:, places[1]]
        dimmed.append((picture * factors[..., None]).astype(np.uint8))
    return dimmed


#: The most examples whose inputs are read to divide them into slices: of more, the first ones that are kept.
MOST_READ = 100_000

#: The most rows of a table in the page; the files have all.
MOST_SHOWN = 40

#: The files.
METRICS, PER_CLASS, SLICES, IMPORTANCE, MISTAKES = (
    "metrics.json",
    "per_class.csv",
    "slices.csv",
    "importance.csv",
    "mistakes.csv",
)
PICTURES, CHARTS = "mistakes.png", "charts"

#: What stands below the picture of a mistake.
SAID = ("target", "prediction", "probability", "error", "correct", "loss")

Row = dict[str, Any]


@dataclass(frozen=True)
class ModelReport:
    """What was made of predictions."""

    figures: Mapping[str, Figure]  # of all examples, by name: `accuracy`, or `price/mae` with several outputs
    findings: Sequence[Finding]  # the most important first
    files: Sequence[Path]  # all files that were written, relative to the folder
    own: Sequence[str] = ()  # the names of those figures that are metrics of the run, and that training has not


def make_report(
    predictions: Predictions,
    options: EvaluationOptions,
    context: KnownOfRun | None,
    reader: InputReader,
    folder: Path,
    title: str,
    metrics: Metrics | None = None,
) -> ModelReport:
    """Makes the report in a folder.

    Args:
        context: what is known of the run besides; None: nothing.
        reader: reads the inputs of examples.
        metrics: those that the user names, `evaluation.metrics`.

    Raises OSError if a file cannot be written.
    """
    context = context or KnownOfRun()
    analyses = [
        analyse_output(predictions, name, described, interval_count=options.intervals, costs=options.costs)
        for name, described in name_leaves(predictions.outputs).items()
    ]
    own, missing = add_own_figures(predictions, analyses, metrics or {}, seconds=options.seconds)
    slices = list_slices(predictions, analyses, reader, count=options.intervals)
    mistakes = [row for each in analyses for row in list_mistakes(predictions, each, options.worst)]
    pictures = add_inputs(mistakes, reader)
    findings = [
        *missing,
        *judge_units(predictions.units),
        *find_all(analyses, slices, context, is_calibrated=bool(options.calibrate)),
    ]
    curves = draw_learning_curves(context.curves, context.curve_unit)
    figures = {name_metric(each.name, name): figure for each in analyses for name, figure in each.figures.items()}
    tables: dict[str, Sequence[Mapping[str, Any]]] = {
        PER_CLASS: [{"output": each.name, **row} for each in analyses for row in each.classes],
        SLICES: slices,
        IMPORTANCE: context.columns,
        MISTAKES: mistakes,
    }
    contents: dict[str, str | bytes] = {name: to_csv(rows) for name, rows in tables.items() if rows}
    contents |= {f"{CHARTS}/{add_name(each, d.name)}.svg": to_file(d.svg) for each in analyses for d in each.drawings}
    contents |= {f"{CHARTS}/{each.name}.svg": to_file(each.svg) for each in curves}
    contents |= {} if pictures is None else {PICTURES: pictures}
    contents[FINDINGS] = json.dumps(to_json([asdict(each) for each in findings]), indent=1) + "\n"
    contents[METRICS] = json.dumps(to_json(describe_metrics(predictions, analyses, options)), indent=1) + "\n"
    sections = [
        make_findings(findings),
        *(make_output_sections(each) for each in analyses),
        compose_section("Learning curves", make_charts(curves) if curves else ""),
        compose_section("Slices, the weakest first", make_table(show_slices(slices)), tell_more(slices, SLICES)),
        compose_section("What the model uses", show_importance(context.columns)),
        compose_section("Mistakes, the worst first", *show_mistakes(mistakes, pictures)),
        compose_section("What mattered in them", show_mattered(context.mattered, reader)),
    ]
    contents[REPORT] = make_page(title, describe_examples_of(predictions, analyses, options), sections)
    write_files(folder, contents)
    ends = "_at_threshold", "coverage", "set_size", "pinball"
    own += [name for name in figures if name.endswith(ends) and name not in own]
    for each in analyses:
        if each.facts.get("is_rare"):
            own += [name_metric(each.name, name) for name in ("roc_auc", "average_precision")]
    return ModelReport(figures, findings, [Path(name) for name in contents], own=own)


def list_slices(
    predictions: Predictions, analyses: Sequence[OutputAnalysis], reader: InputReader, count: int
) -> list[Row]:
    """Returns the slices of all outputs, the weak ones first; with a `count` of 0 without intervals."""
    read = np.arange(min(len(predictions.table), MOST_READ))
    columns = reader.read_columns(predictions.column(EXAMPLE)[read])
    sliced = [*map(name_decided, analyses), *filter(None, map(of_coverage, analyses))]
    slices = [row for each in sliced for row in find_slices(predictions, each, columns, read=read, count=count)]
    return sorted(slices, key=lambda row: not row["is_weak"])


def add_own_figures(
    predictions: Predictions, analyses: Sequence[OutputAnalysis], metrics: Metrics, seconds: float
) -> tuple[list[str], list[Finding]]:
    """Adds the user's metrics to the figures; returns their names, and a finding for each that is missing."""
    outputs, own, missing = name_leaves(predictions.outputs), list[str](), list[Finding]()
    for each in analyses if metrics else ():
        found, faults = measure_own(predictions, each.name, outputs[each.name], metrics=metrics, seconds=seconds)
        faults |= dict.fromkeys(found.keys() & each.figures.keys(), "the report has a figure of this name; use another")
        added = {
            name: find_same(metrics[name], figure, each) or figure
            for name, figure in found.items()
            if name not in faults
        }
        each.figures.update(added)
        own += [name_metric(each.name, name) for name in added]
        missing += [
            Finding("metric", f"{name_metric(each.name, n)} is missing: {why}", "") for n, why in faults.items()
        ]
    return own, missing


#: The figures of a report that functions of scikit-learn compute, too.
SAME_FIGURES = {
    "accuracy_score": "accuracy",
    "balanced_accuracy_score": "balanced_accuracy",
    "roc_auc_score": "roc_auc",
    "average_precision_score": "average_precision",
    "precision_score": "precision",
    "recall_score": "recall",
    "f1_score": "f1",
    "log_loss": "log_loss",
    "mean_absolute_error": "mae",
    "root_mean_squared_error": "rmse",
    "r2_score": "r2",
}


def find_same(metric: Callable[..., Any], found: Figure, analysis: OutputAnalysis) -> Figure | None:
    """Returns the figure of the report that a metric of scikit-learn computes again, so that it has one interval."""
    function = getattr(metric, "func", metric)
    if not str(getattr(function, "__module__", "")).startswith("sklearn."):
        return None
    name = SAME_FIGURES.get(str(getattr(function, "__name__", "")), "")
    figures = [analysis.figures.get(name), analysis.figures.get(f"{name}_at_threshold")]
    if len(analysis.classes) == 2:
        figures.append(analysis.classes[1].get(name))
    for figure in figures:
        if figure is not None and math.isclose(figure.value, found.value, rel_tol=1e-6, abs_tol=1e-9):
            return figure
    return None


def name_decided(analysis: OutputAnalysis) -> OutputAnalysis:
    """Returns an analysis whose measure has the name of its figure: at a threshold, if one was chosen."""
    name = f"{analysis.measure}_at_threshold"
    return replace(analysis, measure=name) if name in analysis.figures else analysis


def of_coverage(analysis: OutputAnalysis) -> OutputAnalysis | None:
    """Returns an analysis of how often intervals, or sets, hold the target; None if there are none."""
    covered = analysis.facts.get("covered", ())
    return replace(analysis, scores=covered, measure="coverage") if len(covered) else None


def describe_examples_of(
    predictions: Predictions, analyses: Sequence[OutputAnalysis], options: EvaluationOptions
) -> str:
    """Returns a line that says what the figures are of."""
    kept, whole = f"{len(predictions.table):,}", f"{predictions.examples:,}"
    of = f"a fixed sample of {kept} of the {whole}" if predictions.is_sample else f"all {kept}"
    weighted = ", weighted" if predictions.weights() is not None else ""
    over = f" over {predictions.units.describe()}" if predictions.units else ""
    interval = f" In brackets: 95 % intervals{over}." if options.intervals else ""
    counts = {each.name: len(each.rows) for each in analyses if len(each.rows) < len(predictions.table)}
    used = "".join(
        f" {f'{name}: ' if name else ''}{count:,} of them have a target and an output to compare with it."
        for name, count in counts.items()
    )
    return f"The figures are of {of} examples of the {predictions.split} split{weighted}.{used}{interval}"


def add_name(analysis: OutputAnalysis, name: str) -> str:
    return f"{analysis.name}_{name}" if analysis.name else name


def make_output_sections(analysis: OutputAnalysis) -> str:
    """Returns the sections of one output."""
    label = f"{analysis.name}: " if analysis.name else ""
    tables = {"": [{"metric": name, "value": figure} for name, figure in analysis.figures.items()]}
    titles = {
        "confused": "Confused most often",
        "quantiles": "Quantiles of the absolute error",
        "thresholds": f"Thresholds of the probability of {analysis.facts.get('positive')}",
    }
    tables |= {title: analysis.facts.get(key, []) for key, title in titles.items()}
    metrics = "".join(f"<div><h3>{title}</h3>{make_table(rows)}</div>" for title, rows in tables.items() if rows)
    classes = analysis.classes
    if any("f1" in row for row in classes):
        classes = sorted(classes, key=lambda row: float(row["f1"].value))
    table = f"<h3>One by one, the weakest first</h3>{make_table(classes)}" if classes else ""
    charts = compose_section(f"{label}Charts", make_charts(analysis.drawings), table)
    return compose_section(f"{label}Metrics", f'<div class="side">{metrics}</div>') + charts


def show_importance(columns: Sequence[Mapping[str, Any]]) -> str:
    """Returns the importance of columns as bars, and how much each tells alone; empty if there are none."""
    shown = [row for row in columns if not math.isnan(row["importance"].value)][:MOST_SHOWN]
    if not shown:
        return ""
    limit = max(1e-9, *(row["importance"].high for row in shown), *(row["importance"].value for row in shown))
    bars = draw_rates("importance", [row["column"] for row in shown], [row["importance"] for row in shown], limit=limit)
    rows = [{"column": row["column"], "alone": row.get("alone"), "used": not row["is_useless"]} for row in columns]
    measure = shown[0]["measure"]
    about = f"How much the {measure} grows if a column is shuffled; and how good a model of that column alone is."
    return f'<p class="faint">{about}</p><div class="side"><div>{bars}</div>{make_table(rows[:MOST_SHOWN])}</div>'


def show_slices(slices: Sequence[Row]) -> list[Row]:
    """Returns the first slices as the page shows them."""
    names = ("output", "column", "slice", "examples", "share", "metric")
    shown = []
    for row in slices[:MOST_SHOWN]:
        figures = {"value": Figure(row["value"], row["low"], row["high"]), "difference": row["difference"]}
        shown.append({**{name: row[name] for name in names}, **figures, "weak": row["is_weak"] or None})
    return shown


def show_mistakes(rows: Sequence[Row], pictures: bytes | None) -> list[str]:
    """Returns the mistakes as pictures with captions, or as a table."""
    if pictures is None:
        return [make_table(rows[:MOST_SHOWN]), tell_more(rows, MISTAKES)]
    across, down = min(IN_A_ROW, len(rows)) * SIDE, math.ceil(len(rows) / IN_A_ROW) * SIDE
    style = f"background-size:{across}px {down}px;width:{SIDE}px;height:{SIDE}px"
    style += f";background-image:url({to_data_address(pictures)})"
    return [
        f"<style>.sheet{{{style}}}</style>",
        f'<div class="grid">{"".join(map(show_picture, rows))}</div>',
        '<p class="faint">All are in mistakes.csv. "label?": the label is probably wrong.</p>',
    ]


def show_mattered(mattered: Mapping[int, Any], reader: InputReader) -> str:
    """Returns pictures whose parts that did not matter are dark, or texts whose words that did are marked."""
    if not mattered:
        return ""
    examples = np.array(sorted(mattered))
    found = [mattered[int(example)] for example in examples]
    if isinstance(found[0], np.ndarray):
        pictures = reader.read_pictures(examples)
        assert pictures is not None
        address = to_data_address(draw_sheet(dim_pictures(pictures, found)))
        words = f"Examples {', '.join(map(str, examples))}: what is dark did not matter for the prediction."
        return f'<p class="faint">{words}</p><img src="{address}" alt="parts that mattered">'
    lines = []
    for example, parts in zip(examples, found, strict=True):
        marked = (
            f'<span style="{mark_word(share)}" title="{share:.2f}">{escape(word)}</span>' for word, share in parts
        )
        lines.append(f"<p>example {example}: {' '.join(marked)}</p>")
    return f'<p class="faint">Bold and underlined words mattered most for the prediction.</p>{"".join(lines)}'


def mark_word(share: float) -> str:
    """Returns the style of a word that mattered so much."""
    return f"font-weight:{400 + 100 * round(5 * share)};text-decoration:{'underline' if share > 0.5 else 'none'}"


def show_picture(row: Row) -> str:
    """Returns the picture of a mistake, with what the model said of it."""
    x, y = row["picture"] % IN_A_ROW * SIDE, row["picture"] // IN_A_ROW * SIDE
    where = " ".join(str(row[name]) for name in (ID, FILE, ROW) if row.get(name) is not None)
    words = [f"{name} {say_value(row[name])}" for name in SAID if row.get(name) is not None]
    if row["suspected_label"]:
        words.append("label?")
    lines = "<br>".join(map(escape, [row["output"], *words] if row["output"] else words))
    style = f"background-position:-{x}px -{y}px"
    return f'<div class="cell"><i class="sheet" style="{style}" role="img" title="{escape(where)}"></i>{lines}</div>'


def say_value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def tell_more(rows: Sequence[Row], file: str) -> str:
    more = f"The first {MOST_SHOWN} of {len(rows):,}. " if len(rows) > MOST_SHOWN else ""
    return f'<p class="faint">{more}All are in {file}.</p>' if rows else ""


def describe_metrics(
    predictions: Predictions, analyses: Sequence[OutputAnalysis], options: EvaluationOptions
) -> dict[str, Any]:
    """Returns the content of `metrics.json`."""
    return {
        "split": predictions.split,
        "examples": predictions.examples,
        "kept": len(predictions.table),
        "intervals_over": predictions.units.describe() if predictions.units else "examples",
        "outputs": {
            each.name: {
                "examples": len(each.rows),
                "metrics": {name: figure._asdict() for name, figure in each.figures.items()},
                **{key: value for key, value in each.facts.items() if key in ("quantiles", "confused", "thresholds")},
            }
            for each in analyses
        },
    }
