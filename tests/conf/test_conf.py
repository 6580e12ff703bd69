import dataclasses
import functools
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from scaleflow.cluster.engines import list_engines
from scaleflow.config.compose import ComposedConfig
from scaleflow.config.parse import list_feature_keys, parse_section, type_hints
from scaleflow.config.policies import LOOK
from scaleflow.interfaces import (
    Best,
    Checkpoint,
    Cluster,
    Dataset,
    Debug,
    EvaluationOptions,
    Hardware,
    Model,
    ObjectiveOptions,
    Optimizer,
    Plan,
    Precision,
    Profiler,
    Split,
    Strategy,
    Target,
    Tracking,
    Training,
    features,
)
from scaleflow.interfaces.features import list_conf_folders
from scaleflow.launcher.prepare import make_plan

ROOT = Path(__file__).parent.parent.parent
CONF = ROOT / "conf"

Compose = Callable[..., dict[str, Any]]

#: The YAML files of the core and of the features, by their place below a folder of options.
PATHS = {path.relative_to(folder): path for folder in list_conf_folders() for path in folder.rglob("*.yaml")}
FILES = sorted(PATHS)
#: The options of a run; a pipeline is a config of its own.
OPTIONS = [path for path in FILES if len(path.parts) == 2 and path.parts[0] != "pipeline"]
EXPERIMENTS = [path for path in OPTIONS if path.parts[0] == "experiment"]
PLAIN_OPTIONS = [path for path in OPTIONS if path.parts[0] != "experiment"]

#: How many positional arguments the worker adds when it calls what a group names.
GIVEN = {"dataset": 0, "model": 2, "optimizer": 0}

#: The groups that features add, with the dataclass of their keys.
OF_FEATURES = {
    group: classes[0] for group, classes in features.list_sections().items() if group not in type_hints(Plan)
}

WITHOUT_TARGET: dict[str, Any] = {
    "strategy": Strategy,
    "hardware": Hardware,
    "precision": Precision,
    "objective": ObjectiveOptions,
    "training": Training,
    "evaluation": EvaluationOptions,
    "checkpoint": Checkpoint,
    "profiler": Profiler,
    "tracking": Tracking,
    "cluster": Cluster,
    "debug": Debug,
    **OF_FEATURES,
}

#: Groups whose options have keys of their own beside the name.
OPTIONS_DIFFER = ("strategy", "checkpoint", "evaluation", "promotion", "profiler", "cluster")

#: What an option has another default of than the others.
OTHER_DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("cluster", "kubernetes"): {"start_seconds": 1800.0},
    ("evaluation", "full"): {"seconds": 60.0},
    ("checkpoint", "best"): {"every_epochs": None, "every_seconds": 30, "best": Best("auto"), "export": "best"},
    ("promotion", "champion"): {"model": "???"},
}

WITH_TARGET = {"dataset": Dataset, "model": Model, "optimizer": Optimizer}

#: What the documentation promises about a command without a word.
PROMISED = {
    "strategy": "auto",
    "hardware": "auto",
    "precision": "float32",
    "dataset": "digits",
    "model": "mlp",
    "optimizer": "adam",
    "tracking": "mlflow",
    "profiler": "none",
    "seed": 0,
    "hardware.logical_devices": 1,
    "hardware.devices": None,
    "hardware.tpu": None,
    "dataset.limit": None,
    "optimizer.scale": "none",
    "training.epochs": 20,
    "training.batch_size": 32,
    "training.global_batch_size": None,
    "training.accumulate": 1,
    "training.clip_norm": None,
    "training.steps_per_epoch": None,
    "training.max_steps": None,
    "training.steps_per_loop": "auto",
    "training.engine": "loop",
    "training.step": None,
    "training.early_stopping": None,
    "tracking.uri": None,
    "tracking.experiment": "scaleflow",
    "tracking.flush_seconds": 60,
}


def text(path: Path) -> list[str]:
    return PATHS[path].read_text().splitlines()


def defaults() -> dict[str, Any]:
    """The option of each group that a command without a word has."""
    chosen: dict[str, Any] = {}
    for entry in yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]:
        if isinstance(entry, dict):
            chosen.update({k: v for k, v in entry.items() if not k.startswith("override")})
    return chosen


def at(config: dict[str, Any], key: str) -> Any:
    return functools.reduce(lambda node, word: node[word], key.split("."), config)


def test_the_files_are_found() -> None:
    assert Path("config.yaml") in FILES
    assert len(OPTIONS) > 20
    assert EXPERIMENTS


@pytest.mark.parametrize("path", PLAIN_OPTIONS, ids=str)
def test_every_option_composes_and_makes_a_plan(compose: Compose, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker.example")
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')
    for name, value in {"PROCID": "0", "STEP_NUM_TASKS": "1", "STEP_NODELIST": "a", "STEP_TASKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name, value in {"JOB_COMPLETION_INDEX": "0", "SCALEFLOW_PODS": "1", "SCALEFLOW_JOB": "a"}.items():
        monkeypatch.setenv(name, value)
    config = compose(f"{path.parts[0]}={path.stem}")
    assert isinstance(make_plan(ComposedConfig(config), LOOK), Plan)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=str)
def test_every_experiment_composes_and_makes_a_plan(compose: Compose, path: Path) -> None:
    config = compose(f"experiment={path.stem}")
    assert isinstance(make_plan(ComposedConfig(config), LOOK), Plan)
    assert config != compose()


@pytest.mark.parametrize("path", EXPERIMENTS, ids=str)
def test_every_experiment_has_the_command_that_runs_it_on_its_second_line(path: Path) -> None:
    lines = text(path)
    assert lines[0] == "# @package _global_"
    command = f"# scaleflow experiment={path.stem}"
    assert lines[1] == command or lines[1].startswith(f"{command} ")
    assert re.match(r"# \w", lines[2])


@pytest.mark.parametrize("path", PLAIN_OPTIONS, ids=str)
def test_every_option_says_in_its_first_line_what_it_is(path: Path) -> None:
    first = text(path)[0]
    assert re.match(r"# \w", first)
    assert not first.startswith("# @package")


def test_the_table_of_contents_lists_every_group_with_a_comment() -> None:
    groups = {path.parts[0] for path in OPTIONS} - {*OF_FEATURES}
    assert set(defaults()) == groups
    for group in groups:
        (line,) = [line for line in text(Path("config.yaml")) if re.match(rf"  - {group}: ", line)]
        assert re.search(r"# \w", line)


def test_every_default_is_an_option() -> None:
    for group, option in defaults().items():
        assert option is None or (CONF / group / f"{option}.yaml").is_file()


def test_the_experiment_stands_last_so_that_it_can_set_everything() -> None:
    assert list(defaults())[-1] == "experiment"
    first = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"][0]
    assert first == "_self_"


def test_a_command_without_a_word_is_as_promised(compose: Compose) -> None:
    config = compose()
    chosen = defaults()
    found = {key: chosen[key] if key in chosen else at(config, key) for key in PROMISED}
    assert found == PROMISED


# ---------------------------------------------------------------------------------------------
# The config and the dataclasses
# ---------------------------------------------------------------------------------------------


def test_every_section_is_in_the_plan_and_the_other_way_round(compose: Compose) -> None:
    from_elsewhere = {"answers", "choices", "config", "features", "search", "task", "tf_config", "weights"}
    in_plan = {field.name for field in dataclasses.fields(Plan)} - from_elsewhere
    own = {"seed", "resume", "resume_data", "resume_code", "sweep", "trusted_modules"}
    of_features = {*features.list_sections()}
    assert set(compose()) == in_plan | of_features == {*WITHOUT_TARGET, *WITH_TARGET, *own}


@pytest.mark.parametrize("group", WITHOUT_TARGET)
def test_the_default_option_is_what_the_dataclass_says(compose: Compose, group: str) -> None:
    cls = WITHOUT_TARGET[group]
    section = compose()[group]
    names = [field.name for field in dataclasses.fields(cls)]
    of_features = set() if cls in features.list_sections().get(group, ()) else list_feature_keys(group)
    section = {name: value for name, value in section.items() if name not in of_features}
    assert list(section) == names[: len(section)] if group in OPTIONS_DIFFER else names
    assert parse_section(cls, section, group) == cls()


@pytest.mark.parametrize("group", WITH_TARGET)
def test_the_common_keys_of_a_group_with_targets_are_the_dataclass_s(compose: Compose, group: str) -> None:
    target = Target(group, "")
    made = make_plan(ComposedConfig(compose()), LOOK)
    ours = WITH_TARGET[group](target)
    if group == "dataset":
        ours = dataclasses.replace(ours, split=Split("auto"))  # recorded configs without the key have drawn at random
    assert dataclasses.replace(getattr(made, group), target=target) == ours
    assert set(compose()[group]) >= {field.name for field in dataclasses.fields(ours)} - {"target"}


@pytest.mark.parametrize("path", [path for path in OPTIONS if path.parts[0] in WITHOUT_TARGET], ids=str)
def test_every_option_has_the_same_keys_as_the_default(compose: Compose, path: Path) -> None:
    group = path.parts[0]
    section = compose(f"{group}={path.stem}")[group]
    if group in OPTIONS_DIFFER:
        cls = list_engines()[path.stem].section if group == "cluster" else WITHOUT_TARGET[group]
        other = OTHER_DEFAULTS.get((group, path.stem), {})
        assert parse_section(cls, section, group) == cls(name=section["name"], **other)
    else:
        assert set(section) == set(compose()[group])


@pytest.mark.parametrize(
    "group",
    ["strategy", "hardware", "precision", "checkpoint", "evaluation", "promotion", "profiler", "tracking", "cluster"],
)
def test_an_option_is_named_as_its_file_and_there_is_one_for_each_name(compose: Compose, group: str) -> None:
    options = sorted(path.stem for path in OPTIONS if path.parts[0] == group)
    assert [compose(f"{group}={option}")[group]["name"] for option in options] == options
    names = typing.get_args(typing.get_type_hints(WITHOUT_TARGET[group])["name"])
    assert sorted(list_engines() if group == "cluster" else names) == options


@pytest.mark.parametrize("group", [*WITHOUT_TARGET, *WITH_TARGET])
def test_a_comment_describes_every_key(group: str) -> None:
    described = {
        match[1]
        for path in FILES
        if path.parts[0] in (group, "config.yaml", f"{group}_keys.yaml")
        for line in text(path)
        if (match := re.match(r" *(\w+): .*# \S", line))
    }
    section = WITHOUT_TARGET.get(group) or WITH_TARGET[group]
    names = {field.name for cls in {section, *list_sections(group)} for field in dataclasses.fields(cls)}
    assert names - {"name", "target", "partitioner"} <= described


def list_sections(group: str) -> list[type]:
    return [engine.section for engine in list_engines().values()] if group == "cluster" else []


def test_a_key_of_one_option_does_not_stay_when_another_is_chosen(compose: Compose) -> None:
    assert "filters" in compose("model=cnn")["model"]
    assert "filters" not in compose("model=mlp")["model"]


# ---------------------------------------------------------------------------------------------
# What the config names
# ---------------------------------------------------------------------------------------------


def bind_all(targets: list[tuple[str, str, dict[str, Any], int]]) -> list[str]:
    """In a child: what was refused, of (name, path, arguments, given)."""
    from scaleflow.config.targets import bind_target
    from scaleflow.errors import ConfigError

    refused = []
    for name, path, arguments, given in targets:
        try:
            bind_target(Target(name.partition("/")[0], path, arguments), given)
        except ConfigError as refusal:
            refused.append(f"{name}: {refusal}")
    return refused


def test_every_target_resolves_and_takes_its_arguments(compose: Compose, isolated: Callable[..., Any]) -> None:
    targets = []
    for path in OPTIONS:
        group = path.parts[0]
        if group in WITH_TARGET:
            target = getattr(make_plan(ComposedConfig(compose(f"{group}={path.stem}")), LOOK), group).target
            arguments = {**target.arguments, "learning_rate": 0.1} if group == "optimizer" else target.arguments
            targets.append((str(path), target.path, arguments, GIVEN[group]))
    assert len(targets) >= 7
    wrong = ("model/wrong", "scaleflow.model.mlp.build", {"widths": 1}, 2)
    (refused,) = isolated(bind_all, [*targets, wrong])
    assert refused.startswith("model/wrong: model.widths=1")


def test_every_target_in_a_file_is_of_a_group_that_has_them() -> None:
    for path in FILES:
        if path.parts[0] != "experiment" and any(line.lstrip().startswith("_target_:") for line in text(path)):
            assert path.parts[0] in {*WITH_TARGET, "config.yaml"}, path  # config.yaml names Hydra's callbacks
