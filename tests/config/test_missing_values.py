"""A recipe's `???` asks for a value, and groups that are taken away are `none` or needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaleflow.config.compose import compose_config
from scaleflow.config.missing_values import find_package, read_option
from scaleflow.errors import ConfigError
from scaleflow.launcher.prepare import make_plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    recipes = {
        "asks": "# @package _global_\noptimizer:\n  learning_rate: ???\n",
        "no_package": "optimizer:\n  learning_rate: 0.1\n",
        "dotted": "# @package _global_\noptimizer.learning_rate: 0.1\n",
        "dotted_inside": "# @package _global_\noptimizer:\n  plateau.metric: train/loss\n",
        "no_store": "# @package _global_\ndefaults:\n  - override /tracking: null\n",
        "no_data": "# @package _global_\ndefaults:\n  - override /dataset: null\n",
        "no_colon": "# @package _global_\nseed 3\nresume: null\n",
        "no_space": "# @package _global_\nseed:3\nresume: null\n",
    }
    (folder / "experiment").mkdir()
    for name, text in recipes.items():
        (folder / "experiment" / f"{name}.yaml").write_text(text)
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "mine.yaml").write_text("_target_: keras.optimizers.SGD\nlearning_rate: ???\n")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        *(["experiment=asks"], ["optimizer=mine"], ["optimizer=mine", "experiment=asks"]),
        ["optimizer=sgd", "experiment=asks"],  # the option has a rate, but the recipe asks for one
    ],
)
def test_a_value_that_a_recipe_asks_for_has_to_be_typed(words: list[str], folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate: .* no default.*write optimizer\.learning_rate="):
        assert compose_config(words, [folder]).resolved
    composed = compose_config([*words, "optimizer.learning_rate=0.3"], [folder])
    assert composed.resolved["optimizer"]["learning_rate"] == 0.3


def test_the_keys_of_an_option_are_those_of_its_package(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("a: ???\nb: {c: 1}\n")
    assert read_option(file, "model", 1) == {"model.a": True, "model.b": False, "model.b.c": False}
    assert find_package("", "strategy@train.strategy") == "train.strategy"
    assert find_package("# @package _global_\n", "experiment") == ""
    assert find_package("# @package _group_.inner\n", "model") == "model.inner"


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("no_package", "experiment=no_package: .* begin it with the line # @package _global_"),
        ("dotted", r"optimizer\.learning_rate: .* write optimizer: {learning_rate: ...}"),
        ("dotted_inside", r"optimizer\.plateau\.metric: .* write plateau: {metric: ...}"),
        ("no_store", "tracking: null: .* write 'override /tracking: none'"),
        ("no_data", "dataset: null: a run needs an option of dataset"),
        ("no_colon", "no_colon.yaml, line 2: a colon is missing; write seed: 3"),
        ("no_space", "no_space.yaml, line 2: a space is missing after the colon; write seed: 3"),
    ],
)
def test_a_mistake_in_a_recipe_says_what_to_write(recipe: str, expected: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=expected):
        make_plan(compose_config([f"experiment={recipe}"], [folder]))


@pytest.mark.parametrize("group", ["tracking", "checkpoint", "evaluation"])
def test_a_group_that_is_taken_away_is_none(group: str) -> None:
    assert compose_config([f"~{group}"]).choices[group] == "none"


@pytest.mark.parametrize("word", ["+dataset={1:{}}", "+tracking={2:3}", "+model={1.5:2}"])
def test_a_key_that_is_no_text_is_refused_in_words(word: str) -> None:
    with pytest.raises(ConfigError, match="the name of a key is text; leave this one out"):
        make_plan(compose_config([word]))
