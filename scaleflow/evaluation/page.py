"""Builds HTML pages that load nothing: tables, charts and pictures are inside."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from scaleflow.evaluation.charts import STYLE
from scaleflow.evaluation.findings import describe_figure
from scaleflow.evaluation.resampling import Figure
from scaleflow.interfaces.formatting import GENERATOR, format_number

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


def make_page(title: str, about: str, sections: Iterable[str]) -> str:
    """Returns a page with a heading, a line about it, and sections."""
    head = f'{GENERATOR}<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    style = f"<style>{STYLE}{PAGE_STYLE}</style>"
    body = f'<h1>{escape(title)}</h1><p class="faint">{escape(about)}</p>{"".join(sections)}'
    return f'<!DOCTYPE html><html lang="en"><head>{head}{style}</head><body>{body}</body></html>\n'


def compose_section(title: str, *parts: str) -> str:
    """Returns a section; empty if it has no parts."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>" if any(parts) else ""


def make_findings(findings: Sequence[Any]) -> str:
    """Returns the list of findings, each with `text` and `because`."""
    if not findings:
        return '<ul class="findings none"><li>No findings.</li></ul>'
    items = (
        f"<li><b>{escape(each.rule)}</b>: {escape(each.text)} {make_faint(each.because)}</li>" for each in findings
    )
    return f'<ul class="findings">{"".join(items)}</ul>'


def make_faint(words: str) -> str:
    return f'<span class="faint">({escape(words)})</span>' if words else ""


def make_charts(drawings: Iterable[Any]) -> str:
    """Returns charts side by side, each with `title`, `svg` and `caption`."""
    figures = (
        f'<figure style="flex-basis:{find_width(each.svg)}px"><h3>{escape(each.title)}</h3>'
        f'<div class="scroll">{each.svg}</div>'
        f"<figcaption>{escape(each.caption)}</figcaption></figure>"
        for each in drawings
    )
    return f'<div class="charts">{"".join(figures)}</div>'


def find_width(svg: str) -> int:
    """Returns the width of a chart in pixels."""
    found = re.search(r'width="(\d+)"', svg)
    return int(found[1]) if found else 0


def make_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Returns a table of some columns of rows, or of all that have a value; empty without rows."""
    names = columns or list(dict.fromkeys(key for row in rows for key in row))
    names = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    if not rows or not names:
        return ""
    first = {name: next(row[name] for row in rows if row.get(name) not in (None, "")) for name in names}
    kinds = {name: ' class="number"' if is_figure(value) else "" for name, value in first.items()}
    head = "".join(f"<th{kinds[name]}>{escape(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(f"<tr>{''.join(make_cell(row.get(name)) for name in names)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def is_figure(value: Any) -> bool:
    return isinstance(value, Figure | int | float) and not isinstance(value, bool)


def make_cell(value: Any) -> str:
    if isinstance(value, Figure):
        return f'<td class="number">{escape("" if math.isnan(value.value) else describe_figure(value))}</td>'
    if isinstance(value, bool):
        return f"<td>{'yes' if value else ''}</td>"
    if isinstance(value, int):
        return f'<td class="number">{value:,}</td>'
    if isinstance(value, float):
        return f'<td class="number">{"" if math.isnan(value) else format_number(value)}</td>'
    return f"<td>{escape('' if value is None else str(value))}</td>"
