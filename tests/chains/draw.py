"""What is done in a chain: a first run, a change of its data, and a second command; drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.chains.data import Data, Table

#: The second commands, and how often each is drawn.
SECONDS = {"evaluate": 6, "predict": 6, "init_from": 5, "resume": 3, "rerun": 2}

#: In which file format a table is written, with the words that the first run reads it with.
FORMS: Mapping[str, Sequence[str]] = {
    "csv": (),
    "semicolon": ("dataset.delimiter=';'",),
    "latin1": ("dataset.encoding=latin-1",),
    "headerless": ("dataset.header=[age,income,town,born,answer]",),
    "parquet": (),
    "jsonl": (),
}

MODELS = (
    *((), ("model=linear",), ("model.units=[8]",), ("dataset.embed=true", "model=dlrm")),
    ("model.units=[8]", "precision=mixed"),
    ("model.units=[8]", "strategy=mirrored", "hardware.logical_devices=2"),
)


@dataclass(frozen=True)
class Change:
    """A change of the data between the two commands.

    Attributes:
        make: changes the data.
        must_work: the second commands that may not refuse it.
        must_refuse: the second commands that have to refuse it, since there is no right number.
        is_content: whether the rows, their values or their order differ.
    """

    make: Callable[[Data], Data]
    must_work: Sequence[str] = ("evaluate", "predict", "init_from", "rerun")
    must_refuse: Sequence[str] = ()
    is_content: bool = True


def change_rows(which: slice, **values: object) -> Callable[[Data], Data]:
    return lambda data: data.change_rows(which, values)


FEW = slice(3, 9)

CHANGES: Mapping[str, Change] = {
    "none": Change(lambda data: data, (*SECONDS,), is_content=False),
    "rows shuffled": Change(lambda data: data.shuffle()),
    "rows fewer": Change(lambda data: data.keep(slice(0, 50))),
    "columns moved": Change(lambda data: data.order_columns(reversed), is_content=False),
    "a column more": Change(lambda data: data.add_column("note", "x"), ("evaluate", "predict")),
    "a column renamed": Change(lambda data: data.rename("age", "years"), (), ("evaluate", "predict")),
    "a category more": Change(change_rows(FEW, town="Paris")),
    "categories fewer": Change(lambda data: data.keep_where("town", "Ulm")),
    "a class more": Change(change_rows(FEW, answer="vip"), ("predict", "init_from"), ("evaluate",)),
    "a class fewer": Change(lambda data: data.drop_class(), ("predict",)),
    "a class renamed": Change(lambda data: data.rename_class("vip"), ("predict",), ("evaluate",)),
    "flags as 1.0": Change(lambda data: data.to_float_flags(), is_content=False),
    "dates in UTC": Change(lambda data: data.write_dates("%Y-%m-%dT%H:%M:%SZ"), is_content=False),
    "dates as timestamps": Change(lambda data: data.write_dates("%Y-%m-%d %H:%M"), is_content=False),
    "dates of another form": Change(lambda data: data.write_dates("%d/%m/%Y"), (), ("evaluate", "predict")),
    "a blank number": Change(change_rows(FEW, age=None)),
    "a blank category": Change(change_rows(FEW, town=None)),
    "a blank date": Change(change_rows(FEW, born=None)),
    "a blank target": Change(change_rows(FEW, answer=None), ("predict",), ("evaluate", "init_from")),
    "a unit scaled": Change(lambda data: data.scale("income", 1000.0)),
    "a word for a number": Change(change_rows(FEW, age="old"), (), ("evaluate", "predict", "init_from")),
}


@dataclass(frozen=True)
class Case:
    """What is typed and changed.

    Attributes:
        number: with the seed it says all the rest.
        seed: of the data.
        kind: of the target.
        form: of the files.
        words: of the first run, besides those of its data.
        change: the name of the change.
        second: the second command.
    """

    number: int
    seed: int
    kind: str
    form: str
    words: Sequence[str]
    change: str
    second: str

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} in {self.form} ({' '.join(self.words)}); {self.change}; {self.second}"

    def make_data(self) -> Data:
        """The data of the first run."""
        return Table.draw(self.seed, self.kind, self.form)

    @property
    def must_work(self) -> bool:
        return self.second in CHANGES[self.change].must_work

    @property
    def must_refuse(self) -> bool:
        change = CHANGES[self.change]
        return self.second in change.must_refuse or (self.second == "resume" and change.is_content)


def draw_case(seed: int, number: int) -> Case:
    draw = random.Random(f"chains {seed} {number}")
    kind = draw.choice(("binary", "flag", "classification", "regression"))
    form = draw.choice(list(FORMS))
    words = draw.choice(MODELS)
    (second,) = draw.choices(list(SECONDS), list(SECONDS.values()))
    names = [
        name
        for name in CHANGES
        if (kind != "regression" or "class" not in name) and (kind == "flag" or "flags" not in name)
    ]
    if second == "resume":
        names += ["none"] * 6
    return Case(number, draw.randrange(1 << 30), kind, form, words, draw.choice(names), second)
