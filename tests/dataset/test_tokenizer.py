"""Tokenizers from what a run recorded, text from their tokens, and text that comes token by token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import LearnedState
from scaleflow.runs.learned_state import read_learned_state, write_learned_state


def tell(tokenizer: str, folder: str, text: str, **options: Any) -> dict[str, Any]:
    """What comes of a text's tokens, by the tokenizer of a source and by that of its record alone."""
    from scaleflow.dataset.reading.tokenizer import TextStream, find_unknown, restore_tokenizer
    from scaleflow.dataset.tokens import Tokens

    (Path(folder) / "a.txt").write_text(text)
    source = Tokens(f"{folder}/a.txt", tokens=2, test=0.0, tokenizer=tokenizer, cache_dir=f"{folder}/cache", **options)
    state = LearnedState(source.inputs, source.outputs, source="tokens", reading=source.reading)
    write_learned_state(Path(folder), state)
    record = read_learned_state(Path(folder))
    assert record is not None
    if Path(tokenizer).is_file():
        Path(tokenizer).unlink()  # the record is enough
    again = restore_tokenizer(record.reading["tokenizer"], record.reading.get("learned"))
    ids = [int(token) for token in again.encode(text.encode())]
    stream = TextStream(again, ids[:1])
    pieces = [*map(stream.add, ids[1:]), stream.finish()]
    return {
        "same": np.array_equal(ids, source._tokenizer.encode(text.encode())),
        "vocabulary": again.vocabulary == source._tokenizer.vocabulary,
        "name": again.name == source.reading["tokenizer"] or again.name.startswith("words"),
        "text": again.decode(ids),
        "streamed": again.decode(ids[:1]) + "".join(pieces),
        "pieces": pieces,
        "unknown": find_unknown(again, "the bird sat, bird"),
        "unused": list(again.unused),
    }


def test_bytes_become_text_in_whole_characters(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(tell, "bytes", str(tmp_path), "aäö€ b")
    assert (found["same"], found["vocabulary"], found["name"]) == (True, True, True)
    assert found["text"] == found["streamed"] == "aäö€ b"
    assert found["pieces"] == ["", "ä", "", "ö", "", "", "€", " ", "b", ""]
    assert (found["unknown"], found["unused"]) == ([], [])


def cut() -> list[str]:
    from scaleflow.dataset.reading.tokenizer import Bytes, TextStream

    stream = TextStream(Bytes(), [97])
    return [stream.add(token) for token in (0xC3, 0xFF, 0x62, 0xE2)] + [stream.finish()]


def test_bytes_that_are_no_character_are_marked(isolated: Callable[..., Any]) -> None:
    assert isolated(cut) == ["", "", "\ufffd\ufffdb", "", "\ufffd"]


def test_words_become_text_with_spaces(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(tell, "words", str(tmp_path), "the cat sat. The cat sat on the mat", vocabulary=5)
    assert (found["same"], found["vocabulary"], found["name"]) == (True, True, True)
    assert found["text"] == found["streamed"] == "the cat sat the cat sat the"  # others are not in the vocabulary
    assert found["unknown"] == ["bird"]
    assert found["unused"] == [0, 1]


def test_a_file_of_the_library_tokenizers_is_in_the_record(isolated: Callable[..., Any], tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"])
    made.train_from_iterator(["the cat sat on the mat, the cat"], trainer)
    made.save(str(tmp_path / "my.json"))
    found = isolated(tell, str(tmp_path / "my.json"), str(tmp_path), "the cat € sat")
    assert (found["same"], found["vocabulary"], found["name"]) == (True, True, True)
    assert found["text"] == found["streamed"] == "the cat € sat"
    assert all("\ufffd" not in piece for piece in found["pieces"])
    assert found["unused"] == []


def test_unknown_words_of_a_file_are_named(isolated: Callable[..., Any], tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, "the": 1, "cat": 2, "sat": 3, ",": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "my.json"))
    found = isolated(tell, str(tmp_path / "my.json"), str(tmp_path), "the cat sat")
    assert (found["text"], found["unknown"], found["unused"]) == ("the cat sat", ["bird"], [0])


def encode_in_parts(path: str, parts: list[str]) -> tuple[str, str]:
    """The text of the ids of a whole text, and of the ids of its parts."""
    from scaleflow.dataset.reading.tokenizer import TokenizerFile

    tokenizer = TokenizerFile(path)
    ids = [int(token) for part in parts for token in tokenizer.encode(part.encode())]
    return tokenizer.decode([int(token) for token in tokenizer.encode("".join(parts).encode())]), tokenizer.decode(ids)


@pytest.mark.parametrize("form", ["bytes", "metaspace", "llama"])
def test_blocks_of_a_corpus_have_no_space_before_them(isolated: Callable[..., Any], tmp_path: Path, form: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    if form == "bytes":
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
        made.decoder = tokenizers.decoders.ByteLevel()
    elif form == "metaspace":
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
        made.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    else:
        made.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
        )
        made.decoder = tokenizers.decoders.Sequence(
            [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.Strip(" ", 1, 0)]
        )
    alphabet = [*"the catson,\n\u2581", *tokenizers.pre_tokenizers.ByteLevel.alphabet()]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    made.train_from_iterator(["t h e c a t"], trainer)
    made.enable_truncation(3)
    made.save(str(tmp_path / "my.json"))
    parts = ["the cat", "\n", "sat on", " the cat"]
    assert isolated(encode_in_parts, str(tmp_path / "my.json"), parts) == ("".join(parts), "".join(parts))


def find_changes() -> list[Any]:
    from types import SimpleNamespace

    from scaleflow.dataset.reading.tokenizer import find_corpus_changes

    plain = {"sequence_length": None, "add_bos": False, "compute_dtype": "int32"}
    given = {"sequence_length": 24, "add_bos": True, "add_prefix_space": True, "compute_dtype": "string"}
    return [find_corpus_changes(SimpleNamespace(**each)) for each in (plain, given)]


def test_settings_of_a_preset_for_single_texts_are_changed(isolated: Callable[..., Any]) -> None:
    plain, changed = isolated(find_changes)
    assert plain == {}
    assert changed == {"sequence_length": None, "add_bos": False, "add_prefix_space": False, "dtype": "int32"}


def hub(folder: str) -> dict[str, Any]:
    import shutil

    import keras_hub

    vocabulary = {"<|endoftext|>": 0, "a": 1, "t": 2, "c": 3, "at": 4, "cat": 5, "Ġ": 6, "Ġcat": 7}
    short: dict[str, Any] = {"sequence_length": 2, "add_prefix_space": True}  # both are for a single text
    made = keras_hub.tokenizers.GPT2Tokenizer(vocabulary, ["a t", "c at", "Ġ cat"], **short)
    backbone = keras_hub.models.GPT2Backbone(8, 1, 1, 4, 8, max_sequence_length=8)
    backbone.save_to_preset(f"{folder}/preset")
    made.save_to_preset(f"{folder}/preset")
    found = tell(f"{folder}/preset", folder, "cat cat at")
    shutil.rmtree(f"{folder}/preset")
    from scaleflow.dataset.reading.tokenizer import restore_tokenizer

    record = json.loads(Path(folder, "learned_state.json").read_text())["reading"]
    found["without"] = restore_tokenizer(record["tokenizer"], record["learned"]).decode([5, 7])
    return found


@pytest.mark.slow  # imports KerasHub
def test_a_preset_of_keras_hub_is_in_the_record(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(hub, str(tmp_path), timeout=240)
    assert (found["same"], found["vocabulary"], found["name"]) == (True, True, True)
    assert found["text"] == found["streamed"] == "cat cat at"
    assert found["without"] == "cat cat"


@pytest.mark.parametrize(
    ("name", "described", "message"),
    [
        ("tokenizers 0123", None, "the run's record of its tokenizer, tokenizers 0123, is damaged"),
        ("words 5 lower", None, "the run's record of its tokenizer, words 5 lower, is damaged"),
        ("mine", "x", "the run's record of its tokenizer, mine, is damaged"),
        (
            "keras_hub x 01",
            {"../a.json": ""},
            "dataset.tokenizer=of the run: expected bytes, words, a .json file",
        ),
    ],
)
def test_a_record_without_its_tokenizer_is_refused(
    isolated: Callable[..., Any], name: str, described: Any, message: str
) -> None:
    assert isolated(refuse, name, described).startswith(message)


def refuse(name: str, described: Any) -> str:
    from scaleflow.dataset.reading.tokenizer import restore_tokenizer

    with pytest.raises(ConfigError) as refused:
        restore_tokenizer(name, described)
    return str(refused.value)
