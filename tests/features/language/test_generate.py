"""`scaleflow generate`, `scaleflow.generate_text` and `scaleflow predict` of prompts, with models of real runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command, make_once

SMALL = ("training.max_steps=3", "checkpoint=none", "evaluation=none", "tracking.system_metrics=false")
GPT = ("model=gpt", "model.width=8", "model.heads=2", "model.blocks=1", "dataset.tokens=8", "dataset.cache_dir=cache")


class Trained:
    """A folder with a store and three runs: a model of bytes, one of words, and one of digits."""

    def __init__(self, folder: Path, runs: Sequence[str]) -> None:
        self.command, self.folder = Command(folder), folder
        self.bytes, self.words, self.digits = runs

    def generate(self, run: str, *words: str, code: int = 0) -> tuple[str, str]:
        """What the command prints, on standard output and on standard error."""
        ended = self.command.python("-m", "scaleflow", "generate", run, *words)
        assert ended.returncode == code, ended.stderr
        return ended.stdout, ended.stderr


def train_three(folder: Path) -> list[str]:
    command = Command(folder)
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the cat sat on the mat and the dog sat on the cat. " * 40)
    runs = []
    for words in (
        (*GPT, "dataset=tokens", "dataset.data_dir=text"),
        (*GPT, "dataset=tokens", "dataset.data_dir=text", "dataset.tokenizer=words"),
        ("dataset=digits", "model=linear"),
    ):
        ended = command(*words, *SMALL, "dataset.validation=null")
        assert ended.returncode == 0, ended.stderr
        runs += re.findall(r"^run .*\((\w+)\)$", ended.stdout, re.M)
    return runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(*make_once(tmp_path_factory, "generate", train_three))


def test_the_text_is_on_standard_output_and_the_same_for_a_seed(trained: Trained) -> None:
    options = ("--prompt", "The cat", "--tokens", "30", "--temperature", "0.8", "--top-k", "200", "--top-p", "0.9")
    text, others = trained.generate(trained.bytes, *options, "--seed", "4")
    assert text.startswith("The cat")
    assert re.search(r"^generated +30 tokens, [\d,]+ tokens/s$", others, re.M)
    assert f"({trained.bytes})" in others
    printed, _ = trained.generate(trained.bytes, *options, "--seed", "4", "--json")
    answer = json.loads(printed.splitlines()[-1])
    assert f"The cat{answer['text']}\n" == text
    assert (answer["run_id"], answer["tokens"], answer["prompt"]) == (trained.bytes, 30, "The cat")
    assert answer["model"].startswith("models:/m-")
    other, _ = trained.generate(trained.bytes, *options, "--seed", "5")
    assert other != text


def test_words_come_with_spaces_and_are_those_of_the_run(trained: Trained) -> None:
    text, _ = trained.generate(trained.words, "--prompt", "The cat,", "--tokens", "12")
    assert text.startswith("The cat, ")
    words = text.removeprefix("The cat,").split()
    assert len(words) == 12
    assert set(words) <= {"the", "cat", "sat", "on", "mat", "and", "dog"}


@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        ("digits", ("--prompt", "x"), "this run is no language model of dataset=tokens: it does not predict the next"),
        ("bytes", ("--prompt", ""), "--prompt: the text is empty; give the beginning of the text to generate"),
        ("words", ("--prompt", "!?"), "--prompt: the text is empty"),
        (
            "words",
            ("--prompt", "the bird and the cow"),
            "--prompt: the run does not know 'bird', 'cow': its vocabulary",
        ),
        ("bytes", ("--prompt", "x", "--top-p", "1.5"), "--top-p 1.5: expected a number above 0, at most 1"),
        ("bytes", ("--prompt", "x", "--tokens", "0"), "--tokens 0: expected a whole number, at least 1"),
        ("bytes", ("--prompt", "x", "model=mlp"), "model=mlp: this command takes one value each of hardware="),
    ],
)
def test_wrong_uses_are_refused_in_words(trained: Trained, run: str, words: tuple[str, ...], message: str) -> None:
    text, error = trained.generate(getattr(trained, run), *words, code=2)
    assert message in error
    assert "Error" not in error
    assert text == ""


def continue_in_python(folder: str, run: str) -> dict[str, Any]:
    import os

    import scaleflow

    os.chdir(folder)
    pieces: list[str] = []
    options: dict[str, Any] = {"tokens": 20, "seed": 4, "temperature": 0.5, "uri": "sqlite:///mlflow.db"}
    found = {"text": scaleflow.generate_text(run, "The ", **options, on_text=pieces.append), "pieces": pieces}
    found["again"] = scaleflow.generate_text(run, "The ", **options)
    for name, wrong in (("empty", {"prompt": ""}), ("top_p", {"prompt": "x", "top_p": 0.0})):
        with pytest.raises(scaleflow.ConfigError) as refused:
            scaleflow.generate_text(run, **wrong)
        found[name] = str(refused.value)
    return found


@pytest.mark.slow  # the command calls the same function
def test_python_gets_the_same_text(trained: Trained, isolated: Callable[..., Any]) -> None:
    found = isolated(continue_in_python, str(trained.folder), trained.bytes)
    text, _ = trained.generate(
        trained.bytes, "--prompt", "The ", "--tokens", "20", "--seed", "4", "--temperature", "0.5"
    )
    assert f"The {found['text']}\n" == text
    assert found["text"] == found["again"] == "".join(found["pieces"])
    assert found["empty"].startswith("prompt: the text is empty")
    assert found["top_p"] == "top_p=0.0: expected a number above 0, at most 1"


def predict(trained: Trained, run: str, *words: str, code: int = 0) -> str:
    ended = trained.command.python("-m", "scaleflow", "predict", run, *words)
    assert ended.returncode == code, ended.stderr
    return ended.stderr if code else ended.stdout


@pytest.mark.slow  # predict/test_prompts.py continues prompts without a run
def test_a_folder_and_a_table_of_prompts_are_continued(trained: Trained) -> None:
    from pyarrow import csv, parquet

    prompts = trained.folder / "prompts"
    prompts.mkdir()
    (prompts / "a.txt").write_text("the cat")
    (prompts / "b.md").write_text("the cat")
    (prompts / "c.txt").write_text("a bird")
    told = predict(
        trained, trained.words, "--input", "prompts", "--output", "texts.csv", "--tokens", "5", "--on-bad", "empty"
    )
    assert "first prompts/c.txt: the run does not know 'a', 'bird'" in told
    texts = csv.read_csv(trained.folder / "texts.csv").to_pydict()
    assert texts["file"] == ["prompts/a.txt", "prompts/b.md", "prompts/c.txt"]
    assert [len(text.split()) for text in texts["prediction"]] == [5, 5, 0]
    assert texts["prediction"][0] != texts["prediction"][1]  # each row draws its own tokens
    (trained.folder / "rows.csv").write_text("id,text\n7,the dog\n8,the mat\n9,\n")
    rows = ("--input", "rows.csv", "--keep", "id", "--on-bad", "skip", "--temperature", "0", "--tokens", "3")
    predict(trained, trained.words, *rows, "--output", "rows.parquet")
    table = parquet.read_table(trained.folder / "rows.parquet").to_pydict()
    assert table["id"] == ["7", "8"]
    text, _ = trained.generate(trained.words, "--prompt", "the dog", "--temperature", "0", "--tokens", "3")
    assert f"the dog{table['prediction'][0]}\n" == text
    shards = (*rows, "--output", "shards/", "--shard-rows", "1")
    predict(trained, trained.words, *shards)
    predict(trained, trained.words, *shards, "--resume")
    error = predict(trained, trained.words, *shards, "--resume", "--seed", "1", code=2)
    assert "were made with another sampling" in error


@pytest.mark.parametrize(
    ("run", "words", "code", "message"),
    [
        ("digits", ("--input", "houses.csv", "--tokens", "3"), 2, "this run is no language model of dataset=tokens"),
        ("words", ("--input", "houses.csv"), 2, "--input: which column has the prompts? Add --columns NAME; the table"),
        ("words", ("--input", "houses.csv", "--columns", "c"), 2, "--columns c: expected the column with the prompts"),
        ("words", ("--input", "houses.csv", "--columns", "a"), 1, "houses.csv, row 1: the run does not know 'bird'"),
    ],
)
def test_prompts_that_cannot_be_continued_are_named(
    trained: Trained, run: str, words: tuple[str, ...], code: int, message: str, tmp_path: Path
) -> None:
    (trained.folder / "houses.csv").write_text("a,b\nbird,1\n")
    assert message in predict(trained, getattr(trained, run), *words, "--output", str(tmp_path / "out.csv"), code=code)
