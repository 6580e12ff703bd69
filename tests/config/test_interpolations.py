"""Interpolations that call a resolver have one value for each key, which a run keeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from omegaconf import DictConfig, OmegaConf

from scaleflow.config.compose import ComposedConfig, resolve_config
from scaleflow.config.interpolations import find_dependents, keep_values, resolve_once


@pytest.fixture
def count() -> Iterator[itertools.count[int]]:
    """A resolver with another value at each call, as a random one has."""
    numbers = itertools.count(1)
    OmegaConf.register_new_resolver("count", lambda: next(numbers))
    OmegaConf.register_new_resolver("add", lambda first, second: first + second)
    yield numbers
    OmegaConf.clear_resolver("count")
    OmegaConf.clear_resolver("add")


CHAIN = {
    "sum": "${add:${first.value},${second}}",  # it stands before what it needs
    "first": {"value": "${count:}", "again": "${.value}"},
    "second": "${first.again}",
    "third": "${count:}",
    "items": ["${count:}", "${items.0}", "${.0}", "${..second}"],
    "section": "${first}",
    "${x}": 1,
}


def make_chain() -> DictConfig:
    return OmegaConf.create({key: value for key, value in CHAIN.items() if "$" not in key})


def test_a_changing_resolver_has_one_value_for_each_key(count: itertools.count[int]) -> None:
    config = resolve_config(make_chain())
    first = config["first"]["value"]
    assert config["first"]["again"] == config["second"] == config["items"][3] == config["section"]["value"] == first
    assert config["sum"] == 2 * first
    assert config["items"][0] == config["items"][1] == config["items"][2]
    assert len({first, config["third"], config["items"][0]}) == 3
    assert next(count) == 4  # each of the three was called once


def test_the_values_stay_if_another_key_is_set(count: itertools.count[int]) -> None:
    composed = ComposedConfig(make_chain())
    before = composed.resolved
    after = composed.set({"third": 7}).resolved
    assert after == {**before, "third": 7}
    changed = composed.set({"first.value": 10}).resolved
    assert (changed["sum"], changed["second"], changed["third"]) == (20, 10, before["third"])


def test_an_interpolation_that_cannot_be_resolved_is_left_to_the_error_of_the_whole_config() -> None:
    config = OmegaConf.create({"a": "${oc.env:NOT_SET_ANYWHERE}", "b": "${oc.env:HOME}"})
    assert list(resolve_once(config, {})) == [("b",)]


def test_references_and_secrets_stay_and_other_values_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LR", "0.5")
    monkeypatch.setenv("MY_TOKEN", "hunter2-planted")
    monkeypatch.setenv("ODD", "a ${b} c")
    raw = {
        "rate": "${oc.decode:${oc.env:LR}}",
        "twice": {"also": "${rate}"},
        "token": "${oc.env:MY_TOKEN}",
        "hidden": "x-${oc.env:MY_TOKEN}",
        "api_key": "${oc.env:LR}",
        "odd": "${oc.env:ODD}",
        "list": [1, "${oc.env:LR}"],
        "escaped": "\\${oc.env:LR}",
    }
    resolved = resolve_config(OmegaConf.create(raw))
    kept, replaced = keep_values(raw, resolved)
    assert kept == {**raw, "rate": 0.5, "list": [1, "0.5"]}
    assert replaced == {("rate",): raw["rate"], ("list", 1): "${oc.env:LR}"}


@pytest.mark.parametrize(
    ("keys", "dependents"),
    [
        (["first.value"], {("sum",), ("first", "again"), ("second",), ("items", 3), ("section",)}),
        (["first"], {("sum",), ("first", "again"), ("second",), ("items", 3), ("section",)}),
        (["third"], set()),
    ],
)
def test_the_keys_that_depend_on_a_typed_one_are_found(keys: list[str], dependents: set[object]) -> None:
    assert find_dependents({key: value for key, value in CHAIN.items() if "$" not in key}, keys) == dependents
