"""The worst mistakes, and the labels that are probably wrong, with their inputs."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from scaleflow.evaluation.collector import EXAMPLE
from scaleflow.evaluation.outputs import OutputAnalysis
from scaleflow.evaluation.predictions import FILE, ID, ROW, Predictions, name_column
from scaleflow.evaluation.slices import decode_text

#: Pixels of the side of a picture in the contact sheet, and pictures of a row of it.
SIDE, IN_A_ROW = 96, 8

#: The most characters of a text.
MOST_LETTERS = 400

Array = np.ndarray[Any, Any]
Row = dict[str, Any]


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


def add_inputs(rows: Sequence[Row], reader: InputReader) -> tuple[bytes | None, list[str]]:
    """Adds raw inputs with one value to rows. Returns a contact sheet of their pictures, PNG, and what was added."""
    if not rows:
        return None, []
    examples = np.unique([row[EXAMPLE] for row in rows])
    columns = reader.read_columns(examples)
    at = {int(example): n for n, example in enumerate(examples)}
    for row in rows:
        row |= {name: shorten_value(values[at[row[EXAMPLE]]]) for name, values in columns.items() if name not in row}
    pictures = reader.read_pictures(examples)
    if pictures is None:
        return None, list(columns)
    for n, row in enumerate(rows):
        row["picture"] = n
    return draw_sheet([pictures[at[row[EXAMPLE]]] for row in rows]), list(columns)


def shorten_value(value: Any) -> Any:
    """Returns a value for a table: a number, or a text that is cut."""
    if isinstance(value, bytes | str) or value is None:
        words = decode_text(value)
        return words if len(words) <= MOST_LETTERS else words[: MOST_LETTERS - 1] + "\u2026"
    return value.item() if isinstance(value, np.generic) else value


def draw_sheet(pictures: Iterable[Array]) -> bytes:
    """Returns a contact sheet of pictures [height, width, channels] uint8 as PNG, `IN_A_ROW` in each row."""
    from PIL import Image

    cells = [resize_picture(each) for each in pictures]
    sheet = Image.new("RGB", (SIDE * min(IN_A_ROW, len(cells)), SIDE * math.ceil(len(cells) / IN_A_ROW)))
    for n, cell in enumerate(cells):
        sheet.paste(cell, (n % IN_A_ROW * SIDE, n // IN_A_ROW * SIDE))
    content = io.BytesIO()
    sheet.save(content, "PNG")
    return content.getvalue()


def resize_picture(picture: Array) -> Any:
    from PIL import Image

    pixels = picture[..., 0] if picture.shape[-1] in (1, 2) else picture[..., :3]
    image = Image.fromarray(pixels).convert("RGB")
    scale = SIDE / max(image.size)
    size = [max(1, round(side * scale)) for side in image.size]
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    cell = Image.new("RGB", (SIDE, SIDE))
    cell.paste(image.resize(size, how), ((SIDE - size[0]) // 2, (SIDE - size[1]) // 2))
    return cell


def dim_pictures(pictures: Array, grids: Sequence[Array]) -> list[Array]:
    """Returns pictures whose parts are the darker, the less they mattered."""
    dimmed = []
    for picture, grid in zip(pictures, grids, strict=True):
        places = [np.arange(side) * len(grid) // side for side in picture.shape[:2]]
        factors = 0.15 + 0.85 * grid[places[0]][:, places[1]]
        dimmed.append((picture * factors[..., None]).astype(np.uint8))
    return dimmed


def to_data_address(content: bytes, kind: str = "image/png") -> str:
    """Returns content as an address that a page can use without loading anything."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
