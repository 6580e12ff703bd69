from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.dataset.files import examples, holds, options, prepared, refused, write


def loaded(base: Path) -> Any:
    from scaleflow import dataset
    from scaleflow.dataset.text_folder import TextFolder

    source = TextFolder(str(base), vocabulary=5, tokens=3)
    splits = dataset.prepare_splits(source, options(cache="memory"), 0)
    learned = dict(zip(splits.train.targets[:, 0].tolist(), splits.train.inputs.tolist(), strict=True))
    front = splits.preprocessing_layers[("",)]().predict_on_batch(splits.sample)
    return source.inputs, source.outputs, examples(source, "test"), splits.inputs, learned, splits.sample, front


def test_texts_are_raw_strings_and_numbers_after_the_preprocessing(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    write(tmp_path / "train/bad/1.txt", "öde, öde film!\n")
    write(tmp_path / "train/good/1.txt", "good film film film")
    write(tmp_path / "train/good/notes.doc", "no text")
    write(tmp_path / "test/bad/1.txt", "")
    inputs, outputs, test, features, learned, sample, front = isolated(loaded, tmp_path)
    assert (inputs.shape, inputs.dtype) == ((), "string")
    assert (outputs.kind, outputs.names) == ("binary", ("bad", "good"))
    assert (test[0], [target.tolist() for target in test[1]]) == ([b""], [[0.0]])
    assert (features.shape, features.dtype, features.vocabulary) == ((3,), "int32", 5)
    assert learned == {1.0: [4, 2, 2], 0.0: [3, 3, 2]}  # film is the most frequent, then öde, good
    assert sorted(sample.tolist()) == sorted(["öde, öde film!\n".encode(), b"good film film film"])
    assert sorted(front.tolist()) == sorted(learned.values())


def wrong(base: Path) -> Any:
    from scaleflow.dataset.text_folder import TextFolder

    make = functools.partial(TextFolder, str(base), test=0)
    empty = functools.partial(TextFolder, str(base), classes=["good", "none"])
    return prepared(make), prepared(make, on_bad_example="skip"), refused([empty, functools.partial(make, tokens=0)])


def test_a_text_that_is_not_utf8_is_named_or_left_out(isolated: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "good/1.txt", "fine")
    write(tmp_path / "bad/1.txt", "fine, too")
    (tmp_path / "none").mkdir()
    latin = write(tmp_path / "bad/2.txt", "öde".encode("latin-1"))
    first, _, refusals = isolated(wrong, tmp_path)
    assert "none has no file that ends in .txt" in first
    (tmp_path / "none").rmdir()
    write(tmp_path / "none", "")
    message, (counts, (note,)), refusals = isolated(wrong, tmp_path)
    holds([message], [[str(latin), "it is not UTF-8", "dataset.on_bad_example=skip"]])
    assert counts == {"train": 2}
    holds([note], [["1 of the 3", str(latin)]])
    holds(refusals, [["dataset.classes: there is no folder", "bad, good"], ["dataset.tokens=0"]])
