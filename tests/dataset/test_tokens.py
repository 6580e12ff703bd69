from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from tests.conftest import Command


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home/scaleflow/tokens"


def write_texts(folder: Path) -> Path:
    """Four documents, as text files, as JSON lines and as Parquet."""
    import pyarrow
    import pyarrow.parquet

    texts = ["a b a", "b c", "", "a c d"]
    for number, text in enumerate(texts):
        (folder / "text").mkdir(parents=True, exist_ok=True)
        (folder / "text" / f"{number}.txt").write_text(text)
    rows = [json.dumps({"id": number or "a", "body": text}) for number, text in enumerate(texts)]
    (folder / "lines.jsonl").write_text("\n".join(rows))
    pyarrow.parquet.write_table(pyarrow.table({"body": texts}), folder / "rows.parquet")
    return folder


def write_tokenizer(path: Path) -> str:
    import tokenizers

    words = {"<end>": 0, "a": 1, "b": 2, "c": 3, "d": 300}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize("place", ["text", "lines.jsonl", "rows.parquet"])
def test_documents_of_every_format_give_the_same_tokens(tmp_path: Path, place: str) -> None:
    from scaleflow.dataset.tokens import Tokens

    folder = write_texts(tmp_path)
    whole = Tokens(str(folder / place), tokens=1, test=0.0, column="body").load("train")
    assert bytes(whole.inputs.ravel()) + bytes(whole.targets[-1]) == b"a b a\nb c\n\na c d"
    file = write_tokenizer(tmp_path / "my.json")
    source = Tokens(str(folder / place), tokens=2, test=0.0, column="body", tokenizer=file, separator="<end>")
    assert (source.inputs.dtype, source.inputs.vocabulary, source.outputs.shape) == ("int32", 301, (2, 301))
    train = source.load("train")
    ids = [1, 2, 1, 0, 2, 3, 0, 0, 1, 3, 300]
    assert train.inputs.ravel().tolist() == ids[:10]
    assert train.targets.ravel().tolist() == ids[1:]


def test_json_lines_may_be_long(tmp_path: Path) -> None:
    from scaleflow.dataset.reading.corpus import read_documents

    texts = ["a", "b" * 3_000_000, "c"]  # pyarrow reads blocks of 1 MiB
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert [b"".join(each).decode() for each in read_documents(str(tmp_path / "a.jsonl"), "text", False)] == texts


def test_tokens_are_made_once_and_shared(tmp_path: Path, cache: Path) -> None:
    from scaleflow.dataset.tokens import Tokens

    (tmp_path / "a.txt").write_text("abcdefgh")
    first = Tokens(str(tmp_path / "a.txt"), tokens=2).load("train").inputs
    (file,) = cache.glob("*.uint8")
    made = file.stat().st_ino
    again = Tokens(str(tmp_path / "a.txt"), tokens=2).load("train").inputs
    assert isinstance(first, np.memmap)
    assert again.tolist() == first.tolist()
    assert file.stat().st_ino == made  # read, not made again
    Tokens(str(tmp_path / "a.txt"), tokens=3).load("train")
    assert len(list(cache.glob("*.uint8"))) == 1  # the length of a sequence is no part of it
    (tmp_path / "a.txt").write_text("other text")
    assert bytes(Tokens(str(tmp_path / "a.txt"), tokens=2).load("train").inputs[0]) == b"ot"
    assert len(list(cache.glob("*.uint8"))) == 2
    assert not list(cache.glob("*.part"))


def learned_words(folder: Path) -> Any:
    from scaleflow.dataset.tokens import Tokens

    source = Tokens(str(folder), tokens=3, tokenizer="words", vocabulary=4)
    again = Tokens(str(folder), tokens=3, tokenizer="words", vocabulary=4)
    whole = Tokens(str(folder), tokens=3, tokenizer="words")
    found = [np.array(each.load(split).inputs) for each in (source, again) for split in ("train", "test")]
    return source.inputs.vocabulary, whole.inputs.vocabulary, found


def test_words_are_learned_from_the_training_files(isolated: Callable[..., Any], tmp_path: Path, cache: Path) -> None:
    (tmp_path / "train.txt").write_text("The cat, the dog. The cat!")
    (tmp_path / "test.txt").write_text("the bird the cat")
    vocabulary, whole, (train, test, *again) = isolated(learned_words, tmp_path)
    assert (vocabulary, whole) == (4, 5)
    assert train.tolist() == [[2, 3, 2]]
    assert test.tolist() == [[2, 1, 2]]
    assert [each.tolist() for each in again] == [train.tolist(), test.tolist()]
    assert sorted(json.loads(path.read_text()) for path in cache.glob("*.json")) == [
        ["the", "cat"],
        ["the", "cat", "dog"],
    ]


def hub_tokens(folder: Path) -> Any:
    import keras_hub

    from scaleflow.dataset.tokens import Tokens

    preset = str(folder / "preset")
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=7, num_layers=1, num_heads=1, hidden_dim=4, intermediate_dim=4
    )
    backbone.save_to_preset(preset)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "the"]
    keras_hub.tokenizers.BertTokenizer(vocabulary=words).save_to_preset(preset)
    (folder / "a.txt").write_text("the cat the dog the")
    source = Tokens(str(folder / "a.txt"), tokens=2, test=0.0, tokenizer=preset)
    return source.inputs, np.array(source.load("train").inputs)


@pytest.mark.slow  # imports KerasHub
def test_a_tokenizer_of_keras_hub_is_used(isolated: Callable[..., Any], tmp_path: Path) -> None:
    inputs, ids = isolated(hub_tokens, tmp_path)
    assert inputs.vocabulary == 7
    assert ids.tolist() == [[6, 5], [6, 1]]


@pytest.mark.slow
def test_a_gpt_trains_on_json_lines_with_a_tokenizer(command: Command, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "corpus")
    lines = (folder / "lines.jsonl").read_text() * 40
    (folder / "lines.jsonl").write_text(lines)
    ended = command(
        "dataset=tokens", f"dataset.data_dir={folder / 'lines.jsonl'}", "dataset.column=body", "dataset.tokens=8",
        f"dataset.tokenizer={write_tokenizer(tmp_path / 'my.json')}", f"dataset.cache_dir={tmp_path / 'kept'}",
        "model=gpt", "model.width=16", "model.blocks=1", "model.heads=2", "training.max_steps=3", "tracking=none",
        "training.batch_size=8",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert len(list((tmp_path / "kept").glob("*.uint8")) + list((tmp_path / "kept").glob("*.int32"))) == 1


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
    for key, value, words in (
        ("tokenizer", "none.json", "No such file"),
        ("tokenizer", str(tmp_path / "bad.json"), "is no file of the library tokenizers"),
        ("tokenizer", 3, "expected bytes, words"),
        ("separator", 3, "expected text"),
        ("standardize", "no", "expected one of"),
        ("cache_dir", str(tmp_path / "a.txt"), "cannot be kept there"),
    ):
        (tmp_path / "bad.json").write_text("{}")
        with pytest.raises(ConfigError, match=words) as refused:
            Tokens(str(tmp_path / "a.txt"), tokens=2, **{key: value}).load("train")
        assert str(refused.value).startswith(f"dataset.{key}={value}")
    for name, content, words in (
        (
            "a.jsonl",
            '{"texts": "a"}\n{"texts": 1, "id": 2}\n',
            "a.jsonl cannot be read: .* changed from string to number",
        ),
        ("b.jsonl", '{"texts": 1, "id": 2}\n', "column=text: .* has no such column; it has texts, id"),
        ("c.jsonl", '{"text": 5}\n', "after row 0: .*expected rows with a text in the column text"),
        ("f.jsonl", "{'text': 5}\n", "cannot be read after row 0: JSON parse error: Missing a name"),
        ("d.parquet", "none", "d.parquet cannot be read: Parquet file size is 4 bytes"),
        ("e.txt", b"a\xff b", "is not UTF-8 at byte 1"),
    ):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigError, match=words):
            Tokens(str(path), tokens=2, tokenizer=write_tokenizer(tmp_path / "my.json")).load("train")
