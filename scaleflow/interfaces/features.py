"""What a feature is: an optional part of scaleflow, in a folder of its own, which declares what it adds.

A feature of scaleflow is a package `scaleflow/features/NAME` with a module `feature.py` that has a `Feature` called
`FEATURE`. An installed package adds one by an entry point:

    [project.entry-points."scaleflow.features"]
    my_feature = "my_package.feature:FEATURE"

The core asks `list_features()`, and names none of them. Without its folder, a feature is gone: its words are refused as
unknown, and everything else works. Declarations are read by each command, so they import nothing heavy: they name
modules as text, which are imported when they are used.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from scaleflow.errors import ConfigError
from scaleflow.interfaces.config import Plan, Rule
from scaleflow.interfaces.feature_check import check_declaration, list_package_folders

#: The group of the entry points of installed packages.
ENTRY_POINTS = "scaleflow.features"

#: The folder of scaleflow's own features.
FOLDER = Path(__file__).parents[1] / "features"

#: The titles under which `scaleflow --help` lists commands.
CommandGroup = Literal["before a run", "tracked runs", "tracked models"]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command besides the run itself: `scaleflow NAME ...`."""

    name: str  # as it is typed after `scaleflow`
    about: str  # a line for `scaleflow --help`
    module: str  # the dotted name of the module with `main(words)`, which returns the exit code
    group: CommandGroup
    place: int = 100  # where `scaleflow --help` lists it in its group: the smallest first, then by name
    usage: str = ""  # what is typed after the name, for the message about one of its other names
    other_names: Sequence[str] = ()  # how other tools call it, in lower case, without `_` and `-`
    config_group: str = ""  # the config group of the files that it reads, if no run has this group


@dataclass(frozen=True, kw_only=True)
class Placeholder:
    """A word that a key can have in place of a value, until a feature has found the value before the run."""

    key: str  # `GROUP.KEY`
    word: str
    command: str  # what is typed after `scaleflow` to find the value alone

    def is_in(self, config: Mapping[str, Any]) -> bool:
        """Whether the key has the word in a config."""
        group, _, name = self.key.partition(".")
        section = config.get(group)
        return isinstance(section, Mapping) and section.get(name) == self.word


@dataclass(frozen=True, kw_only=True)
class UntrainedRuns:
    """The runs of a feature's tasks that train no model, so that they can neither be resumed nor repeated exactly."""

    param: str  # the param that only these runs have; its value is typed after the command
    command: str  # what makes such a run, as it is typed after `scaleflow`
    work: str  # what the runs did, for messages: `looked for a setting`


def is_always_used(plan: Plan) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What one optional part adds to scaleflow."""

    name: str
    about: str = ""
    commands: Sequence[Command] = ()
    #: Names of the Python package `scaleflow`, such as `check_data`, each with the module that defines it.
    public_names: Mapping[str, str] = field(default_factory=dict)
    #: Engines of `cluster`, each as "module:NAME of a ClusterEngine".
    engines: Sequence[str] = ()
    #: Commands that a stage of a pipeline can be, each as "module:NAME of a StageCommand".
    stages: Sequence[str] = ()
    #: What its commands write at the top of their own run's folder, as patterns of names, by the file that tells that
    #: the folder is of such a run: `stage.log` in that of a stage.
    command_files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Models that it fits to the rows of a run, to compare the run's model with, by the names that their metrics have:
    #: `baseline/NAME/METRIC`. The results of the run, and its page, show these metrics next to those of its own model.
    #: Each value says what the model is; `baseline/rows` is the number of rows if they did not get all.
    compared_models: Mapping[str, str] = field(default_factory=dict)
    #: The package with its config options, in folders of groups as in scaleflow's conf/; "" for none.
    conf: str = ""
    #: What each config includes from `conf`, as entries of Hydra's list of defaults.
    defaults: Sequence[str | Mapping[str, str]] = ()
    section: type | None = None  # the dataclass of its keys, all with defaults; `Plan.of` returns them
    #: The config group that the keys are in. "": a group of the feature's own, with its name.
    group: str = ""
    #: Sections and keys that do not change what a run computes: with other values it is the same run, and `resume` may
    #: change them. Commands about a run that do not need such a group of a feature use its default option.
    ignored_keys: Sequence[str] = ()
    #: How other tools call its keys: by the words to type, with `{}` for the value, their names with spaces between
    #: them, in lower case, without `_` and `-`.
    key_names: Mapping[str, str] = field(default_factory=dict)
    rules: Sequence[Rule] = ()
    #: Where its rules stand among those of the core (`config/plan.py`) and of other features: the smallest first, then
    #: by name. Of several rules that apply to a plan, the first is told.
    rules_place: int = 100
    #: What checks in the launcher whether a plan can work in this place, as "module:NAME" of a function that takes the
    #: plan. It raises ConfigError if not. No TensorFlow.
    check: str = ""
    #: Words that keys can have in place of a value. Without the feature they are refused.
    placeholders: Sequence[Placeholder] = ()
    #: What checks a config with placeholders, as "module:NAME" of a function that takes the plan. It returns the plan
    #: with values in their places, with which the rest is checked. It raises ConfigError if no value can be found.
    fill_in: str = ""
    #: What comes before a run that trains, such as other runs that find the values of placeholders, as "module:NAME" of
    #: a function. It takes the `PreparedRun`, a function that launches another run and returns its `Outcome`, and the
    #: `StopRequest` of the command. It returns the run, whose config it may change; or an `Outcome`, which ends the
    #: command without a run. A ConfigError refuses the run; the run goes on after another error. No TensorFlow.
    before_run: str = ""
    #: Modules that define the kinds of its events.
    events: Sequence[str] = ()
    untrained_runs: UntrainedRuns | None = None
    #: Names of tables that it writes at the top of a run's folder, and that are artifacts of the run. Pictures of them
    #: have the same names with another suffix.
    run_files: Sequence[str] = ()
    #: Other files that it writes at the top of a run's folder, as patterns of names.
    other_files: Sequence[str] = ()
    #: What checks a job of a sweep, as "module:NAME" of a function that takes the composed keys of the feature's group.
    #: It raises ConfigError if no job can have them.
    check_job: str = ""
    #: What a command does after the end of its run, as "module:NAME of an EndTask"; see `launcher/run_end.py`.
    end_task: str = ""
    #: What follows a command, as "module:NAME of a LauncherHook"; see `interfaces/hooks.py`. No TensorFlow.
    launcher: str = ""
    #: What it does in workers, as "module:NAME of a WorkerHook"; see `interfaces/hooks.py`.
    worker: str = ""
    #: Its sections of the report of a test, as "module:NAME" of a function that takes `KeptPredictions` and returns
    #: `ReportSection`s; see `interfaces/hooks.py`. No TensorFlow.
    report: str = ""
    #: Returns whether a plan uses the feature. If not, its hooks, checks, end task and sections are not imported.
    is_used: Callable[[Plan], bool] = is_always_used
    warm_server: str = ""  # the module of a process that keeps an interpreter ready for commands
    #: Other features that it imports. Without them, it is skipped.
    needs: Sequence[str] = ()

    @property
    def config_group(self) -> str:
        """The config group that its keys are in."""
        return self.group or self.name

    def is_used_by(self, plan: Plan) -> bool:
        """Returns whether a plan uses the feature. If it cannot say so, this is told, and it is not used."""
        try:
            return bool(self.is_used(plan))
        except Exception as error:  # the code of another package
            tell_problem(self.name, f"it cannot say if a run uses it: {type(error).__name__}: {error}")
            return False


@cache
def list_features() -> Mapping[str, Feature]:
    """Returns the features by their names: each after those that it needs, otherwise in alphabetical order.

    Those of other packages come last: what scaleflow has already, they cannot replace.

    A feature that cannot be used is named on standard error and skipped: it cannot be imported, a field has a mistake,
    another feature has one of its keys, or it needs a feature which is not there.

    Raises:
        ConfigError: if two features have the same name.
    """
    features: dict[str, Feature] = {}
    installed: set[str] = set()
    for source, is_installed, load in list_declarations():
        try:
            feature = load()
            if not isinstance(feature, Feature):
                raise TypeError(f"{type(feature).__name__} is no Feature")
        except Exception as error:
            skip_feature(source, f"it cannot be imported: {error}")
            continue
        try:
            if is_installed:
                check_declaration(feature, {"commands": Command, "placeholders": Placeholder})
        except ValueError as mistake:
            skip_feature(feature.name, str(mistake))
            continue
        if feature.name in features:
            raise ConfigError(f"{source}: there is another feature {feature.name!r}; uninstall one of the two packages")
        taken = find_taken_key(feature, features.values())
        if taken:
            skip_feature(feature.name, taken)
            continue
        features[feature.name] = feature
        if is_installed:
            installed.add(feature.name)
    names = sorted(features, key=lambda name: (name in installed, name))
    return order_by_needs({name: features[name] for name in names})


def list_declarations() -> Iterator[tuple[str, bool, Callable[[], Any]]]:
    """Yields for each feature its place, for messages, whether another package has it, and what imports it."""
    for path in sorted(FOLDER.glob("*/feature.py")):
        name = path.parent.name
        yield name, False, partial(import_named, f"scaleflow.features.{name}.feature:FEATURE")
    for point in entry_points(group=ENTRY_POINTS):
        yield f"the entry point {point.name} = {point.value}", True, point.load


def find_taken_key(feature: Feature, others: Iterable[Feature]) -> str:
    """Returns which other feature has a key of this one; "" if none has."""
    for other in others:
        if feature.section is None or other.section is None or feature.config_group != other.config_group:
            continue
        keys = {each.name for each in fields(feature.section)}
        for key in fields(other.section):
            if key.name in keys:
                return f"the feature {other.name} has a key {other.config_group}.{key.name} already"
    return ""


def order_by_needs(features: Mapping[str, Feature]) -> dict[str, Feature]:
    """Returns the features, each after those that it needs, without those that lack one."""
    ordered: dict[str, Feature] = {}
    waiting = dict(features)
    while True:
        ready = [each for each in waiting.values() if set(each.needs) <= set(ordered)]
        if not ready:
            break
        ordered[ready[0].name] = ready[0]
        del waiting[ready[0].name]
    for feature in waiting.values():
        missing = sorted(set(feature.needs) - set(ordered))
        absent = [name for name in missing if name not in features]
        if absent:
            skip_feature(feature.name, f"it needs {', '.join(absent)}, which is not there")
        else:
            skip_feature(feature.name, f"it needs {', '.join(missing)}, which is skipped")
    return ordered


def skip_feature(source: str, why: str) -> None:
    print(f"scaleflow: the feature {source} is skipped: {why}", file=sys.stderr)


@cache
def tell_problem(name: str, problem: str) -> None:
    """Says once on standard error what does not work in a feature."""
    print(f"scaleflow: the feature {name}: {problem}", file=sys.stderr)


def import_named(place: str) -> Any:
    """Returns what "module:NAME" names."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


@cache
def list_sections() -> Mapping[str, Sequence[type]]:
    """Returns the dataclasses with keys of features, by the config group that the keys are in."""
    sections: dict[str, list[type]] = {}
    for feature in list_features().values():
        if feature.section is not None:
            sections.setdefault(feature.config_group, []).append(feature.section)
    return sections


def list_placeholders() -> list[Placeholder]:
    return [placeholder for feature in list_features().values() for placeholder in feature.placeholders]


def find_placeholders(config: Mapping[str, Any]) -> list[Placeholder]:
    """Returns the placeholders that a config has."""
    return [placeholder for placeholder in list_placeholders() if placeholder.is_in(config)]


def find_untrained_runs(params: Mapping[str, Any]) -> UntrainedRuns | None:
    """Returns the kind of untrained runs that a run with these params is of; None if it trains a model."""
    for feature in list_features().values():
        runs = feature.untrained_runs
        if runs is not None and runs.param in params:
            return runs
    return None


@cache
def import_feature_events() -> None:
    """Imports the modules that define the events of features, which makes their kinds known."""
    for feature in list_features().values():
        for module in feature.events:
            try:
                import_module(module)
            except Exception as error:  # the code of another package
                tell_problem(feature.name, f"its events {module} are skipped: {type(error).__name__}: {error}")


def list_ignored_keys() -> list[str]:
    """Returns the sections and keys of features that do not change what a run computes."""
    return [key for feature in list_features().values() for key in feature.ignored_keys]


def list_run_files() -> list[str]:
    return [name for feature in list_features().values() for name in feature.run_files]


def list_compared_models() -> Mapping[str, str]:
    """Returns what features fit to the rows of a run to compare its model with: what it is, by its name in metrics."""
    models: dict[str, str] = {}
    for feature in list_features().values():
        models |= feature.compared_models
    return models


def list_default_options() -> dict[str, str]:
    """Returns the option of each config group that features add to every config."""
    options: dict[str, str] = {}
    for feature in list_features().values():
        for entry in feature.defaults:
            if not isinstance(entry, Mapping):
                continue
            for group, option in entry.items():
                if option is not None:
                    options[group] = option
    return options


def list_conf_folders() -> list[Path]:
    """Returns the folders with scaleflow's config options: its own, and those of features."""
    folders = [FOLDER.parent / "conf"]
    for feature in list_features().values():
        if feature.conf:
            folders += list_package_folders(feature.conf)
    return folders


def list_option_files(group: str) -> list[Path]:
    """Returns the YAML files of a config group, those of features included, in the order of the options' names."""
    files = [path for folder in list_conf_folders() for path in (folder / group).glob("*.yaml")]
    return sorted(files, key=lambda path: path.stem)
