"""Builds the HTML page about data: findings, columns, distributions by class, examples. It reads no files."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scaleflow.dataset.column_kinds import CATEGORY, DATE, NUMBER, ColumnKind
from scaleflow.dataset.schema import SplitSample, make_schema
from scaleflow.features.checks.drift import DRIFT, FAULT, HINT, LEVELS, DataFinding
from scaleflow.interfaces.formatting import format_number
from scaleflow.pages.charts import Drawing, shorten_name, text, wrap_svg
from scaleflow.pages.html import compose_section, make_charts, make_findings, make_page, make_table, shorten_value
from scaleflow.pages.pictures import draw_sheet, to_data_address

#: Maximum number of columns with a chart, of classes in a chart, and of categories in a chart.
MAX_CHARTS = 24
MAX_CLASSES = 6
MAX_BARS = 12

#: Maximum number of frequent values in the table of columns.
MAX_FREQUENT = 5

#: Rows in the table of examples, and pictures per class.
SHOWN_ROWS = 10
SHOWN_PICTURES = 8

#: Heading of the findings of each level.
HEADINGS = {FAULT: "Faults", DRIFT: "Drift", HINT: "To be looked at"}

#: Bins of a histogram, and the quantiles that it spans. Values outside are counted in the first or last bin.
RANGES = 30
ENDS = (0.005, 0.995)

#: Pixels: width of a chart, margin for the labels on the left, margin on the right, height of a strip.
WIDTH = 470
LEFT = 130
RIGHT = 34
HEIGHT = 34

Array = np.ndarray[Any, Any]


def make_data_page(
    title: str, findings: Sequence[DataFinding], samples: Mapping[str, SplitSample], pictures: Mapping[str, Array]
) -> str:
    """Returns the page as HTML.

    Args:
        samples: by the name of the split, the training split first.
        pictures: by class, or those of all examples: [n, height, width, channels] uint8.
    """
    train = next(iter(samples.values()))
    looked_at = []
    splits = []
    for split, sample in samples.items():
        looked_at.append(f"{len(sample):,} of {sample.examples:,} examples of {split}")
        splits.append({"split": split, "examples": sample.examples, "looked_at": len(sample)})
    schema = make_schema(train)
    hidden = len(train.columns) - MAX_CHARTS
    more = f"<p>{hidden:,} more columns are in the table only.</p>" if hidden > 0 else ""
    by_class = pick_target(train)
    caption = ""
    if by_class is not None:
        caption = "by class"
    elif len(samples) > 1:
        caption = "by split"
    columns = [describe_row(name, column) for name, column in schema["columns"].items()]
    sheets = []
    for name, shown in pictures.items():
        address = to_data_address(draw_sheet(shown[:SHOWN_PICTURES]))
        sheets.append(make_charts([Drawing("", name, f'<img src="{address}" alt="">')]))
    return make_page(
        title,
        ", ".join(looked_at),
        [
            compose_section("Findings", *list_by_level(findings)),
            compose_section("Splits", make_table(splits)),
            compose_section("Targets", make_charts(draw_targets(samples))),
            compose_section("Columns", make_table(columns)),
            compose_section(f"Distributions {caption}".strip(), make_charts(draw_columns(samples, by_class)), more),
            compose_section("Examples", "".join(sheets), make_table(list_examples(train))),
        ],
    )


def sort_findings(findings: Sequence[DataFinding]) -> list[DataFinding]:
    """Returns the findings, the worst first."""
    return sorted(findings, key=lambda finding: -LEVELS.index(finding.level))


def list_by_level(findings: Sequence[DataFinding]) -> list[str]:
    """Returns the findings as HTML lists with headings, one list per level."""
    lists = []
    for level in reversed(LEVELS):
        of_level = [finding for finding in findings if finding.level == level]
        if of_level:
            lists.append(f"<h3>{HEADINGS[level]}</h3>{make_findings(of_level)}")
    return lists or [make_findings([])]


def pick_target(sample: SplitSample) -> str | None:
    """Returns the first target with at most MAX_CLASSES classes, or None."""
    for name, values in sample.targets.items():
        if values.dtype == object and len(set(values.tolist())) <= MAX_CLASSES:
            return name
    return None


def describe_row(name: str, column: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table row of a column, made from its entry in the schema."""
    values = column.get("values", {})
    frequent = [f"{shorten_name(value)} ({count:,})" for value, count in list(values.items())[:MAX_FREQUENT]]
    if len(values) > MAX_FREQUENT:
        frequent.append("...")
    return {
        "column": name,
        "is": column["kind"],
        "shape": " x ".join(map(str, column.get("shape", ()))),
        "missing": f"{column['missing']:.1%}" if column["missing"] else "",
        "distinct": column.get("distinct"),
        "min": column.get("min"),
        "mean": column.get("mean"),
        "max": column.get("max"),
        "deviation": column.get("deviation"),
        "most_frequent": ", ".join(frequent),
    }


def list_examples(sample: SplitSample) -> list[dict[str, Any]]:
    """Returns the first examples as table rows: columns with one value per example, and targets.

    Empty without such columns.
    """
    shown = {f"target {name}".strip(): values for name, values in sample.targets.items()}
    for name, values in sample.columns.items():
        if values.ndim == 1:
            shown[name] = values
    if len(shown) <= len(sample.targets):
        return []
    rows = []
    for n in range(min(SHOWN_ROWS, len(sample))):
        rows.append({name: shorten_value(values[n]) for name, values in shown.items()})
    return rows


def draw_targets(samples: Mapping[str, SplitSample]) -> Iterator[Drawing]:
    """Yields a chart of each target's distribution, by split."""
    train = next(iter(samples.values()))
    for name in train.targets:
        groups = {split: sample.targets[name] for split, sample in samples.items() if name in sample.targets}
        kind = CATEGORY if next(iter(groups.values())).dtype == object else NUMBER
        yield from draw_column(f"target {name}".strip(), kind, groups)


def draw_columns(samples: Mapping[str, SplitSample], by_class: str | None) -> Iterator[Drawing]:
    """Yields a chart of each column's distribution, by the classes of target `by_class`, or by split if that
    is None.
    """
    train = next(iter(samples.values()))
    for column, values in list(train.columns.items())[:MAX_CHARTS]:
        kind = train.kinds[column]
        if by_class is None:
            groups = {split: sample.columns[column] for split, sample in samples.items() if column in sample.columns}
        else:
            classes = train.targets[by_class]
            groups = {name or "missing": values[classes == name] for name in sorted(set(classes.tolist()))}
        if kind is not DATE:
            yield from draw_column(column, kind, groups)


def draw_column(name: str, kind: ColumnKind, groups: Mapping[str, Array]) -> Iterator[Drawing]:
    """Yields the chart of a column, with a strip for each group of its values. Yields none without a known number."""
    if kind.reduce is None:
        yield draw_categories(name, groups)
        return
    known = {}
    for group, values in groups.items():
        numbers = kind.reduce(values)
        known[group] = numbers[np.isfinite(numbers)]
    joined = np.concatenate(list(known.values()))
    if not len(joined):
        return
    low, high = map(float, np.quantile(joined, ENDS))
    edges = np.linspace(low, high if high > low else low + 1, RANGES + 1)
    heights = {}
    for group, numbers in known.items():
        counts, _ = np.histogram(np.clip(numbers, edges[0], edges[-1]), edges)
        heights[group] = counts / max(1, len(numbers))
    ticks = [(place, format_number(low + place * (edges[-1] - low))) for place in (0.0, 0.5, 1.0)]
    yield Drawing("", name, draw_strips(name, heights, ticks), caption=kind.measure)


def draw_categories(name: str, groups: Mapping[str, Array]) -> Drawing:
    """Draws the shares of the most frequent categories, with a strip for each group of values."""
    counts = {group: Counter(map(str, values.tolist())) for group, values in groups.items()}
    total = sum(counts.values(), Counter[str]())
    categories = [category for category, _ in total.most_common(MAX_BARS)]
    heights = {}
    for group, of_group in counts.items():
        heights[group] = np.array([of_group[category] for category in categories]) / of_group.total()
    ticks = []
    for n, category in enumerate(categories):
        ticks.append(((n + 0.5) / len(categories), shorten_name(category or "missing")))
    return Drawing("", name, draw_strips(name, heights, ticks, is_turned=True))


def draw_strips(
    title: str, groups: Mapping[str, Array], ticks: Sequence[tuple[float, str]], is_turned: bool = False
) -> str:
    """Draws a strip of bars for each group, the first at the top. All strips have the same scale.

    Args:
        title: title of the chart, for screen readers.
        groups: bar heights [bars] by the name of the group.
        ticks: (position from 0 to 1, label) of each mark on the axis.
    """
    top = max(float(heights.max()) for heights in groups.values()) or 1.0
    width = WIDTH - LEFT - RIGHT
    parts = []
    for row, (name, heights) in enumerate(groups.items()):
        bottom = (row + 1) * HEIGHT
        step = width / len(heights)
        parts.append(text(LEFT - 8, bottom - 8, shorten_name(name)[:18], anchor="end"))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + width}" y1="{bottom}" y2="{bottom}"/>')
        for n, share in enumerate(heights):
            size = float(share) / top * (HEIGHT - 6)
            box = f'x="{LEFT + n * step + 0.5:.1f}" y="{bottom - size:.1f}" width="{max(1, step - 1):.1f}"'
            parts.append(f'<rect class="rest" {box} height="{size:.1f}"><title>{share:.1%}</title></rect>')
    end = len(groups) * HEIGHT
    for place, label in ticks:
        x = LEFT + place * width
        if is_turned:
            turned = text(0, 0, label, anchor="end", kind="faint")
            parts.append(f'<g transform="translate({x + 4:.1f} {end + 12}) rotate(-35)">{turned}</g>')
        else:
            parts.append(text(x, end + 16, label, anchor="middle", kind="faint"))
    below = 20 + 4 * max(len(label) for _, label in ticks) if is_turned else 24
    return wrap_svg(title, WIDTH, end + below, parts=parts)
