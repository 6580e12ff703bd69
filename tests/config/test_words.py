"""Words that scaleflow adds to a command, and the model that a table gets by default."""

from __future__ import annotations

import pytest

from scaleflow.config.compose import compose_config
from scaleflow.config.words import prepare_words

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
