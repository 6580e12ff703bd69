"""Rules that find faults of columns and targets, repeated examples, and blank pictures."""

import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from scaleflow.dataset.column_kinds import CATEGORY, DATE, NUMBER, PICTURE, TEXT
from scaleflow.dataset.schema import SplitSample
from scaleflow.evaluation.single_column import score_column
from scaleflow.features.checks.drift import FAULT, HINT, MAX_NAMED, DataFinding
from scaleflow.interfaces.formatting import join_first

#: Minimum number of examples to judge.
MIN_ROWS = 20

#: A column with a larger share of missing values is mostly missing.
MOSTLY_MISSING = 0.5

#: A column leaks the target if it alone leaves at most this share of a constant's errors. Keys: is the target a class?
LEFT_BY_LEAK = {True: 0.05, False: 0.1}

#: A target is nearly constant if one class has a larger share than NEAR_CONSTANT. A class is rare if it has less than
#: RARE of an equal share (skore: under 10 %), or fewer than MIN_OF_CLASS examples.
NEAR_CONSTANT = 0.95
RARE = 0.1
MIN_OF_CLASS = 10

#: An outlier is this many interquartile ranges away from the median, also on a logarithmic scale.
FAR = 15

#: Minimum share of a sentinel: a number that stands for "missing", far from all other numbers.
SENTINEL = 0.01

#: Two columns are redundant above this correlation (skore: 0.9). Pairs are compared among the first MAX_PAIRED columns.
CORRELATION = 0.9
MAX_PAIRED = 200

#: A model cannot read a split if more than this share of its words is not in the training split.
UNKNOWN = 0.5

#: Empty texts are reported above this share.
EMPTY = 0.005

Array = np.ndarray[Any, Any]


def find_faults(sample: SplitSample, with_hints: bool = True) -> list[DataFinding]:
    """Returns the faults in a sample of the training split. `with_hints` adds the rules that only give hints."""
    if len(sample) < MIN_ROWS:
        return []
    rules = (*FAULT_RULES, *HINT_RULES) if with_hints else FAULT_RULES
    findings: list[DataFinding] = []
    for rule in rules:
        findings += rule(sample)
    return findings


def is_absent(values: Array) -> Array:
    """Returns which values of a column [n] are missing: [n] bool."""
    if values.dtype == object:
        return np.asarray(values == "")
    return np.asarray(~np.isfinite(values.astype(np.float64)))


def find_constant(sample: SplitSample) -> Iterator[DataFinding]:
    """Finds columns with one value. Columns that are mostly missing have a rule of their own."""
    constant = []
    for name, values in sample.list_kind(NUMBER, CATEGORY, TEXT, DATE).items():
        known = values[~is_absent(values)]
        if len(known) and (known == known[0]).all() and len(known) > MOSTLY_MISSING * len(values):
            constant.append(name)
    if constant:
        text = f"the same value in every row: {join_first(constant, MAX_NAMED)}"
        yield DataFinding("constant column", FAULT, text, because="one distinct value", columns=constant)


def find_copies(sample: SplitSample) -> Iterator[DataFinding]:
    """Finds columns that are equal to an earlier one in every row."""
    seen: dict[Any, str] = {}
    for name, values in sample.list_kind(NUMBER, CATEGORY, TEXT, DATE).items():
        if values.dtype == object:
            key: Any = tuple(values.tolist())
        else:
            key = np.nan_to_num(values.astype(np.float64)).tobytes()
        first = seen.setdefault(key, name)
        is_constant = len(set(values.tolist())) <= 1
        if first != name and not is_constant:
            text = f"{name} is a copy of {first}"
            pair = [first, name]
            yield DataFinding("duplicate columns", FAULT, text, because="equal in every row", columns=pair)


def find_mostly_missing(sample: SplitSample) -> Iterator[DataFinding]:
    for name, values in sample.list_kind(NUMBER, CATEGORY, TEXT, DATE).items():
        share = float(is_absent(values).mean())
        if share > MOSTLY_MISSING:
            text = f"{name}: {share:.0%} of the values are missing"
            yield DataFinding("mostly missing", FAULT, text, because="more than half", columns=[name])


def find_ids(sample: SplitSample) -> Iterator[DataFinding]:
    """Finds columns that number or name the rows: texts without spaces, or dense whole numbers, all different."""
    for name, values in sample.list_kind(NUMBER, CATEGORY, TEXT).items():
        if is_id(values, sample.examples):
            first = values[0] if values.dtype == object else f"{values[0]:g}"
            text = f"{name}: a different value in each row, such as {first}; drop it"
            yield DataFinding("id column", FAULT, text, because="all values differ", columns=[name])


def is_id(values: Array, examples: int) -> bool:
    """Returns whether the values of a sample number or name its rows. `examples` is the size of the whole split."""
    count = len(values)
    if values.ndim > 1 or count < 5 * MIN_ROWS or is_absent(values).any() or len(set(values.tolist())) < count:
        return False
    if values.dtype == object:
        return all(0 < len(text) <= 40 and " " not in text for text in values)
    span = float(values.max()) - float(values.min()) + 1
    return bool((values == np.floor(values)).all()) and span <= 2 * max(count, examples)


def find_leaks(sample: SplitSample) -> Iterator[DataFinding]:
    """Finds columns that alone predict a target."""
    for target, answers in sample.targets.items():
        is_class = answers.dtype == object
        if is_class:
            known = answers != ""
            _, numbers = np.unique(answers[known].astype(str), return_inverse=True)
        else:
            known = np.isfinite(answers)
            numbers = answers[known]
        for name, values in sample.list_kind(NUMBER, CATEGORY, TEXT, DATE).items():
            score, constant = score_column(values[known], numbers, is_class)
            if is_class:
                error = 1 - score
                constant_error = 1 - constant
                quality = f"accuracy {score:.3f}"
            else:
                error = score
                constant_error = constant
                quality = f"mean absolute error {score:.4g}"
            if constant_error > 0 and error <= LEFT_BY_LEAK[is_class] * constant_error:
                target_name = f"the target {target}".strip()
                text = f"{name} alone tells {target_name}: {quality}, a constant {constant:.4g}"
                because = f"it leaves at most {LEFT_BY_LEAK[is_class]:.0%} of the errors of a constant"
                yield DataFinding("leak", FAULT, text, because=because, columns=[name])


def find_class_faults(sample: SplitSample) -> Iterator[DataFinding]:
    for target, answers in sample.targets.items():
        label = f"target {target}".strip()
        if answers.dtype != object:
            if len(np.unique(answers[np.isfinite(answers)])) == 1:
                text = f"{label}: one value only"
                yield DataFinding("near-constant target", FAULT, text, because="one distinct value", columns=[label])
            continue
        counts = Counter(answers.tolist())
        del counts[""]  # an example without a class
        if not counts:
            continue
        total = counts.total()
        scale = sample.examples / len(answers)  # the sample may be a part of the split
        most_frequent, count = counts.most_common(1)[0]
        if count / total > NEAR_CONSTANT:
            text = f"{label}: {count / total:.1%} of the examples are {most_frequent}"
            yield DataFinding("near-constant target", FAULT, text, because="a class of more than 95 %", columns=[label])
        rare = []
        for name, count in counts.items():
            if count * scale < MIN_OF_CLASS or count / total < RARE / len(counts):
                rare.append(f"{name} ({round(count * scale):,})")
        if rare and len(counts) > 1:
            text = f"{label}: few examples of {join_first(rare, MAX_NAMED)}"
            because = "fewer than 10, or a tenth of an equal share"
            yield DataFinding("rare class", HINT, text, because=because, columns=[label])


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
            yield DataFinding("outliers", HINT, text, because="15 interquartile ranges from the median", columns=[name])


def find_far(numbers: Array) -> Array:
    """Returns which numbers are outliers, [n] bool. None are if both quartiles are equal."""
    if len(numbers) < MIN_ROWS:
        return np.zeros(len(numbers), bool)
    low, middle, high = np.quantile(numbers, (0.25, 0.5, 0.75))
    if low == high:
        return np.zeros(len(numbers), bool)
    return np.asarray(np.abs(numbers - middle) > FAR * (high - low))


def find_sentinels(sample: SplitSample) -> Iterator[DataFinding]:
    """Finds a number that stands for "missing": frequent, and far from all other numbers."""
    for name, values in sample.list_kind(NUMBER).items():
        numbers = values[np.isfinite(values)].astype(np.float64)
        if not len(numbers):
            continue
        for extreme in {float(numbers.min()), float(numbers.max())}:
            is_extreme = numbers == extreme
            others = numbers[~is_extreme]
            share = float(is_extreme.mean())
            if not SENTINEL <= share < 0.5 or len(np.unique(others)) < MIN_ROWS:
                continue
            spread = float(np.subtract(*np.quantile(others, (0.95, 0.05))))
            if np.abs(others - extreme).min() > 1.5 * spread:
                text = f"{name}: {extreme:g} is far from all others, and {share:.1%} of the values: "
                text += "does it mean missing?"
                because = "at least 1 %, and 1.5 times the spread away"
                yield DataFinding("sentinel", HINT, text, because=because, columns=[name])


def find_correlated(sample: SplitSample) -> Iterator[DataFinding]:
    """Finds pairs of columns of numbers with a high correlation that are not copies. Missing values count as mean."""
    if not sample.is_table:
        return
    columns = sample.list_kind(NUMBER)
    names = []
    rows = []
    for name in list(columns)[:MAX_PAIRED]:
        if len(np.unique(columns[name])) > 2:
            numbers = columns[name].astype(np.float64)
            names.append(name)
            rows.append(np.nan_to_num(numbers, nan=float(np.nanmean(numbers))))
    if len(names) < 2:
        return
    matrix = np.stack(rows)
    with np.errstate(invalid="ignore", divide="ignore"):
        correlations = np.abs(np.corrcoef(matrix))
    for a, b in np.argwhere(np.triu(correlations, 1) > CORRELATION):
        if not np.array_equal(matrix[a], matrix[b]):
            pair = [names[a], names[b]]
            text = f"{pair[0]} and {pair[1]} have a correlation of {correlations[a, b]:.2f}"
            yield DataFinding("correlated columns", HINT, text, because="above 0.9", columns=pair)


def find_variants(sample: SplitSample) -> Iterator[DataFinding]:
    """Finds categories and classes with several spellings."""
    columns = sample.list_kind(CATEGORY)
    for name, values in sample.targets.items():
        columns[f"target {name}".strip()] = values
    for name, values in columns.items():
        if values.dtype != object:
            continue
        spellings: dict[str, set[str]] = {}
        for value in set(values.tolist()):
            spellings.setdefault(simplify_text(value), set()).add(value)
        variants = [same for same in spellings.values() if len(same) > 1]
        if variants:
            text = f"{name}: {' and '.join(map(repr, sorted(variants[0])[:3]))} differ in case or spaces only"
            yield DataFinding("variants", HINT, text, because="equal without case and spaces", columns=[name])


def simplify_text(text: str) -> str:
    """Returns a text in lower case with single spaces."""
    return " ".join(text.split()).casefold()


def find_empty_texts(sample: SplitSample) -> Iterator[DataFinding]:
    for name, values in sample.list_kind(TEXT).items():
        empty = sum(not text.strip() for text in values)
        share = empty / len(values)
        if EMPTY < share <= MOSTLY_MISSING:
            text = f"{name}: {share:.1%} of the texts are empty"
            yield DataFinding("empty texts", HINT, text, because="more than 0.5 %", columns=[name])


def find_unknown_words(splits: Mapping[str, SplitSample]) -> Iterator[DataFinding]:
    """Finds text columns where most words of a split are not in the training split.

    The usual share comes from comparing two halves of the training split: texts such as names share few words anyway.
    """
    if set(splits) == {"train"}:
        return
    for name, values in splits["train"].list_kind(TEXT).items():
        texts = [find_words(text) for text in values.tolist()]
        usual = measure_unknown(texts[::2], texts[1::2])
        for split, sample in splits.items():
            if split == "train":
                continue
            share = measure_unknown(texts, [find_words(text) for text in sample.columns[name].tolist()])
            if share > max(UNKNOWN, usual + UNKNOWN / 2):
                text = f"{name}: the training split does not have {share:.0%} of the words of the split {split}"
                because = f"between halves of train it is {usual:.0%}"
                yield DataFinding("unknown words", FAULT, text, because=because, columns=[name])


def find_words(text: str) -> list[str]:
    """Returns the words of a text in lower case. In scripts without spaces, each character is a word."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|\w+", unicodedata.normalize("NFC", text).lower())


def measure_unknown(known: Sequence[Sequence[str]], texts: Sequence[Sequence[str]]) -> float:
    """Returns the share of words in `texts` that `known` does not have; 0 without words."""
    learned = set(itertools.chain.from_iterable(known))
    words = list(itertools.chain.from_iterable(texts))
    return sum(word not in learned for word in words) / max(len(words), 1)


#: Rules for the training split. FAULT_RULES find faults, HINT_RULES find only hints.
FAULT_RULES: tuple[Callable[[SplitSample], Iterable[DataFinding]], ...] = (
    find_constant,
    find_copies,
    find_mostly_missing,
    find_ids,
    find_leaks,
    find_class_faults,
)
HINT_RULES: tuple[Callable[[SplitSample], Iterable[DataFinding]], ...] = (
    find_outliers,
    find_sentinels,
    find_correlated,
    find_variants,
    find_empty_texts,
)


#: Repeated examples are reported from this share on: across two splits, and within one.
ACROSS = 0.01
WITHIN = 0.02

#: Two pictures are equal if at most BITS of the 64 bits of their hashes differ, and their thumbnails correlate by
#: ALIKE.
BITS = 3
ALIKE = 0.997

#: A picture is blank if its values differ by at most this share of the range of all pictures.
BLANK = 1e-3

#: Side of a thumbnail in pixels.
SIDE = 16


@dataclass(frozen=True)
class EqualExamples:
    """Which examples of several splits are equal.

    Attributes:
        groups: a number for each example, over all splits in order, the same for equal ones: [n] int64.
        chance: the probability that two examples are equal if their columns are independent; 0 for a single column.
    """

    groups: Array
    chance: float


def find_duplicates(splits: Mapping[str, SplitSample]) -> Iterator[DataFinding]:
    """Finds blank pictures, and examples repeated within the training split, across splits or with another class."""
    names = list(splits)
    lengths = [len(splits[name]) for name in names]
    owner = np.repeat(np.arange(len(names)), lengths)
    first = splits[names[0]]
    pictures = first.list_kind(PICTURE)
    if pictures:
        column = next(iter(pictures))
        of_splits = [splits[name].columns[column] for name in names]
        yield from find_blank(of_splits)
        thumbnails = [make_thumbnails(of_split) for of_split in of_splits]
        equal = EqualExamples(group_pictures(np.concatenate(thumbnails)), chance=0.0)
        what = "pictures"
    elif is_telling(first):
        equal = group_rows(list(splits.values()))
        what = "texts" if len(first.columns) == 1 else "rows"
    else:
        return
    nearly_equal = equal
    except_for = ""
    ids = []
    for name, values in first.columns.items():
        if first.kinds[name] == DATE or is_id(values, first.examples):
            ids.append(name)
    if ids and first.is_table:
        without_ids = [drop_columns(sample, ids) for sample in splits.values()]
        if is_telling(without_ids[0]):
            nearly_equal = group_rows(without_ids)
            except_for = f", but for {join_first(ids, MAX_NAMED)}"
    for a, b in combinations(range(len(names)), 2):
        in_first = np.unique(nearly_equal.groups[owner == a])
        count = int(np.isin(nearly_equal.groups[owner == b], in_first).sum())
        by_chance = allow_for(nearly_equal.chance * lengths[a] * lengths[b])
        if count >= max(1, ACROSS * lengths[b]) and count > by_chance:
            text = f"{count:,} of the {lengths[b]:,} {what} of {names[b]} are in {names[a]}, too{except_for}"
            because = "at least 1 %; of pictures nearly equal ones"
            yield DataFinding("duplicates across splits", FAULT, text, because=because)
    own = equal.groups[owner == 0]
    repeats = len(own) - len(np.unique(own))
    if repeats >= WITHIN * len(own) and repeats > allow_for(equal.chance * len(own) ** 2 / 2):
        text = f"{repeats:,} of the {len(own):,} {what} of {names[0]} repeat others"
        yield DataFinding("duplicates", HINT, text, because="at least 2 %")
    yield from find_contradictions(list(splits.values()), equal, what)


def drop_columns(sample: SplitSample, names: Sequence[str]) -> SplitSample:
    """Returns a sample without some columns."""
    columns = {name: values for name, values in sample.columns.items() if name not in names}
    return replace(sample, columns=columns)


def find_contradictions(samples: list[SplitSample], equal: EqualExamples, what: str) -> Iterator[DataFinding]:
    """Finds equal examples with different classes. `what` names the examples, such as "pictures"."""
    groups = equal.groups
    by_chance = 2 * allow_for(equal.chance * len(groups) ** 2 / 2)
    for target in samples[0].targets:
        if any(target not in sample.targets for sample in samples) or samples[0].targets[target].dtype != object:
            continue
        answers = np.concatenate([sample.targets[target] for sample in samples])
        _, classes = np.unique(answers.astype(str), return_inverse=True)
        is_known = answers != ""
        pairs = np.unique(np.stack([groups, classes], axis=1)[is_known], axis=0)
        contradictory = np.flatnonzero(np.bincount(pairs[:, 0], minlength=1) > 1)
        count = int(np.isin(groups[is_known], contradictory).sum())
        if count >= max(2, 0.002 * len(groups)) and count > by_chance:
            is_example = is_known & (groups == contradictory[0])
            of_example = sorted(set(answers[is_example].tolist()))
            text = f"{count:,} {what} are equal to one of another class, such as {' and '.join(of_example[:2])}"
            yield DataFinding("contradicting labels", FAULT, text, because="equal examples of different classes")


def is_telling(sample: SplitSample) -> bool:
    """Returns whether two equal rows are hardly chance: some column is text, an array, or has many distinct values."""
    if not len(sample):
        return False
    for name, values in sample.columns.items():
        if values.ndim > 1 or sample.kinds[name] is TEXT:
            return True
        if len(set(values.tolist())) > 0.5 * len(values):
            return True
    return False


def allow_for(expected: float) -> float:
    """Returns how many equal pairs chance may give if independent columns give `expected` on average."""
    return 2 * expected + 4 * math.sqrt(expected)


def group_rows(splits: list[SplitSample]) -> EqualExamples:
    """Groups the equal examples of all splits."""
    codes = []
    chance = 1.0
    for name in splits[0].columns:
        values = np.concatenate([split.columns[name] for split in splits])
        if values.dtype == object:
            values = np.array([simplify_text(text) for text in values])
        elif values.ndim > 1:
            flat = np.ascontiguousarray(values.reshape(len(values), -1))
            values = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))).ravel()
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        codes.append(places.reshape(len(values)))
        pairs = float((counts * (counts - 1.0)).sum())
        chance *= pairs / max(1.0, len(values) * (len(values) - 1.0))
    _, groups = np.unique(np.stack(codes, axis=1), axis=0, return_inverse=True)
    return EqualExamples(groups.reshape(-1), chance if len(codes) > 1 else 0.0)


# Pictures ------------------------------------------------------------------------------------


def find_blank(pictures: list[Array]) -> Iterator[DataFinding]:
    """Finds pictures of one colour."""
    not_empty = [of_split for of_split in pictures if len(of_split)]
    total = sum(len(of_split) for of_split in not_empty)
    value_range = max(float(of_split.max()) - float(of_split.min()) for of_split in not_empty)
    count = 0
    for of_split in not_empty:
        count += int((measure_contrast(of_split) <= BLANK * value_range).sum())
    if count >= max(1, 0.001 * total):
        text = f"{count:,} of {total:,} pictures have one colour only"
        yield DataFinding("blank pictures", FAULT, text, because="pixels that hardly differ, 0.1 %")


def measure_contrast(pictures: Array) -> Array:
    flat = pictures.reshape(len(pictures), -1)
    return np.asarray(flat.max(axis=1).astype(np.float64) - flat.min(axis=1))


def make_thumbnails(pictures: Array) -> Array:
    """Returns grey thumbnails [n, SIDE, SIDE] float32 of pictures [n, height, width, channels]."""
    grey = pictures.mean(axis=-1, dtype=np.float32)
    for axis in (1, 2):
        size = grey.shape[axis]
        starts = (np.arange(SIDE) * size) // SIDE
        if size >= SIDE:
            widths = np.diff(np.append(starts, size))  # of the parts that are averaged
            widths = widths[:, None] if axis == 1 else widths
            grey = np.add.reduceat(grey, starts, axis=axis) / widths
        else:
            grey = np.take(grey, starts, axis=axis)
    return np.asarray(grey, np.float32)


def hash_thumbnails(thumbnails: Array) -> Array:
    """Returns perceptual hashes [n, 64] bool: is each of 8 x 8 parts darker than the part to its right?"""
    small = thumbnails.reshape(len(thumbnails), SIDE // 2, 2, SIDE // 2, 2).mean(axis=(2, 4))
    return np.asarray((small < np.roll(small, -1, axis=2)).reshape(len(thumbnails), -1))


def group_pictures(thumbnails: Array) -> Array:
    """Returns a group number for each picture, [n] int64. Nearly equal pictures share a number.

    Two hashes that differ in at most three bits agree in at least one of four parts. So only such pairs are compared.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    flat = thumbnails.reshape(len(thumbnails), -1)
    centred = flat - flat.mean(axis=1, keepdims=True)
    size = np.linalg.norm(centred, axis=1)
    unit = centred / np.maximum(size, 1e-6)[:, None]
    bits = hash_thumbnails(thumbnails)
    pairs: list[tuple[int, int]] = []
    for part in range(4):
        keys = np.packbits(bits[:, 16 * part : 16 * part + 16], axis=1).view(np.uint16).ravel()
        order = np.argsort(keys, kind="stable")
        ends = np.flatnonzero(np.append(np.diff(keys[order].astype(np.int64)) != 0, True))
        start = 0
        for end in ends:
            members = order[start : end + 1]
            start = int(end) + 1
            for place, a in enumerate(members[:-1]):
                rest = members[place + 1 : place + 1001]
                is_near = (bits[rest] != bits[a]).sum(axis=1) <= BITS
                is_near[is_near] = unit[rest[is_near]] @ unit[a] >= ALIKE
                near = rest[is_near & (size[rest] > 1e-3) & (size[a] > 1e-3)]
                pairs += [(int(a), int(b)) for b in near]
    first, second = np.array(pairs, np.int64).reshape(-1, 2).T
    links = csr_array((np.ones(len(pairs)), (first, second)), shape=(len(bits), len(bits)))
    return np.asarray(connected_components(links, directed=False)[1], np.int64)
