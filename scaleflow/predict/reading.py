"""How a run read its own data, so that a new table is read alike. No TensorFlow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scaleflow.files.table_formats import CsvForm
from scaleflow.interfaces import LearnedState
from scaleflow.serving.cells import CATEGORY, DATE, NUMBER, CellForm

#: The source of tables, and the kinds of columns of which the model replaces a missing value by what training learned.
TABLE, FILLED = "scaleflow.dataset.table.Table", (NUMBER, DATE)


@dataclass(frozen=True)
class Reading:
    """How a run read its data.

    Attributes:
        form: of CSV files.
        target: the column that the run predicts; None if it is not known.
        missing: words that mean a missing value; None: text is taken as it is.
        kinds: what the columns are taken for: `numbers`, `categories`, `texts` or `dates`; empty if it is not known.
        filled: the inputs in which the model replaces a missing value, and whether training had missing ones; None: it
            is not known.
        categories: those that the model knows, by input.
        many_words: the inputs of which it knows only the most frequent words of training.
        input: the column, array or feature that the run read its single input from; None if it is not known.
        features: `dataset.features` of TFRecord files.
        compression: of TFRecord files, as TensorFlow names it.
        forms: how the numbers and dates of columns are written; see `rewrite_cells`.
        unused: the columns of the run's table that were no inputs; None: it is not known.
    """

    form: CsvForm = field(default_factory=CsvForm)
    target: str | None = None
    missing: tuple[str, ...] | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    filled: Mapping[str, bool | None] = field(default_factory=dict)
    categories: Mapping[str, Collection[str]] = field(default_factory=dict)
    many_words: Collection[str] = ()
    input: str | None = None
    features: Mapping[str, Any] = field(default_factory=dict)
    compression: str = ""
    forms: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unused: tuple[str, ...] | None = None

    def describe_cells(self, name: str) -> CellForm:
        """Returns how the run read the cells of a column."""
        return CellForm(self.kinds.get(name), self.missing, self.forms.get(name), [*self.categories.get(name, ())])


def describe_reading(state: LearnedState | None, options: Mapping[str, Any], inputs: Collection[str]) -> Reading:
    """Returns how a run read its data.

    Args:
        state: what the run learned; None if its model was logged before that was recorded.
        options: `dataset` of its config, for what the record does not say.
        inputs: the names of the model's inputs.
    """
    found = {**options, **(state.reading if state is not None else {})}
    delimiter, target, encoding = (to_word(found.get(key)) for key in ("delimiter", "target", "encoding"))
    missing, kinds = to_words(found.get("missing")), found.get("columns")
    kinds = kinds if isinstance(kinds, dict) and to_words([*kinds.values()]) else {}  # a store's content is not trusted
    form = CsvForm(delimiter, to_words(found.get("header")) or (), encoding or CsvForm.encoding)
    features = found.get("features")
    compression = (to_word(found.get("compression")) or "none").upper()
    common = Reading(
        form,
        target,
        missing,
        input=to_word(found.get("input")) or to_word(found.get("inputs")),
        features=features if isinstance(features, dict) else {},
        compression="" if compression == "NONE" else compression,
        forms=forms if isinstance(forms := found.get("forms"), dict) else {},
        unused=to_words(found.get("unused")),
        many_words=tuple(many) if isinstance(many := found.get("many_words"), dict) else (),
    )
    if state is None:
        is_table = options.get("_target_") == TABLE
        return replace(common, filled=dict.fromkeys(inputs)) if is_table else common
    learned = {name: each.learned for name, each in state.preprocessing.items()}
    numbers = {name: each for name, each in learned.items() if kinds.get(name) in FILLED and isinstance(each, dict)}
    own = [name for name, each in state.preprocessing.items() if not each.path.startswith("scaleflow.")]  # may fill
    return replace(
        common,
        kinds=kinds,
        filled={name: bool(each.get("missing")) for name, each in numbers.items()}
        | dict.fromkeys(own),  # may fill, too
        categories={name: to_words(each) or () for name, each in learned.items() if kinds.get(name) == CATEGORY},
    )


def to_word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def to_words(value: Any) -> tuple[str, ...] | None:
    is_words = isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)
    return tuple(value) if is_words else None
