"""Draws contact sheets of pictures, for pages and files."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

#: Width and height of a picture in a contact sheet, in pixels.
SIDE = 96

#: Pictures per row of a contact sheet.
IN_A_ROW = 8


def draw_sheet(pictures: Iterable[Array], in_a_row: int = IN_A_ROW) -> bytes:
    """Draws a contact sheet of pictures [height, width, channels] uint8. Returns a PNG file."""
    from PIL import Image

    cells = list(map(resize_picture, pictures))
    columns = min(in_a_row, len(cells))
    rows = math.ceil(len(cells) / in_a_row)
    sheet = Image.new("RGB", (SIDE * columns, SIDE * rows))
    for n, cell in enumerate(cells):
        row, column = divmod(n, in_a_row)
        sheet.paste(cell, (column * SIDE, row * SIDE))
    content = io.BytesIO()
    sheet.save(content, "PNG")
    return content.getvalue()


def resize_picture(picture: Array) -> Any:
    """Scales a picture and centres it in a black square. Returns a Pillow image."""
    from PIL import Image

    pixels = picture[..., 0] if picture.shape[-1] in (1, 2) else picture[..., :3]
    image = Image.fromarray(pixels).convert("RGB")
    scale = SIDE / max(image.size)
    size = [max(1, round(side * scale)) for side in image.size]
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    cell = Image.new("RGB", (SIDE, SIDE))
    cell.paste(image.resize(size, how), ((SIDE - size[0]) // 2, (SIDE - size[1]) // 2))
    return cell


def to_data_address(content: bytes) -> str:
    """Returns a PNG file as a `data:` URL."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
