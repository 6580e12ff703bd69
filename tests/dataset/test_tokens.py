from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scaleflow.errors import ConfigError


def test_each_position_has_the_next_byte_as_its_target(tmp_path: Path) -> None:
    from scaleflow.dataset.tokens import Tokens

    (tmp_path / "b.txt").write_text("fghij")
    (tmp_path / "a.txt").write_text("abcde")
    source = Tokens(str(tmp_path), tokens=3, test=0.0)
    assert source.splits == ("train",)
    assert (source.inputs.shape, source.inputs.vocabulary, source.outputs.shape) == ((3,), 256, (3, 256))
    train = source.load("train")
    assert [bytes(row) for row in train.inputs] == [b"abc", b"de\n", b"fgh"]
    assert [bytes(row) for row in train.targets] == [b"bcd", b"e\nf", b"ghi"]


def test_the_end_of_the_text_is_the_test_split(tmp_path: Path) -> None:
    from scaleflow.dataset.tokens import Tokens

    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    source = Tokens(str(tmp_path / "a.txt"), tokens=4, test=0.25)
    assert source.splits == ("train", "test")
    train, test = source.load("train"), source.load("test")
    assert np.array_equal(train.inputs.ravel(), np.arange(72))
    assert test.inputs[0].tolist() == [75, 76, 77, 78]


def test_files_name_their_splits(tmp_path: Path) -> None:
    from scaleflow.dataset.tokens import Tokens

    for split in ("train", "val", "test"):
        (tmp_path / f"{split}.txt").write_text(split * 5)
    source = Tokens(str(tmp_path), tokens=4)
    assert sorted(source.splits) == ["test", "train", "validation"]
    assert bytes(source.load("validation").inputs[0]) == b"valv"


def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    from scaleflow.dataset.tokens import Tokens

    with pytest.raises(ConfigError, match="there is no such file or folder"):
        Tokens(str(tmp_path / "nothing"))
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ConfigError, match="fewer than one sequence of 128"):
        Tokens(str(tmp_path)).load("train")
    with pytest.raises(ConfigError, match=r"dataset\.tokens=0"):
        Tokens(str(tmp_path), tokens=0)
