"""The mistakes in a report: which ones it shows, their inputs, and what mattered in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from scaleflow.evaluation.collector import EXAMPLE
from scaleflow.evaluation.outputs import OutputAnalysis
from scaleflow.evaluation.predictions import FILE, ID, ROW, Predictions, name_column
from scaleflow.interfaces.hooks import ExampleReader
from scaleflow.pages.html import make_table, shorten_value
from scaleflow.pages.pictures import IN_A_ROW, SIDE, draw_sheet, to_data_address

#: Maximum number of rows in a table of the page. The files have all rows.
MAX_SHOWN = 40

#: File with the mistakes.
MISTAKES = "mistakes.csv"

#: Columns that identify an example.
IDENTITY = (EXAMPLE, FILE, ROW, ID)

#: Columns of each output that a mistake shows, in addition to the columns of several targets and predictions.
SHOWN_COLUMNS = (
    "prediction",
    "probability",
    "loss",
    "correct",
    "mean_error",
    "positions",
    "target",
    "target_probability",
)

#: Columns in the caption of a mistake's picture.
CAPTION_COLUMNS = ("target", "prediction", "probability", "error", "correct", "loss")

#: Brightness of a part of a picture that did not matter.
MIN_BRIGHTNESS = 0.15

Row = dict[str, Any]
Array = np.ndarray[Any, Any]


def list_mistakes(predictions: Predictions, analysis: OutputAnalysis, most: int) -> list[Row]:
    """Returns a row for each label that is probably wrong, then for each of the worst mistakes, `most` of each."""
    suspects = analysis.suspects[:most].tolist()
    worst = [place for place in analysis.worst[:most] if place not in suspects]
    places = [*suspects, *worst]
    kept = predictions.table.take(analysis.rows[np.array(places, np.int64)])
    columns = [name for name in IDENTITY if predictions.has(name)]
    columns += [name for name in kept.column_names if is_shown(name, analysis.name)]
    prefix = f"{analysis.name}_" if analysis.name else ""
    rows = []
    for n, values in enumerate(kept.select(columns).to_pylist()):
        row: Row = {"output": analysis.name}
        for name, value in values.items():
            row[name.removeprefix(prefix)] = value
        if analysis.is_error:
            row["error"] = float(analysis.scores[places[n]])
        row["suspected_label"] = True if n < len(suspects) else None
        rows.append(row)
    return rows


def is_shown(name: str, output: str) -> bool:
    """Returns whether a table of mistakes shows a column of an output.

    It leaves out the probabilities of all classes.
    """
    start = name_column(output, "")
    if not name.startswith(start) or (not output and name in IDENTITY):
        return False
    rest = name.removeprefix(start)
    if rest in SHOWN_COLUMNS:
        return True
    return rest.startswith(("target_", "prediction_")) and rest != "target_rank"


def add_inputs(rows: Sequence[Row], reader: ExampleReader) -> bytes | None:
    """Adds each row's raw inputs with a single value.

    Returns a PNG with the pictures of the rows, or None without pictures.
    """
    if not rows:
        return None
    examples = np.unique([row[EXAMPLE] for row in rows])
    columns = reader.read_columns(examples)
    place_of = {int(example): place for place, example in enumerate(examples)}
    for row in rows:
        place = place_of[row[EXAMPLE]]
        for name, values in columns.items():
            if name not in row:
                row[name] = shorten_value(values[place])
    pictures = reader.read_pictures(examples)
    if pictures is None:
        return None
    for number, row in enumerate(rows):
        row["picture"] = number
    return draw_sheet([pictures[place_of[row[EXAMPLE]]] for row in rows])


def show_mistakes(rows: Sequence[Row], pictures: bytes | None) -> list[str]:
    """Returns the mistakes in HTML: as pictures with captions, or as a table."""
    if pictures is None:
        return [make_table(rows[:MAX_SHOWN]), describe_rest(rows, MISTAKES)]
    width = min(IN_A_ROW, len(rows)) * SIDE
    height = math.ceil(len(rows) / IN_A_ROW) * SIDE
    style = f"background-size:{width}px {height}px;width:{SIDE}px;height:{SIDE}px"
    style += f";background-image:url({to_data_address(pictures)})"
    cells = "".join(show_picture(row) for row in rows)
    return [
        f"<style>.sheet{{{style}}}</style>",
        f'<div class="grid">{cells}</div>',
        '<p class="faint">All are in mistakes.csv. "label?": the label is probably wrong.</p>',
    ]


def show_picture(row: Row) -> str:
    """Returns the picture of a mistake with its caption."""
    down, across = divmod(row["picture"], IN_A_ROW)
    where = " ".join(str(row[name]) for name in (ID, FILE, ROW) if row.get(name) is not None)
    words = [row["output"]] if row["output"] else []
    for name in CAPTION_COLUMNS:
        value = row.get(name)
        if isinstance(value, float):
            value = f"{value:.3g}"
        if value is not None:
            words.append(f"{name} {value}")
    if row["suspected_label"]:
        words.append("label?")
    lines = "<br>".join(map(escape, words))
    style = f"background-position:-{across * SIDE}px -{down * SIDE}px"
    return f'<div class="cell"><i class="sheet" style="{style}" role="img" title="{escape(where)}"></i>{lines}</div>'


def describe_rest(rows: Sequence[Row], file: str) -> str:
    """Returns a line that names the file with all rows; empty without rows."""
    if not rows:
        return ""
    more = f"The first {MAX_SHOWN} of {len(rows):,}. " if len(rows) > MAX_SHOWN else ""
    return f'<p class="faint">{more}All are in {file}.</p>'


def show_mattered(mattered: Mapping[int, Any], reader: ExampleReader) -> str:
    """Returns pictures with dark parts that did not matter, or texts with marked words that did.

    `mattered` is the result of `explain_mistakes`.
    """
    if not mattered:
        return ""
    examples = np.array(sorted(mattered))
    of_examples = [mattered[int(example)] for example in examples]
    if isinstance(of_examples[0], np.ndarray):
        pictures = reader.read_pictures(examples)
        assert pictures is not None
        address = to_data_address(draw_sheet(dim_pictures(pictures, of_examples)))
        words = f"Examples {', '.join(map(str, examples))}: what is dark did not matter for the prediction."
        return f'<p class="faint">{words}</p><img src="{address}" alt="parts that mattered">'
    lines = []
    for example, parts in zip(examples, of_examples, strict=True):
        marked = [mark_word(word, share) for word, share in parts]
        lines.append(f"<p>example {example}: {' '.join(marked)}</p>")
    return f'<p class="faint">Bold and underlined words mattered most for the prediction.</p>{"".join(lines)}'


def dim_pictures(pictures: Array, grids: Sequence[Array]) -> list[Array]:
    """Returns pictures whose parts are darker the less they mattered."""
    dimmed = []
    for picture, grid in zip(pictures, grids, strict=True):
        height, width = picture.shape[:2]
        rows = np.arange(height) * len(grid) // height
        columns = np.arange(width) * len(grid) // width
        factors = MIN_BRIGHTNESS + (1 - MIN_BRIGHTNESS) * grid[rows][:, columns]
        dimmed.append((picture * factors[..., None]).astype(np.uint8))
    return dimmed


def mark_word(word: str, share: float) -> str:
    """Returns a word in HTML that is bolder the more it mattered."""
    weight = 400 + 100 * round(5 * share)
    line = "underline" if share > 0.5 else "none"
    return f'<span style="font-weight:{weight};text-decoration:{line}" title="{share:.2f}">{escape(word)}</span>'
