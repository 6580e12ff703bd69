"""Words that scaleflow adds to a command, and the model that a table gets by default."""

from __future__ import annotations

import shlex

import pytest

from scaleflow.config.compose import CommandWords, compose_config
from scaleflow.config.words import make_override, prepare_words, quote_override, split_overrides
from scaleflow.errors import ConfigError

TEXTS = (
    *("plain/a-b.csv", "a b", "it's", 'a "b"', "a,b", "[x]", "{x}", "a=b", "#1", "müller", "$x", "x\\", "\\'", "(1)"),
    *("1e5", "1", "true", "null", "nan", " a", "", "~", "*"),
)

TABLE = ("dataset.data_dir=a.csv", "dataset.target=y")


@pytest.mark.parametrize(
    ("words", "model"),
    [
        (("dataset=table",), "tabular"),
        (("dataset=csv", "model.units=[8]", "optimizer=sgd"), "tabular"),
        (("dataset=csv", "model=linear"), "linear"),
        (("dataset=table", "model.dropout=0.2"), "mlp"),
        (("dataset=csv", "model.batch_norm=true", "model.units=[8]"), "mlp"),
        (("dataset=table", "model._target_=mine.build", "~model.units", "~model.dropout", "~model.batch_norm"), "mlp"),
        (("dataset=table", "model=cnn", "model.dropout=0.2"), "cnn"),
    ],
)
def test_the_model_of_a_table_follows_from_the_words(words: tuple[str, ...], model: str) -> None:
    composed = compose_config([*words, *TABLE])
    assert composed.choices["model"] == model
    optimizer = "sgd" if "optimizer=sgd" in words else "tabular" if model == "tabular" else "adam"
    assert composed.choices["optimizer"] == optimizer
    assert (composed.config.training.epochs == "by_size") == (model == "tabular")
    assert (composed.choices["checkpoint"] == "best") == (model == "tabular")


@pytest.mark.parametrize(
    ("words", "added"),
    [
        (["dataset=digits,table", "model.dropout=0.1,0.2"], ["model=mlp"]),
        (["dataset=digits", "model.dropout=0.1"], []),
        (["dataset=table", "model.dropout=0.1", "experiment=mine"], []),
        (["dataset=table", "model.units=[8]"], []),
    ],
)
def test_only_a_table_without_a_model_or_a_recipe_gets_the_model_of_its_keys(
    words: list[str], added: list[str]
) -> None:
    assert prepare_words(words) == [*words, *added]


def test_a_recipe_wins_over_the_model_of_a_table(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("own")
    (folder / "experiment").mkdir()
    recipe = "# @package _global_\ndefaults:\n  - override /dataset: csv\n  - override /model: linear\n"
    (folder / "experiment" / "mine.yaml").write_text(recipe)
    assert compose_config(["experiment=mine", *TABLE], [folder]).choices["model"] == "linear"


@pytest.mark.parametrize("text", TEXTS)
def test_hydra_reads_a_quoted_value_as_the_text_that_it_was(text: str) -> None:
    word = make_override("dataset.data_dir", text)
    (parsed,) = CommandWords([word]).parsed
    assert (parsed.key_or_group, parsed.value()) == ("dataset.data_dir", text)
    assert not parsed.is_sweep_override()
    assert shlex.split(quote_override("dataset.data_dir", text)) == [word]


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (
            "dataset.data_dir=it's seed=1",
            """dataset.data_dir=it's: no closing quotation; write this word as "dataset.data_dir='it""",
        ),
        ('seed=1 model.name="a', 'model.name="a: no closing quotation; write this word as '),
    ],
)
def test_a_quote_without_an_end_in_overrides_is_refused(typed: str, named: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        split_overrides(["--overrides", typed])
    assert str(refusal.value).startswith(f"--overrides: {named}")


@pytest.mark.parametrize("value", ["müller.csv", "a (1).csv", "it's.csv", "a=b#,"])
def test_the_word_that_a_refusal_shows_works(value: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read as KEY=VALUE; type ") as refusal:
        assert CommandWords([f"dataset.data_dir={value}"]).parsed
    (word,) = shlex.split(str(refusal.value).partition("; type ")[2])
    (parsed,) = CommandWords([word]).parsed
    assert parsed.value() == value
