"""Whatever the code tells a user to type is a word that exists: every `KEY=VALUE` in a message, and every synonym."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

import scaleflow
from scaleflow.commands.table import list_commands, list_other_names
from scaleflow.config.compose import compose_config, every_key
from scaleflow.config.feature_sections import parse_feature_sections
from scaleflow.config.parse import list_feature_keys
from scaleflow.config.plan import parse_plan, parse_sections
from scaleflow.config.synonyms import ABSENT, CALLBACKS, DEVICE_KINDS, KEYS, OPTIONS, list_key_names, list_option_names
from scaleflow.config.words import list_needed_groups, list_optional_groups
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.features import list_conf_folders, list_option_files

PACKAGE = Path(scaleflow.__file__).parent
CONF = PACKAGE / "conf"

FOLDERS = [path for folder in list_conf_folders() for path in folder.iterdir() if path.is_dir()]

GROUPS = sorted({path.name for path in FOLDERS} - {"hydra", "pipeline", "__pycache__"})

#: `group=option` or `group.key=value` in a text. A value in capitals stands for something that the user knows.
WORD = re.compile(rf"(?<![\w./-])((?:{'|'.join(GROUPS)})(?:\.[a-z_]\w*)*)=([\w.+-]*\w)(?![\w.]*[({{/])")

#: A word of the starter project that `scaleflow init` writes, which has this option.
OF_STARTER = "experiment=first"

#: Values that a key of another tool is tried with, one after the other, until scaleflow takes one.
SAMPLES = (
    "1",
    "balanced",
    "0.2",
    "true",
    "cosine",
    "name",
    "mlp",
    "digits",
    "adam",
    "cpu",
    "mirrored",
    "float32",
    "mean_squared_error",
)


def list_texts() -> Iterator[tuple[str, str]]:
    """Yields (module, text) for each text in the package that is no docstring."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "conf" in path.parts[len(PACKAGE.parts) :] or "starter" in path.parts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = set()
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                docstrings.add(id(body[0].value))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield str(path.relative_to(PACKAGE)), node.value


@pytest.fixture(scope="module")
def options() -> dict[str, dict[str, Any]]:
    """The config of each option of each group, by `group=option`, with the keys that all options share."""
    shared: Any = yaml.safe_load((CONF / "config.yaml").read_text())
    found: dict[str, dict[str, Any]] = {}
    for group in GROUPS:
        for path in list_option_files(group):
            own: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
            own.pop("defaults", None)
            found[f"{group}={path.stem}"] = {**(shared.get(group) or {}), **own}
    return found


@pytest.fixture(scope="module")
def base() -> Plan:
    composed = compose_config([])
    return parse_plan(composed.resolved, composed.choices)


def list_words() -> list[tuple[str, str, str]]:
    words = {(key, value): module for module, text in list_texts() for key, value in WORD.findall(text)}
    return sorted((module, key, value) for (key, value), module in words.items())


def explain_wrong(key: str, value: str, options: dict[str, dict[str, Any]], base: Plan) -> str:
    """Returns why a word cannot be typed; "" if it can."""
    group, _, name = key.partition(".")
    if not name:
        return "" if f"{group}={value}" in options or value.isupper() else "there is no such option"
    known = {each for option, config in options.items() if option.startswith(f"{group}=") for each in every_key(config)}
    fields = set(vars(getattr(base, group))) if hasattr(base, group) else set()
    fields |= list_feature_keys(group)
    if name not in known and name.partition(".")[0] not in fields:
        return "there is no such key"
    if value.isupper():
        return ""
    return explain_refusal(group, name, yaml.safe_load(value), base)


def explain_refusal(group: str, name: str, value: object, base: Plan) -> str:
    """Returns why a group does not take the value of a key; "" if it does, or if another option has the key."""
    is_field = hasattr(base, group) and name in vars(getattr(base, group)) and name != "name"
    is_of_feature = name in list_feature_keys(group)
    if not (is_field or is_of_feature) or group in ("cluster", "tracking"):
        return ""
    config = {group: {**base.config[group], name: value}}
    try:
        if is_of_feature:
            parse_feature_sections(config)
        else:
            parse_sections(config, {group})
    except ConfigError as error:
        return str(error)
    return ""


def test_each_word_in_a_message_can_be_typed(options: dict[str, dict[str, Any]], base: Plan) -> None:
    wrong = []
    words = list_words()
    for module, key, value in words:
        reason = explain_wrong(key, value, options, base)
        if reason and f"{key}={value}" != OF_STARTER:
            wrong.append(f"{module}: {key}={value}: {reason}")
    assert len(words) > 150
    assert not wrong, "\n".join(wrong)


def explain_wrong_suggestion(meant: str, options: dict[str, dict[str, Any]], base: Plan) -> str:
    """Returns why a run does not take the words of a suggestion; "" if it does."""
    if meant.startswith("--config-dir"):
        return ""
    for word in shlex.split(meant):
        if word.startswith("-") or word in ("VALUE", "scaleflow"):
            continue
        try:
            (override,) = OverridesParser.create().parse_overrides([word])
        except HydraException as error:
            return f"{word}: {str(error).splitlines()[0]}"
        key = override.key_or_group
        group, _, name = key.partition(".")
        if key in ("resume", "seed") or group == "hydra" or key.startswith("hydra/"):
            continue
        value = override.value()
        if not isinstance(value, dict | list):
            reason = explain_wrong(key, str(value).lower() if isinstance(value, bool) else str(value), options, base)
        else:
            reason = explain_refusal(group, name, value, base)
        if reason:
            return f"{word}: {reason}"
    return ""


def test_each_synonym_of_a_key_can_be_typed(options: dict[str, dict[str, Any]], base: Plan) -> None:
    wrong = []
    for meant in dict.fromkeys([*KEYS.values(), *list_key_names().values()]):
        reasons = [explain_wrong_suggestion(meant.format(sample), options, base) for sample in SAMPLES]
        if all(reasons):
            wrong.append(f"{meant}: {reasons[0]}")
    assert not wrong, "\n".join(wrong)


def test_each_other_synonym_can_be_typed(options: dict[str, dict[str, Any]], base: Plan) -> None:
    meant = {*CALLBACKS.values(), *DEVICE_KINDS.values()}
    for group in {*OPTIONS, "cluster"}:
        meant |= {*list_option_names(group).values()}
    reasons = [explain_wrong_suggestion(words, options, base) for words in sorted(meant)]
    assert not list(filter(None, reasons))


def test_each_word_for_what_is_absent_can_be_typed(options: dict[str, dict[str, Any]], base: Plan) -> None:
    for text in ABSENT.values():
        for key, value in WORD.findall(text):
            assert not explain_wrong(key, value, options, base)


def test_each_word_for_another_command_names_a_command() -> None:
    for meant in list_other_names().values():
        program, word, *_ = meant.split()
        assert program == "mlflow" or word in list_commands() or word.startswith(("-", "KEY=", "resume="))


def test_each_group_of_a_run_can_be_removed_or_is_needed() -> None:
    groups = {*GROUPS} - {"experiment"}
    assert {*list_optional_groups(), *list_needed_groups()} == groups
    for group in list_optional_groups():
        assert "none" in [path.stem for path in list_option_files(group)]
    for group, option in list_needed_groups().items():
        assert option in [path.stem for path in list_option_files(group)]
