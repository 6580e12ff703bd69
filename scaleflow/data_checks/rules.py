"""Rules about data: faults of columns and of targets, which a look at a sample shows."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from scaleflow.data_checks.drift import FAULT, HINT, MOST_NAMED, DataFinding
from scaleflow.data_checks.sample import CATEGORY, DATE, NUMBER, TEXT, SplitSample
from scaleflow.evaluation.one_column import score_column

#: The fewest examples that are judged.
FEWEST_ROWS = 20

#: A column with a larger share of missing values is mostly missing.
MOSTLY_MISSING = 0.5

#: The share of the errors of a constant that a column alone leaves if it tells the target: classes, and values.
LEFT_BY_LEAK = {True: 0.05, False: 0.1}

#: A class with a larger share makes the target nearly constant. A class with less than a tenth of an equal share, or
#: fewer than ten examples, is rare (skore: under 10 %).
NEAR_CONSTANT, RARE, FEWEST_OF_CLASS = 0.95, 0.1, 10

#: An outlier is so many interquartile ranges away from the median, also on a logarithmic scale.
FAR = 15

#: The least share of a value that stands for a missing one, far from all others.
SENTINEL = 0.01

#: The correlation of two columns that say the same (skore: 0.9), and the most columns of which pairs are compared.
CORRELATION, MOST_PAIRED = 0.9, 200

#: The share of words that the training split does not have, from which a split is not what the model can read.
UNKNOWN = 0.5

#: The share of empty texts that is told.
EMPTY = 0.005

Array = np.ndarray[Any, Any]


def find_faults(sample: SplitSample, with_hints: bool = True) -> list[DataFinding]:
    """Returns the faults that a sample of the training split shows; without most of the level `hint` on demand."""
    if len(sample) < FEWEST_ROWS:
        return []
    rules = (*FAULT_RULES, *HINT_RULES) if with_hints else FAULT_RULES
    return [finding for rule in rules for finding in rule(sample)]


def name_columns(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more


def is_absent(values: Array) -> Array:
    """Returns which values of a column [n] are missing."""
    return np.asarray(values == "" if values.dtype == object else ~np.isfinite(values.astype(np.float64)))


def find_constant(sample: SplitSample) -> Iterator[DataFinding]:
    found = []
    for name, values in sample.list_kind(NUMBER, CATEGORY, TEXT, DATE).items():
        known = values[~is_absent(values)]
        if len(known) and (known == known[0]).all() and len(known) > MOSTLY_MISSING * len(values):
            found.append(name)
    if found:
        text = f"the same value in every row: {name_columns(found)}"
        yield DataFinding("constant column", FAULT, text, "one distinct value", found)


def find_copies(sample: SplitSample) -> Iterator[DataFinding]:
    seen: dict[Any, str] = {}
    for name, values in sample.list_kind(NUMBER, CATEGORY, TEXT, DATE).items():
        key = tuple(values.tolist()) if values.dtype == object else np.nan_to_num(values.astype(np.float64)).tobytes()
        first = seen.setdefault(key, name)
        is_constant = len(set(values.tolist())) <= 1
        if first != name and not is_constant:
            yield DataFinding(
                "duplicate columns", FAULT, f"{name} is a copy of {first}", "equal in every row", [first, name]
            )


def find_mostly_missing(sample: SplitSample) -> Iterator[DataFinding]:
    for name, values in sample.list_kind(NUMBER, CATEGORY, TEXT, DATE).items():
        share = float(is_absent(values).mean())
        if share > MOSTLY_MISSING:
            text = f"{name}: {share:.0%} of the values are missing"
            yield DataFinding("mostly missing", FAULT, text, "more than half", [name])


def find_ids(sample: SplitSample) -> Iterator[DataFinding]:
    """Finds columns that number or name the rows: texts without spaces, or dense whole numbers, all different."""
    for name, values in sample.list_kind(NUMBER, CATEGORY, TEXT).items():
        count = len(values)
        if count < 5 * FEWEST_ROWS or is_absent(values).any() or len(set(values.tolist())) < count:
            continue
        if values.dtype == object:
            is_id = all(0 < len(text) <= 40 and " " not in text for text in values)
        else:
            span = float(values.max()) - float(values.min()) + 1
            is_id = bool((values == np.floor(values)).all()) and span <= 2 * max(count, sample.examples)
        if is_id:
            first = values[0] if values.dtype == object else f"{values[0]:g}"
            text = f"{name}: a different value in each row, such as {first}; drop it"
            yield DataFinding("id column", FAULT, text, "all values differ", [name])


def find_leaks(sample: SplitSample) -> Iterator[DataFinding]:
    """Finds columns from which a model of one column tells a target."""
    for target, answers in sample.targets.items():
        is_class = answers.dtype == object
        known = answers != "" if is_class else np.isfinite(answers)
        numbers = np.unique(answers[known].astype(str), return_inverse=True)[1] if is_class else answers[known]
        for name, values in sample.list_kind(NUMBER, CATEGORY, TEXT, DATE).items():
            score, constant = score_column(values[known], numbers, is_class)
            wrong, usual = (1 - score, 1 - constant) if is_class else (score, constant)
            if usual > 0 and wrong <= LEFT_BY_LEAK[is_class] * usual:
                figure = f"accuracy {score:.3f}" if is_class else f"mean absolute error {score:.4g}"
                told = f"the target {target}".strip()
                text = f"{name} alone tells {told}: {figure}, a constant {constant:.4g}"
                because = f"it leaves at most {LEFT_BY_LEAK[is_class]:.0%} of the errors of a constant"
                yield DataFinding("leak", FAULT, text, because, [name])


def find_class_faults(sample: SplitSample) -> Iterator[DataFinding]:
    for target, answers in sample.targets.items():
        label = f"target {target}".strip()
        if answers.dtype != object:
            if len(np.unique(answers)) == 1:
                yield DataFinding(
                    "near-constant target", FAULT, f"{label}: one value only", "one distinct value", [label]
                )
            continue
        counts = Counter(each for each in answers.tolist() if each)
        total, scale = counts.total(), sample.examples / max(1, len(answers))
        (top, most), *_ = counts.most_common(1) or [("", 0)]
        if total and most / total > NEAR_CONSTANT:
            text = f"{label}: {most / total:.1%} of the examples are {top}"
            yield DataFinding("near-constant target", FAULT, text, "a class of more than 95 %", [label])
        rare = [
            f"{name} ({round(count * scale):,})"
            for name, count in counts.items()
            if count * scale < FEWEST_OF_CLASS or count / total < RARE / len(counts)
        ]
        if rare and len(counts) > 1:
            text = f"{label}: few examples of {name_columns(rare)}"
            yield DataFinding("rare class", HINT, text, "fewer than 10, or a tenth of an equal share", [label])


def find_outliers(sample: SplitSample) -> Iterator[DataFinding]:
    for name, values in sample.list_kind(NUMBER).items():
        numbers = values[np.isfinite(values)].astype(np.float64)
        is_far = find_far(numbers)
        if len(numbers) and numbers.min() > 0:
            is_far &= find_far(np.log(numbers))
        count = int(is_far.sum())
        if 0 < count <= max(1, SENTINEL * len(numbers)):
            worst = numbers[is_far][np.abs(numbers[is_far] - np.median(numbers)).argmax()]
            text = f"{name}: {count:,} of {len(numbers):,} values are far from all others, such as {worst:.6g}"
            yield DataFinding("outliers", HINT, text, "15 interquartile ranges from the median", [name])


def find_far(numbers: Array) -> Array:
    """Returns which numbers are outliers, [n] bool; none if half of them are equal."""
    if len(numbers) < FEWEST_ROWS:
        return np.zeros(len(numbers), bool)
    low, middle, high = np.quantile(numbers, (0.25, 0.5, 0.75))
    return np.asarray(np.abs(numbers - middle) > FAR * (high - low) if high > low else np.zeros(len(numbers), bool))


def find_sentinels(sample: SplitSample) -> Iterator[DataFinding]:
    """Finds a number that stands for a missing one: frequent, and far from all others."""
    for name, values in sample.list_kind(NUMBER).items():
        numbers = values[np.isfinite(values)].astype(np.float64)
        for extreme in {float(numbers.min()), float(numbers.max())} if len(numbers) else ():
            is_extreme = numbers == extreme
            others = numbers[~is_extreme]
            share = float(is_extreme.mean())
            if not SENTINEL <= share < 0.5 or len(np.unique(others)) < FEWEST_ROWS:
                continue
            spread = float(np.subtract(*np.quantile(others, (0.95, 0.05))))
            if np.abs(others - extreme).min() > 1.5 * spread:
                text = (
                    f"{name}: {extreme:g} is far from all others, and {share:.1%} of the values: does it mean missing?"
                )
                yield DataFinding("sentinel", HINT, text, "at least 1 %, and 1.5 times the spread away", [name])


def find_correlated(sample: SplitSample) -> Iterator[DataFinding]:
    columns = sample.list_kind(NUMBER) if sample.is_table else {}
    names = list(columns)[:MOST_PAIRED]
    spread = [name for name in names if len(np.unique(columns[name])) > 2]
    if len(spread) < 2:
        return
    numbers = [columns[name].astype(np.float64) for name in spread]
    matrix = np.stack([np.nan_to_num(each, nan=float(np.nanmean(each))) for each in numbers])
    with np.errstate(invalid="ignore", divide="ignore"):
        related = np.abs(np.corrcoef(matrix))
    for a, b in zip(*np.nonzero(np.triu(related, 1) > CORRELATION), strict=True):
        if not np.array_equal(matrix[a], matrix[b]):
            pair = [spread[a], spread[b]]
            text = f"{pair[0]} and {pair[1]} have a correlation of {related[a, b]:.2f}"
            yield DataFinding("correlated columns", HINT, text, "above 0.9", pair)


def find_variants(sample: SplitSample) -> Iterator[DataFinding]:
    targets = {f"target {name}".strip(): values for name, values in sample.targets.items()}
    for name, values in {**sample.list_kind(CATEGORY), **targets}.items():
        if values.dtype != object:
            continue
        forms: dict[str, set[str]] = {}
        for value in set(values.tolist()):
            forms.setdefault(" ".join(value.split()).casefold(), set()).add(value)
        twice = next((sorted(each) for each in forms.values() if len(each) > 1), None)
        if twice:
            text = f"{name}: {' and '.join(map(repr, twice[:3]))} differ in case or spaces only"
            yield DataFinding("variants", HINT, text, "equal without case and spaces", [name])


def find_empty_texts(sample: SplitSample) -> Iterator[DataFinding]:
    for name, values in sample.list_kind(TEXT).items():
        share = float(np.mean([not text.strip() for text in values]))
        if EMPTY < share <= MOSTLY_MISSING:
            text = f"{name}: {share:.1%} of the texts are empty"
            yield DataFinding("empty texts", HINT, text, "more than 0.5 %", [name])


def find_time_overlap(splits: Mapping[str, SplitSample]) -> Iterator[DataFinding]:
    """Finds dates of the training split that are later than dates of the test split."""
    train, test = splits.get("train"), splits.get("test")
    if train is None or test is None:
        return
    for name, values in train.list_kind(DATE).items():
        tested = test.columns.get(name)
        if tested is None:
            continue
        before, after = (sorted({each for each in part.tolist() if each}) for part in (values, tested))
        if len(before) > FEWEST_OF_CLASS and after and before[-1] > after[math.floor(0.05 * len(after))]:
            text = f"{name}: the training split goes to {before[-1]}, and the test split begins at {after[0]}"
            yield DataFinding("time order", HINT, text, "test rows that are earlier than training rows", [name])


def find_unknown_words(splits: Mapping[str, SplitSample]) -> Iterator[DataFinding]:
    """Finds columns of texts in which a split has mostly words that the training split does not have.

    A half of the training split is compared with the other half: texts such as names share few words anyway.
    """
    others = [(split, sample) for split, sample in splits.items() if split != "train"]
    for name, values in splits["train"].list_kind(TEXT).items() if others else ():
        texts = [find_words(text) for text in values.tolist()]
        usual = measure_unknown(texts[::2], texts[1::2])
        for split, sample in others:
            share = measure_unknown(texts, [find_words(text) for text in sample.columns[name].tolist()])
            if share > max(UNKNOWN, usual + UNKNOWN / 2):
                text = f"{name}: the training split does not have {share:.0%} of the words of the split {split}"
                yield DataFinding("unknown words", FAULT, text, f"between halves of train it is {usual:.0%}", [name])


def find_words(text: str) -> list[str]:
    """Returns the words of a text in lower case; each character of scripts without spaces is one."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|\w+", unicodedata.normalize("NFC", text).lower())


def measure_unknown(known: Sequence[Sequence[str]], texts: Sequence[Sequence[str]]) -> float:
    """Returns the share of the words of some texts that others do not have; 0 without words."""
    learned = set(itertools.chain.from_iterable(known))
    words = list(itertools.chain.from_iterable(texts))
    return sum(word not in learned for word in words) / max(len(words), 1)


#: The rules about the training split: those that find faults, and those that only find what is to be looked at.
FAULT_RULES: tuple[Callable[[SplitSample], Iterable[DataFinding]], ...] = (
    *(find_constant, find_copies, find_mostly_missing, find_ids, find_leaks, find_class_faults),
)
HINT_RULES: tuple[Callable[[SplitSample], Iterable[DataFinding]], ...] = (
    *(find_outliers, find_sentinels, find_correlated, find_variants, find_empty_texts),
)
