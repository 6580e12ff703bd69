"""Generated tables: their values as Python's, whatever file they are written to."""

from __future__ import annotations

import csv
import datetime
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROWS = 90

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows of a person's age, income, town and date of birth, and an answer.

    Attributes:
        kind: of the answer: `binary` has two words, `flag` the numbers 0 and 1, `classification` three words,
            `regression` numbers.
        form: of the file.
        rows: their values; None is a blank.
        columns: their names, in the order of the file.
        names: of the columns that are renamed, by their first names.
        dates: the form in which dates are written; None: `2024-01-31`, or a date where the format has dates.
    """

    kind: str
    form: str
    rows: Sequence[Row]
    columns: Sequence[str] = ("age", "income", "town", "born", "answer")
    names: Mapping[str, str] = field(default_factory=dict)
    dates: str | None = None

    @classmethod
    def draw(cls, seed: int, kind: str, form: str) -> Table:
        random_numbers = random.Random(seed)
        return cls(kind, form, [draw_row(random_numbers, kind) for _ in range(ROWS)])

    def change_rows(self, which: slice, values: Mapping[str, Any]) -> Table:
        chosen = range(*which.indices(len(self.rows)))
        if self.kind in ("flag", "regression") and values.get("answer") is not None:
            values = {**values, "answer": 7.5}
        return replace(self, rows=[{**row, **values} if n in chosen else row for n, row in enumerate(self.rows)])

    def shuffle(self) -> Table:
        return replace(self, rows=random.Random(1).sample(list(self.rows), len(self.rows)))

    def keep(self, which: slice) -> Table:
        return replace(self, rows=self.rows[which])

    def keep_where(self, column: str, value: Any) -> Table:
        return replace(self, rows=[row for row in self.rows if row[column] == value])

    def drop_class(self) -> Table:
        last = max(row["answer"] for row in self.rows)
        return replace(self, rows=[row for row in self.rows if row["answer"] != last])

    def rename_class(self, name: str) -> Table:
        last = max(row["answer"] for row in self.rows)
        other = 2.0 if self.kind == "flag" else name
        return replace(self, rows=[{**row, "answer": other} if row["answer"] == last else row for row in self.rows])

    def to_float_flags(self) -> Table:
        return replace(self, rows=[{**row, "answer": float(row["answer"])} for row in self.rows])

    def order_columns(self, order: Callable[[Sequence[str]], Iterable[str]]) -> Table:
        return replace(self, columns=tuple(order(self.columns)))

    def add_column(self, name: str, value: Any) -> Table:
        return replace(self, rows=[{**row, name: value} for row in self.rows], columns=(*self.columns, name))

    def rename(self, column: str, name: str) -> Table:
        return replace(self, names={column: name})

    def scale(self, column: str, factor: float) -> Table:
        return replace(self, rows=[{**row, column: row[column] * factor} for row in self.rows])

    def write_dates(self, form: str) -> Table:
        return replace(self, dates=form)

    def write(self, path: Path) -> Path:
        """Writes the file, and returns its path with the suffix of its format."""
        suffix = self.form if self.form in ("parquet", "jsonl") else "csv"
        path = path.with_suffix(f".{suffix}")
        header = [self.names.get(name, name) for name in self.columns]
        rows = [[self._to_cell(row[name]) for name in self.columns] for row in self.rows]
        if suffix == "parquet":
            write_parquet(path, header, rows)
        elif suffix == "jsonl":
            lines = [json.dumps(dict(zip(header, row, strict=True)), default=str) for row in rows]
            path.write_text("\n".join(lines) + "\n")
        else:
            delimiter = ";" if self.form == "semicolon" else ","
            encoding = "latin-1" if self.form == "latin1" else "utf8"
            with path.open("w", newline="", encoding=encoding) as file:
                writer = csv.writer(file, delimiter=delimiter)
                writer.writerows(rows if self.form == "headerless" and not self._is_moved else [header, *rows])
        return path

    @property
    def _is_moved(self) -> bool:
        """Whether the columns are others than those of the first file, which a header has to say."""
        return tuple(self.columns) != ("age", "income", "town", "born", "answer") or bool(self.names)

    def _to_cell(self, value: Any) -> Any:
        if not isinstance(value, datetime.date):
            return value
        return value.strftime(self.dates) if self.dates else (value if self.form == "parquet" else value.isoformat())

    def to_inputs(self) -> dict[str, list[Any]]:
        """The inputs as the model takes them: numbers with NaN, words and dates as text with "" for a blank."""
        return {
            "age": [float("nan") if row["age"] is None else row["age"] for row in self.rows],
            "income": [row["income"] for row in self.rows],
            "town": [row["town"] or "" for row in self.rows],
            "born": ["" if row["born"] is None else f"{row['born'].isoformat()}T00:00:00" for row in self.rows],
        }

    @property
    def answers(self) -> list[Any]:
        return [row["answer"] for row in self.rows]


#: Every kind of data of a chain.
Data = Table


def draw_row(draw: random.Random, kind: str) -> Row:
    age, income, town = (
        round(draw.gauss(45, 12), 2),
        round(draw.gauss(3000, 800), 2),
        draw.choice(("Ulm", "Köln", "Bonn")),
    )
    born = datetime.date(1950, 1, 1) + datetime.timedelta(days=draw.randrange(20000))
    score = (age - 45) / 12 + (income - 3000) / 800 + (town == "Ulm") + draw.gauss(0, 0.3)
    if kind == "regression":
        answer: Any = round(1000 * score, 3)
    elif kind == "flag":
        answer = int(score > 0.3)
    else:
        words = ("no", "yes") if kind == "binary" else ("high", "low", "middle")
        answer = words[int(score > 0.3) + (kind == "classification" and score > 1.2)]
    return {"age": age, "income": income, "town": town, "born": born, "answer": answer}


def write_parquet(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {}
    for n, name in enumerate(header):
        values = [row[n] for row in rows]
        if any(isinstance(value, str) for value in values):  # a word among numbers
            values = [value if value is None or isinstance(value, str) else str(value) for value in values]
        elif any(isinstance(value, float) for value in values):
            values = [value if value is None else float(value) for value in values]
        columns[name] = pyarrow.array(values)
    parquet.write_table(pyarrow.table(columns), path)
