"""Makes HTML pages from sections, tables, charts and findings. A page loads no other files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from scaleflow.interfaces.estimate import Estimate, describe_estimate
from scaleflow.interfaces.formatting import GENERATOR, format_number
from scaleflow.pages.charts import STYLE, find_size

PAGE_STYLE = """
body { background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 1360px; padding: clamp(10px, 3vw, 24px); }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 32px 0 8px; border-bottom: 1px solid var(--grid); }
h3 { font-size: 15px; margin: 12px 0 4px; } p { margin: 4px 0 10px; } .faint { color: var(--faint); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 3px 12px 3px 0; text-align: left; vertical-align: top; max-width: 420px; overflow-wrap: break-word; }
th { border-bottom: 1px solid var(--grid); white-space: nowrap; } .number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; } tr + tr td { border-top: 1px solid var(--grid); }
.findings { background: var(--box); border-left: 4px solid var(--bad); padding: 8px 16px; list-style: none;
  margin: 12px 0; }
.findings.none { border-color: var(--mark); } .findings li { margin: 4px 0; } .findings b { color: var(--bad); }
.charts, .side { display: flex; flex-wrap: wrap; gap: 8px 24px; } .side > * { max-width: 100%; }
figure { margin: 0 0 12px; max-width: 100%; flex-grow: 1; } figure svg, .side svg { width: 100%; height: auto; }
figcaption { font-size: 13px; color: var(--faint); max-width: 60ch; }
.grid { display: flex; flex-wrap: wrap; gap: 12px; }
.cell { width: 120px; font-size: 12px; line-height: 1.35; overflow-wrap: break-word; }
.cell i { display: block; font-style: normal; border: 1px solid var(--grid); }
.suspect { border: 1px solid var(--bad); border-radius: 3px; padding: 0 3px; }
"""

#: Maximum number of characters of a text in a table.
MAX_CHARACTERS = 400


def make_page(title: str, about: str, sections: Iterable[str]) -> str:
    """Returns a page with a heading, a line about its contents, and sections."""
    head = f'{GENERATOR}<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    style = f"<style>{STYLE}{PAGE_STYLE}</style>"
    body = f'<h1>{escape(title)}</h1><p class="faint">{escape(about)}</p>{"".join(sections)}'
    return f'<!DOCTYPE html><html lang="en"><head>{head}{style}</head><body>{body}</body></html>\n'


def compose_section(title: str, *parts: str) -> str:
    """Returns a section with HTML parts; "" if all parts are empty."""
    if not any(parts):
        return ""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def make_findings(findings: Sequence[Any]) -> str:
    """Returns a list of findings in HTML. Each finding has `rule`, `text` and `because`."""
    if not findings:
        return '<ul class="findings none"><li>No findings.</li></ul>'
    items = []
    for finding in findings:
        items.append(f"<li><b>{escape(finding.rule)}</b>: {escape(finding.text)} {make_faint(finding.because)}</li>")
    return f'<ul class="findings">{"".join(items)}</ul>'


def make_faint(words: str) -> str:
    """Returns words in brackets, in a faint colour; "" without words."""
    return f'<span class="faint">({escape(words)})</span>' if words else ""


def make_charts(drawings: Iterable[Any]) -> str:
    """Returns charts side by side in HTML. Each drawing has `title`, `svg` and `caption`."""
    charts = []
    for drawing in drawings:
        width, _ = find_size(drawing.svg)
        charts.append(
            f'<figure style="flex-basis:{width}px"><h3>{escape(drawing.title)}</h3>'
            f'<div class="scroll">{drawing.svg}</div>'
            f"<figcaption>{escape(drawing.caption)}</figcaption></figure>"
        )
    return f'<div class="charts">{"".join(charts)}</div>'


def make_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Returns a table in HTML; "" if there is nothing to show.

    Args:
        rows: column name -> value: text, number, bool, `Estimate` or None.
        columns: the columns to show, in this order; empty: all. A column without values is left out.
    """
    names = columns or list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    head = []
    shown = []
    for name in names:
        values = [row[name] for row in rows if row.get(name) not in (None, "")]
        if values:
            kind = ' class="number"' if is_number(values[0]) else ""
            head.append(f"<th{kind}>{escape(name.replace('_', ' '))}</th>")
            shown.append(name)
    if not shown:
        return ""
    lines = []
    for row in rows:
        cells = "".join(make_cell(row.get(name)) for name in shown)
        lines.append(f"<tr>{cells}</tr>")
    return f'<div class="scroll"><table><tr>{"".join(head)}</tr>{"".join(lines)}</table></div>'


def is_number(value: Any) -> bool:
    """Returns whether a value is a number or an `Estimate`."""
    return isinstance(value, Estimate | int | float) and not isinstance(value, bool)


def make_cell(value: Any) -> str:
    """Returns a table cell in HTML."""
    if isinstance(value, Estimate):
        return f'<td class="number">{escape("" if math.isnan(value.value) else describe_estimate(value))}</td>'
    if isinstance(value, bool):
        return f"<td>{'yes' if value else ''}</td>"
    if isinstance(value, int):
        return f'<td class="number">{value:,}</td>'
    if isinstance(value, float):
        return f'<td class="number">{"" if math.isnan(value) else format_number(value)}</td>'
    return f"<td>{escape('' if value is None else str(value))}</td>"


def shorten_value(value: Any) -> Any:
    """Prepares a value for a table: converts NumPy numbers to Python's, and cuts long texts."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, str):
        return value if len(value) <= MAX_CHARACTERS else value[: MAX_CHARACTERS - 1] + "\u2026"
    return value.item() if hasattr(value, "item") else value
