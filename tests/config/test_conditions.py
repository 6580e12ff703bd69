"""The language of the conditions of rules, and that rules name keys and values that exist."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

from scaleflow.config.conditions import find_keys, find_value, holds, is_applicable, is_something, parse_condition
from scaleflow.config.parse import parse_value
from scaleflow.config.plan import explain_rule, find_version_rules, list_rules
from scaleflow.config.rule_keys import find_unknown_keys, list_types
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan, Rule
from scaleflow.interfaces.features import Feature, list_features, list_sections

ALL_RULES = [*list_rules(), *find_version_rules(lambda package: "0.1")]


@pytest.mark.parametrize(
    ("condition", "words", "expected"),
    [
        # A key alone: whether its value is something.
        ("hardware.devices", "hardware.devices=[0]", True),
        ("hardware.devices", "", False),
        ("hardware.deterministic", "hardware.deterministic=true", True),
        ("hardware.deterministic", "", False),
        ("!hardware.deterministic", "", True),
        ("!hardware.deterministic", "hardware.deterministic=true", False),
        ("dataset.validation", "dataset.validation=0.0", False),
        ("!dataset.validation", "dataset.validation=0.0", True),
        # A value: null, true, false, a number, text, an empty list.
        ("dataset.validation=0", "dataset.validation=0.0", True),
        ("dataset.validation=null", "dataset.validation=0.0", False),
        ("dataset.validation!=null", "dataset.validation=0.0", True),
        ("dataset.validation=null", "dataset.validation=null", True),
        ("hardware.xla=true", "hardware.xla=true", True),
        ("hardware.xla=true", "hardware.xla=auto", False),
        ("hardware.xla=false", "hardware.xla=false", True),
        ("training.epochs=3", "training.epochs=3", True),
        ("optimizer.learning_rate=0.25", "optimizer.learning_rate=0.25", True),
        ("training.engine=fit", "training.engine=fit strategy=one_device", True),
        ("training.engine!=fit", "", True),
        ("hardware.remat=[]", "hardware.remat=[block]", False),
        ("hardware.remat=[]", "hardware.remat=false", False),
        ("model.freeze=[]", "model.freeze=[]", True),
        # Numbers: values that are none are neither above nor below.
        ("training.epochs>3", "training.epochs=3", False),
        ("training.epochs>=3", "training.epochs=3", True),
        ("training.epochs<=3", "training.epochs=3", True),
        ("training.epochs<3", "training.epochs=3", False),
        ("optimizer.final_rate>-1.5", "", True),
        ("training.steps_per_loop>1", "training.steps_per_loop=auto", False),
        ("training.steps_per_loop<1", "training.steps_per_loop=auto", False),
        ("training.max_steps<1", "", False),
        # Several values.
        ("dataset.validation in null|0", "dataset.validation=null", True),
        ("dataset.validation in null|0", "dataset.validation=0.0", True),
        ("dataset.validation in null|0", "", False),
        ("precision in mixed|float32", "precision=mixed_bfloat16", False),
        ("precision not in mixed|float32", "precision=mixed_bfloat16", True),
        ("precision not in mixed|float32", "precision=mixed", False),
        # A group is its option, and `auto` is not known yet.
        ("strategy=mirrored", "strategy=mirrored", True),
        ("strategy!=mirrored", "strategy=auto", True),
        ("checkpoint=none", "checkpoint=none", True),
        # Keys of sections that are null, of classes, and of another cluster engine.
        ("training.early_stopping.monitor", "", False),
        ("training.early_stopping.monitor=null", "", True),
        ("training.early_stopping.monitor=train/loss", "training.early_stopping={monitor: train/loss}", True),
        ("training.step._target_=null", "", True),
        ("optimizer._target_=keras.optimizers.SGD", "optimizer._target_=keras.optimizers.SGD", True),
        ("cluster.image=null", "cluster=ray", True),
        # Several terms: all hold.
        ("strategy=mirrored & training.epochs=3", "strategy=mirrored training.epochs=3", True),
        ("strategy=mirrored & training.epochs=3", "strategy=mirrored training.epochs=4", False),
        ("strategy=mirrored & training.epochs=3", "strategy=one_device training.epochs=3", False),
    ],
)
def test_a_condition_holds(plan: Callable[..., Plan], condition: str, words: str, expected: bool) -> None:
    made = plan(*split_words(words))
    assert holds(condition, made) == expected


def split_words(words: str) -> list[str]:
    """Splits at the spaces before overrides, not at those in values."""
    parts: list[str] = []
    for part in words.split():
        if "=" in part:
            parts.append(part)
        else:
            parts[-1] += f" {part}"
    return parts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected a dotted key, and not ''"),
        ("!", "expected a dotted key, and not ''"),
        ("strategy&debug.nan", "expected a dotted key"),
        ("strategy = tpu", "expected a dotted key, and not 'strategy '"),
        ("!strategy=tpu", "expected a dotted key, and not '!strategy'"),
        ("training..engine=fit", "expected a dotted key, and not 'training..engine'"),
        ("strategy=", "expected a value, and not ''"),
        ("strategy==tpu", "expected a value, and not '=tpu'"),
        ("strategy=tpu&debug.nan", "expected a value"),
        ("strategy=one_device|tpu", "only `in` and `not in` take several values"),
        ("strategy in one_device|", "expected a value, and not ''"),
        ("training.accumulate>many", "expected a number, and not 'many'"),
        ("debug.nan & ", "expected a dotted key, and not ''"),
        ("debug.nan and debug.eager", "expected a dotted key, and not 'debug.nan and debug.eager'"),
    ],
)
def test_a_text_that_is_no_condition_is_an_error(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        parse_condition(text)


def test_a_message_shows_the_keys_of_the_condition_or_those_that_are_given(plan: Callable[..., Plan]) -> None:
    made = plan("training.accumulate=2", "training.epochs=3")
    rule = Rule("training.epochs>2 & strategy=auto & training.epochs<5", "why", "how")
    assert explain_rule(rule, made) == "training.epochs=3 with strategy=auto: why; how"
    other = dataclasses.replace(rule, keys=("training.accumulate",))
    assert explain_rule(other, made) == "training.accumulate=2: why; how"


def test_a_rule_applies_only_if_its_function_agrees(plan: Callable[..., Plan]) -> None:
    made = plan("training.epochs=3")
    assert is_applicable(Rule("training.epochs>2", "why", "how"), made)
    assert is_applicable(Rule("training.epochs>2", "why", "how", only_if=lambda p: p.training.epochs == 3), made)
    assert not is_applicable(Rule("training.epochs>2", "why", "how", only_if=lambda p: p.training.epochs == 4), made)
    assert not is_applicable(Rule("training.epochs>3", "why", "how", only_if=lambda p: True), made)


def can_be(key: str, value: object) -> bool:
    for hint in list_types(key):
        try:
            parse_value(value, hint, key)
        except ConfigError:
            continue
        return True
    return False


def test_wrong_keys_and_values_of_a_rule_are_found() -> None:
    assert can_be("training.early_stopping.monitor", "val/loss")
    assert can_be("training.early_stopping.monitor", None)
    assert can_be("cluster.image", "a")
    assert can_be("strategy", "tpu")
    assert not [*list_types("training.early_stopping.monitors")]
    assert not [*list_types("cluster.imagine")]
    assert not can_be("strategy", "miror")
    assert not can_be("strategy", None)
    assert not can_be("training.accumulate", "many")


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: f"{rule.when}: {rule.reason[:30]}")
def test_a_rule_names_keys_and_values_that_exist(rule: Rule) -> None:
    for key in find_keys(rule):
        assert [*list_types(key)], f"there is no key {key}"
    for term in parse_condition(rule.when):
        assert [*list_types(term.key)], f"there is no key {term.key}"
        if term.compare is is_something:
            continue
        several = isinstance(term.expected, list) and term.expected
        for value in term.expected if several else [term.expected]:
            assert can_be(term.key, value), f"{term.key} is never {value!r}"


def test_a_group_alone_is_its_option_also_if_a_feature_has_keys_in_it(plan: Callable[..., Plan]) -> None:
    made = plan("tracking=none")
    assert "tracking" in list_sections()
    assert find_value(made, "tracking") == "none"
    assert find_value(made, "tracking.notify") is None


def test_each_feature_of_scaleflow_has_rules_about_keys_of_the_core_and_of_what_it_needs() -> None:
    checked = 0
    for feature in list_features().values():
        for rule in feature.rules:
            assert find_unknown_keys(feature, rule) == []
            checked += 1
    assert checked > 10


@dataclasses.dataclass(frozen=True)
class Pace:
    speed: int = 1


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("training.epochs>1 & strategy=mirrored & seed>0 & training.early_stopping.monitor", ()),
        ("cluster.image & tracking.notify & optimizer._target_=keras.optimizers.SGD", ()),
        ("training.epoch>1", "there is no key training.epoch; did you mean training.epochs?"),
        ("training.epochs>1 & training.qqq", "there is no key training.qqq"),
        ("training.early_stopping.monitr", "did you mean training.early_stopping.monitor?"),
        ("cluster.imag", "there is no key cluster.imag; did you mean cluster.image?"),
        ("trainings.epochs", "there is no key trainings.epochs; did you mean training.epochs?"),
        ("pace.sped>1", "there is no key pace.sped"),
        ("optimizer.momentum", "there is no key optimizer.momentum"),
        # Keys of features that may be absent.
        ("other.speed>1", ()),
        ("other", ()),
        ("trainings.speed", ()),
    ],
)
def test_a_key_of_a_features_rule_that_does_not_exist_is_found(condition: str, expected: str | tuple[()]) -> None:
    feature = Feature(name="pace", section=Pace, needs=("promotion",))
    problems = find_unknown_keys(feature, Rule(condition, "why", "how"))
    if not expected:
        assert problems == []
    else:
        assert len(problems) == 1
        assert str(expected) in problems[0]
    needed = find_unknown_keys(feature, Rule("promotion.at_most", "why", "how"))
    assert needed == ["there is no key promotion.at_most; did you mean promotion.at_least?"]
    shown = find_unknown_keys(feature, Rule("training.epochs>1", "why", "how", keys=("training.pochs",)))
    assert shown == ["there is no key training.pochs; did you mean training.epochs?"]
