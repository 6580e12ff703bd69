"""Mistakes in features of other packages are named, and end no run of someone who does not use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaleflow.testing import Events
from tests.features.installed import install_feature, run_installed

HEAD = """
import sys
from dataclasses import dataclass
from scaleflow.cluster.engines import ClusterEngine
from scaleflow.interfaces.config import Rule
from scaleflow.interfaces.features import Command, Feature

@dataclass(frozen=True)
class Options:
    pace: int = 1

@dataclass(frozen=True)
class CoreOptions:
    epochs: int = 1

def fail(*values):
    raise KeyError("lost")

ENGINE = ClusterEngine(name="mine", section=int)

def say(**fields):
    command = dict(about="says something", module="no.such.module", group="tracked runs")
    return Command(**{**command, **fields})

"""

YAML = "pace: 1\n"

#: By the name of the feature: its arguments, its YAML file, and the line that a run prints for it, after the words
#: "scaleflow: the feature"; "" for none.
MISTAKES = {
    "condition": ("rules=(Rule('a.b.c = = 1', 'why', 'what'),)", "", "condition: the rule 'a.b.c = = 1' is skipped: "),
    "judge": (
        "rules=(Rule('training', 'why', 'what', only_if=fail),)",
        "",
        "judge: the rule 'training' is skipped: KeyError: 'lost'",
    ),
    "no_key": (
        "rules=(Rule('training.max_steps=7 & training.epoch>1', 'why', 'what'), Rule('absent.key', 'why', 'what'))",
        "",
        "no_key: the rule 'training.max_steps=7 & training.epoch>1' never applies: there is no key training.epoch; "
        "did you mean training.epochs?",
    ),
    "one_rule": ("rules=Rule('training', 'why', 'what')", "", "one_rule is skipped: rules is no tuple"),
    "no_check": ("check='no_check.feature:absent'", "", "no_check: its check no_check.feature:absent is skipped: "),
    "bad_check": ("check='bad_check.feature:fail'", "", "bad_check: its check bad_check.feature:fail is skipped: "),
    "bad_place": ("rules_place='last'", "", "bad_place is skipped: rules_place is no whole number"),
    "no_class": ("section=Options()", "", "no_class is skipped: its section Options(pace=1) is no dataclass"),
    "bad_yaml": (
        "section=Options, conf='bad_yaml.conf', defaults=({'bad_yaml': 'default'},)",
        "pace: fast\n",
        "bad_yaml: its keys have the defaults of Options: bad_yaml.pace=fast: expected an integer",
    ),
    "no_conf": ("conf='no_conf.conf'", "", "no_conf is skipped: conf=no_conf.conf: there is no such package"),
    "no_option": (
        "section=Options, conf='no_option.conf', defaults=({'no_option': 'usual'},)",
        YAML,
        "no_option is skipped: conf=no_option.conf: it has no file no_option/usual.yaml, which defaults names",
    ),
    "bad_text": (
        "section=Options, conf='bad_text.conf', defaults=({'bad_text': 'default'},)",
        "pace: [\n",
        "bad_text is skipped: conf=bad_text.conf: bad_text/default.yaml cannot be read: ",
    ),
    "no_keys": (
        "section=Options, conf='no_keys.conf', defaults=({'no_keys': 'default'},)",
        "- 1\n",
        "no_keys is skipped: conf=no_keys.conf: no_keys/default.yaml cannot be read: it has no keys",
    ),
    "more_keys": (
        "section=Options, conf='more_keys.conf', defaults=({'more_keys': 'default'},)",
        "pace: 1\nspeed: 2\n",
        "more_keys is skipped: conf=more_keys.conf: more_keys/default.yaml sets more_keys.speed, which is no key of ",
    ),
    "more_core_keys": (
        "section=Options, group='tracking', conf='more_core_keys.conf', defaults=({'more_core_keys': 'default'},)",
        YAML,
        "more_core_keys is skipped: defaults has an option of 'more_core_keys', which is no ",
    ),
    "changes_core": (
        "section=Options, conf='changes_core.conf', defaults=({'changes_core': 'default'},)",
        "# @package _global_\ntraining:\n  epochs: 99\n",
        "changes_core is skipped: conf=changes_core.conf: changes_core/default.yaml sets training, which is no config ",
    ),
    "nested": (
        "section=Options, conf='nested.conf', defaults=({'nested': 'default'},)",
        "defaults: [gone]\npace: 1\n",
        "nested is skipped: conf=nested.conf: nested/default.yaml sets nested.defaults, which is no key of its section",
    ),
    "linked": (
        "section=Options, conf='linked.conf', defaults=({'linked': 'default'},)",
        "pace: ${gone.key}\n",
        "linked is skipped: conf=linked.conf: linked/default.yaml: pace has the default ${gone.key}; ",
    ),
    "overriding": (
        "section=Options, conf='overriding.conf', defaults=({'override strategy': 'mirrored'},)",
        YAML,
        "overriding is skipped: defaults has an option of 'override strategy', which is no ",
    ),
    "ignoring": (
        "ignored_keys=('training',)",
        "",
        "ignoring is skipped: ignored_keys has training, which is no key of ",
    ),
    "no_section": (
        "engines=('no_section.feature:ENGINE',)",
        "",
        "no_section: its engine no_section.feature:ENGINE is skipped: TypeError: its section <class 'int'> is no ",
    ),
    "no_place": ("commands=(say(name='no_place', place='last'),)", "", "no_place is skipped: place of the command "),
    "no_names": ("commands=(say(name='no_names', other_names=4),)", "", "no_names is skipped: other_names is no tuple"),
    "no_words": ("key_names={'a': 3}", "", "no_words is skipped: key_names has 3, which is of another type"),
    "no_runs": ("untrained_runs=3", "", "no_runs is skipped: untrained_runs has 3, which is of another type"),
    "leaving": ("about=sys.exit(3)", "", "the entry point leaving = "),
    "same_key": ("section=Options, group='training_pace'", "", ""),
    "same_keys": (
        "section=Options, group='training_pace'",
        "",
        "same_keys is skipped: the feature same_key has a key training_pace.pace already",
    ),
    "core_key": (
        "section=CoreOptions, group='training'",
        "",
        "core_key is skipped: the core has a key training.epochs already",
    ),
    "seed_group": (
        "section=Options, group='seed'",
        "",
        "seed_group is skipped: seed is a key of the core, and no group for the keys of its section",
    ),
    "engine": ("engines=('engine.feature:GONE',)", "", "engine: its engine engine.feature:GONE is skipped: "),
    "unsure": ("is_used=fail, launcher='unsure.feature:A'", "", "unsure: it cannot say if a run uses it: KeyError: "),
    "no_hooks": ("launcher='no_hooks.feature:A', worker='no_hooks.feature:B'", "", ""),
    "odd_hooks": ("launcher='odd_hooks.feature:Options', worker='odd_hooks.feature:Options'", "", ""),
    "needy": ("needs='checks'", "", "needy is skipped: needs is no tuple"),
    "spoken": ("commands=(say(name='spoken'),)", "", ""),
    "hiding": ("commands=(say(name='evaluate'), say(name='predict'), say(name='spoken'))", "", ""),
    "grouped": ("commands=(say(name='grouped', group='mine'),)", "", ""),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All features with mistakes, installed."""
    folder = tmp_path_factory.mktemp("packages")
    for name, (arguments, yaml, _) in MISTAKES.items():
        files = {"feature.py": f"{HEAD}FEATURE = Feature(name={name!r}, {arguments})\n"}
        if yaml:
            files |= {"conf/__init__.py": "", f"conf/{name}/default.yaml": yaml}
        install_feature(folder, name, files)
    return folder


#: A run that ends when everything was checked in the launcher.
REFUSED = "training.epochs=1 tracking.uri=nonsense://host"


def test_each_mistake_of_a_declaration_is_named_once_in_a_run(packages: Path, tmp_path: Path) -> None:
    ended = run_installed(REFUSED, packages, tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("scaleflow: tracking.uri=nonsense://host: ")
    lines = [line for line in ended.stderr.splitlines() if line.startswith("scaleflow: the feature ")]
    expected = {name: line for name, (_, _, line) in MISTAKES.items() if line}
    for line in expected.values():
        assert len([each for each in lines if each.startswith(f"scaleflow: the feature {line}")]) == 1, line
    assert "absent.key" not in ended.stderr  # the key of a feature that is not there


def test_help_lists_each_command_once_and_those_of_scaleflow_stay(packages: Path, tmp_path: Path) -> None:
    ended = run_installed("--help", packages, tmp_path)
    assert ended.returncode == 0
    for command in ("evaluate", "predict", "spoken"):
        assert ended.stdout.count(f"  scaleflow {command} ") == 1
    assert "  scaleflow predict    write its predictions for a table" in ended.stdout
    for line in (
        "hiding: its command evaluate is skipped: there is one already",
        "hiding: its command predict is skipped: there is one already",
        "spoken: its command spoken is skipped: there is one already",
        "grouped: its command grouped is skipped: 'mine' is no group",
    ):
        assert f"scaleflow: the feature {line}\n" in ended.stderr


def test_a_command_that_cannot_be_imported_is_refused(packages: Path, tmp_path: Path) -> None:
    ended = run_installed("spoken 1", packages, tmp_path)
    assert ended.returncode == 2
    reason = "(ModuleNotFoundError: No module named 'no')"
    last = ended.stderr.splitlines()[-1]
    assert last == f"scaleflow: spoken: the feature hiding cannot import no.such.module {reason}"


def test_the_keys_of_a_feature_with_a_wrong_default_can_be_set(packages: Path, tmp_path: Path) -> None:
    right = run_installed(f"bad_yaml.pace=2 {REFUSED}", packages, tmp_path)
    assert "feature bad_yaml" not in right.stderr
    wrong = run_installed(f"bad_yaml.pace=slow {REFUSED}", packages, tmp_path)
    assert wrong.stderr.splitlines()[-1] == "scaleflow: bad_yaml.pace=slow: expected an integer"


@pytest.mark.slow
def test_a_run_with_all_mistakes_trains(packages: Path, tmp_path: Path) -> None:
    words = "training.max_steps=2 evaluation=none tracking=none debug=inline hydra.run.dir=run"
    ended = run_installed(words, packages, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert Events.of(tmp_path / "run").status == "FINISHED"
    assert "scaleflow: the feature unsure: it cannot say if a run uses it: KeyError: 'lost'\n" in ended.stderr
    notes = [line for line in ended.stdout.splitlines() if line.startswith("note: the feature ")]
    for start in (
        "no_hooks: missing, and the rest goes on (AttributeError: module 'no_hooks.feature' has no attribute 'A'",
        "no_hooks: missing, and the rest goes on (AttributeError: module 'no_hooks.feature' has no attribute 'B'",
        "odd_hooks: missing, and the rest goes on (TypeError: odd_hooks.feature:Options is no LauncherHook",
        "odd_hooks: missing, and the rest goes on (TypeError: odd_hooks.feature:Options is no WorkerHook",
    ):
        assert len([note for note in notes if note.startswith(f"note: the feature {start}")]) == 1, start
    assert len(notes) == 4
