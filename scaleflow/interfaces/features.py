"""Defines features: optional parts of scaleflow, each in its own folder, which declares what it adds.

A feature of scaleflow is a package `scaleflow/features/NAME` with a module `feature.py` that has a `Feature` called
`FEATURE`. An installed package adds a feature by an entry point:

    [project.entry-points."scaleflow.features"]
    my_feature = "my_package.feature:FEATURE"

The core calls `list_features()`, and names no feature itself. If its folder is deleted, a feature is gone: its words
are refused as unknown, and everything else works. Every command reads all declarations, so they import nothing heavy:
they name modules as text, which are imported on use.
"""

import contextlib
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
from scaleflow.interfaces.extras import catch_any
from scaleflow.interfaces.feature_check import check_declaration, list_package_folders

#: The group of entry points of installed packages.
ENTRY_POINTS = "scaleflow.features"

#: The folder of scaleflow's own features.
FOLDER = Path(__file__).parents[1] / "features"

#: The titles under which `scaleflow --help` lists commands.
CommandGroup = Literal["before a run", "tracked runs", "tracked models"]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command in addition to the run itself: `scaleflow NAME ...`."""

    name: str  # the word after `scaleflow`
    about: str  # its line in `scaleflow --help`
    module: str  # the dotted name of the module with `main(words)`, which returns the exit code
    group: CommandGroup
    place: int = 100  # its place within its group in `scaleflow --help`: the smallest first, then by name
    usage: str = ""  # the words after the name, for the message about one of its other names
    other_names: Sequence[str] = ()  # its names in other tools, in lower case, without `_` and `-`
    config_group: str = ""  # the config group of the files that it reads, if runs do not have this group


@dataclass(frozen=True, kw_only=True)
class Placeholder:
    """A word that a key can have instead of a value, until a feature finds the value before the run."""

    key: str  # `GROUP.KEY`
    word: str
    command: str  # the words after `scaleflow` that only find the value

    def is_in(self, config: Mapping[str, Any]) -> bool:
        """Whether the key has the word in a config."""
        group, _, name = self.key.partition(".")
        section = config.get(group)
        return isinstance(section, Mapping) and section.get(name) == self.word


@dataclass(frozen=True, kw_only=True)
class UntrainedRuns:
    """The runs of a feature's tasks that train no model. They can neither be resumed nor repeated exactly."""

    param: str  # a param that only these runs have; its value is typed after the command
    command: str  # the command that makes such a run, as typed after `scaleflow`
    work: str  # the work of the runs, for messages: `looked for a setting`


@dataclass(frozen=True, kw_only=True)
class OwnRuns:
    """The runs of a feature's `task`. Commands that read a run's data, or know what its outputs mean, refuse them."""

    param: str  # a param that only these runs have
    reason: str  # why such a command cannot work, for messages
    #: What translates the words of `rerun`: "module:NAME" of a function that takes the config of the run, the folder of
    #: its command ("" if unknown) and the words after it. It returns overrides of the config, or raises ConfigError.
    rerun_words: str
    is_resumable: bool = False  # whether the task can continue such a run: `resume` then starts it in the run's folder


@dataclass(frozen=True)
class CompiledTraining:
    """How a run trains a compiled Keras model that a program passed to `scaleflow.run`."""

    words: Sequence[str]  # the words of the run
    files: Mapping[str, Callable[[Path], object]]  # writers of files in the run's folder, by name
    key: str  # the key of the config that gets the paths of these files


def is_always_used(plan: Plan) -> bool:
    return True


def list_no_code(config: Mapping[str, Any]) -> Sequence[str]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Feature:
    """The declaration of a feature: everything that it adds to scaleflow."""

    name: str
    about: str = ""
    commands: Sequence[Command] = ()
    #: Names of the Python package `scaleflow`, such as `check_data`, each with its defining module.
    public_names: Mapping[str, str] = field(default_factory=dict)
    #: Engines of `cluster`, each as "module:NAME of a ClusterEngine".
    engines: Sequence[str] = ()
    #: Commands that a pipeline's stage can run, each as "module:NAME of a StageCommand".
    stages: Sequence[str] = ()
    #: Files that its commands write at the top of their own run's folder, as patterns. The key is the file that
    #: identifies such a folder: `stage.log` for a stage.
    command_files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Names of files that only its commands write, at the top of a folder that they give to a run: then the folder
    #: belongs to a run, even to one that has not begun.
    folder_marks: Sequence[str] = ()
    #: Models that it fits to the rows of a run, for comparison with the run's model, by their names in metrics:
    #: `baseline/NAME/METRIC`. The results of the run, and its page, show these metrics next to the model's own. Each
    #: value describes the model. `baseline/rows` is the number of rows, if the models did not get all rows.
    compared_models: Mapping[str, str] = field(default_factory=dict)
    #: The package with its config options, in a folder per group as in scaleflow's conf/; "": no options.
    conf: str = ""
    #: The options from `conf` that every config includes, as entries of Hydra's list of defaults. They set keys of
    #: `section` to plain values.
    defaults: Sequence[str | Mapping[str, str]] = ()
    section: type | None = None  # the dataclass of its keys, all with defaults; `Plan.of` returns them
    #: The config group that contains the keys. "": the feature's own group, with its name.
    group: str = ""
    #: Sections and keys that do not change what a run computes: with other values it is the same run, and `resume` may
    #: change them. Commands about a run use such a group's default option if they do not need the group.
    ignored_keys: Sequence[str] = ()
    #: Other tools' names of its keys. The key is the words to type, with `{}` for the value. The value is the names,
    #: separated by spaces, in lower case, without `_` and `-`.
    key_names: Mapping[str, str] = field(default_factory=dict)
    #: Other tools' names of its config options. The key is `GROUP=OPTION`, and the value is as that of `key_names`.
    option_names: Mapping[str, str] = field(default_factory=dict)
    #: Its rules. They may name keys of the core, of the feature, and of those that it needs. A rule about a key of
    #: another group is skipped, because the feature with that group may be absent.
    rules: Sequence[Rule] = ()
    #: The place of its rules among the core's (`config/plan.py`) and other features' rules: the smallest first, then
    #: by name. If several rules apply to a plan, the first one is reported.
    rules_place: int = 100
    #: A check in the launcher whether a plan can work on this machine: "module:NAME" of a function that takes the plan
    #: and raises ConfigError if not. No TensorFlow.
    check: str = ""
    #: Words that keys can have instead of a value. Without the feature they are refused.
    placeholders: Sequence[Placeholder] = ()
    #: A check of a config with placeholders: "module:NAME" of a function that takes the plan. It returns the plan with
    #: values instead of placeholders, for all other checks. It raises ConfigError if there are no values.
    fill_in: str = ""
    #: Work before a run that trains, such as other runs that find the values of placeholders: "module:NAME" of a
    #: function. It takes the `PreparedRun`, a function that launches another run and returns its `Outcome`, and the
    #: command's `StopRequest`. It returns the run, whose config it may change, or an `Outcome`, which ends the command
    #: without a run. A ConfigError refuses the run; after any other error the run continues. No TensorFlow.
    before_run: str = ""
    #: Modules that define the kinds of its events.
    events: Sequence[str] = ()
    untrained_runs: UntrainedRuns | None = None
    #: Names of tables that it writes at the top of a run's folder, and that become artifacts. Pictures of them have the
    #: same names with another suffix.
    run_files: Sequence[str] = ()
    #: Other files that it writes at the top of a run's folder, as patterns of names.
    other_files: Sequence[str] = ()
    #: A check of a sweep's job: "module:NAME" of a function that takes the composed keys of the feature's group. It
    #: raises ConfigError if a job cannot have them.
    check_job: str = ""
    #: Work after the end of a command's run, as "module:NAME of an EndTask"; see `launcher/run_end.py`.
    end_task: str = ""
    #: Its hook in the launcher, as "module:NAME of a LauncherHook"; see `interfaces/hooks.py`. No TensorFlow.
    launcher: str = ""
    #: Its hook in workers, as "module:NAME of a WorkerHook"; see `interfaces/hooks.py`.
    worker: str = ""
    #: Whether its hook in workers changes what a model is trained on. Then a missing hook refuses the run.
    changes_training: bool = False
    #: Its sections of the report of a test, as "module:NAME" of a function that takes `KeptPredictions` and returns
    #: `ReportSection`s; see `interfaces/hooks.py`. No TensorFlow.
    report: str = ""
    #: Returns whether a plan uses the feature. If not, its hooks, checks, end task and sections are not imported.
    is_used: Callable[[Plan], bool] = is_always_used
    warm_server: str = ""  # the module of a process that keeps an interpreter ready for commands
    #: Kinds of files that can be the first word of a run, by suffix: `.py`. Each value is "module:NAME" of a function
    #: that takes the words of the command and the position of the file, and returns the words of the run. It raises
    #: ConfigError if they cannot work.
    file_words: Mapping[str, str] = field(default_factory=dict)
    #: How `scaleflow.run` trains a compiled Keras model: "module:NAME" of a function that takes the model, the data and
    #: the words of the run, and returns a `CompiledTraining`. It raises ConfigError if it cannot train as compiled.
    compiled_models: str = ""
    #: How its keys are typed, if `file_words` translates them: {"script.constants": "script"}.
    typed_keys: Mapping[str, str] = field(default_factory=dict)
    #: "module:NAME" of the inverse of `file_words`: a function that takes the words of a run, with the keys as they are
    #: typed, and returns the words of the command.
    typed_words: str = ""
    #: What the processes of a run do if the plan uses the feature, instead of training a model: "module:NAME" of a
    #: `Task` without arguments. No TensorFlow.
    task: str = ""
    own_runs: OwnRuns | None = None
    #: Returns the files with the user's code that a config names, in addition to those of `_target_`. A run records
    #: them and the modules that they import.
    own_code: Callable[[Mapping[str, Any]], Sequence[str]] = list_no_code
    #: Other features that it imports. If one is missing, this feature is skipped.
    needs: Sequence[str] = ()

    @property
    def config_group(self) -> str:
        """The config group that contains its keys."""
        return self.group or self.name

    def is_used_by(self, plan: Plan) -> bool:
        """Returns whether a plan uses the feature. If `is_used` fails, a message reports it, and the feature is not
        used.
        """
        is_used = False
        with report_problems(self.name, "it cannot say if a run uses it"):
            is_used = bool(self.is_used(plan))
        return is_used  # noqa: RET504 (the block may fail)

    def check_use(self, plan: Plan) -> None:
        """Raises ConfigError if a run sets keys of a feature that changes training, and `is_used` fails: without the
        feature, the trained model would differ from the config.
        """
        is_set = self.section is not None and plan.of(self.section) != self.section()
        if not self.changes_training or not is_set:
            return
        try:
            self.is_used(plan)
        except Exception as error:  # the code of another package
            raise ConfigError(
                f"the feature {self.name}: it changes what the model is trained on, and cannot say if this run uses it "
                f"({type(error).__name__}: {error}); repair its package, or leave out its keys"
            ) from error


@cache
def list_features() -> Mapping[str, Feature]:
    """Returns the features by name. Each comes after the features that it needs; otherwise the order is alphabetical.

    Features of other packages come last: they cannot replace anything of scaleflow.

    A feature is skipped with a message on standard error if it cannot be imported, if a field is invalid, if another
    feature has one of its keys, or if it needs a missing feature.

    Raises:
        ConfigError: if two features have the same name.
    """
    features: dict[str, Feature] = {}
    installed: set[str] = set()
    for source, is_installed, load in list_declarations():
        feature = load_declaration(source, is_installed, load)
        if feature is None:
            continue
        if feature.name in features:
            raise ConfigError(f"{source}: there is another feature {feature.name!r}; uninstall one of the two packages")
        taken = find_taken_key(feature, features.values()) or find_taken_default(feature, features.values())
        if taken:
            skip_feature(feature.name, taken)
            continue
        features[feature.name] = feature
        if is_installed:
            installed.add(feature.name)
    names = sorted(features, key=lambda name: (name in installed, name))
    return order_by_needs({name: features[name] for name in names})


def load_declaration(source: str, is_installed: bool, load: Callable[[], Any]) -> Feature | None:
    """Imports a declaration and checks it. Returns None, with a message, if it is skipped.

    What another package prints meanwhile goes to standard error: standard output is the answer of the command.
    """
    feature: Any = None
    try:
        with catch_any(), contextlib.redirect_stdout(sys.stderr) if is_installed else contextlib.nullcontext():
            feature = load()
            if not isinstance(feature, Feature):
                raise TypeError(f"{type(feature).__name__} is no Feature")
    except Exception as error:  # the code of another package
        skip_feature(source, f"it cannot be imported: {error}")
        return None
    try:
        if is_installed:
            check_declaration(feature, {"commands": Command, "placeholders": Placeholder}, UntrainedRuns)
    except ValueError as mistake:
        skip_feature(feature.name, str(mistake))
        return None
    return feature


def list_declarations() -> Iterator[tuple[str, bool, Callable[[], Any]]]:
    """Yields for each feature its source for messages, whether it is from another package, and a
    function to import it.
    """
    for path in sorted(FOLDER.glob("*/feature.py")):
        name = path.parent.name
        yield name, False, partial(import_named, f"scaleflow.features.{name}.feature:FEATURE")
    for point in entry_points(group=ENTRY_POINTS):
        yield f"the entry point {point.name} = {point.value}", True, point.load


def find_taken_key(feature: Feature, others: Iterable[Feature]) -> str:
    """Describes which other feature has a key of this one; "" if there is no conflict."""
    for other in others:
        if feature.section is None or other.section is None or feature.config_group != other.config_group:
            continue
        keys = {field.name for field in fields(feature.section)}
        for key in fields(other.section):
            if key.name in keys:
                return f"the feature {other.name} has a key {other.config_group}.{key.name} already"
    return ""


def find_taken_default(feature: Feature, others: Iterable[Feature]) -> str:
    """Describes which other feature has a default option of this one, which Hydra would refuse; "" without conflict."""
    for other in others:
        for entry in feature.defaults:
            names = [entry] if isinstance(entry, str) else list(entry)
            for taken in other.defaults:
                for name in names:
                    if name == taken or (isinstance(taken, Mapping) and name in taken):
                        return f"the feature {other.name} has a default option {name} already"
    return ""


def order_by_needs(features: Mapping[str, Feature]) -> dict[str, Feature]:
    """Returns the features, each after those that it needs. Skips features whose needs are missing."""
    ordered: dict[str, Feature] = {}
    waiting = dict(features)
    while True:
        ready = [feature for feature in waiting.values() if set(feature.needs) <= set(ordered)]
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
    """Reports once on standard error what does not work in a feature."""
    print(f"scaleflow: the feature {name}: {problem}", file=sys.stderr)


@contextlib.contextmanager
def report_problems(name: str, what: str, may_refuse: bool = False) -> Iterator[None]:
    """Catches errors of a feature's code in the block, and reports them once on standard error.

    Args:
        name: the feature.
        what: what does not work, such as `its check a:b is skipped`.
        may_refuse: whether a ConfigError of the block is a refusal of the feature, which is raised.
    """
    try:
        with catch_any():
            yield
    except Exception as error:  # the code of another package
        if may_refuse and isinstance(error, ConfigError):
            raise
        tell_problem(name, f"{what}: {type(error).__name__}: {error}")


def import_named(place: str) -> Any:
    """Imports and returns the object that "module:NAME" names."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


@cache
def list_sections() -> Mapping[str, Sequence[type]]:
    """Returns the dataclasses with keys of features, by config group."""
    sections: dict[str, list[type]] = {}
    for feature in list_features().values():
        if feature.section is not None:
            sections.setdefault(feature.config_group, []).append(feature.section)
    return sections


def list_placeholders() -> list[Placeholder]:
    """Returns the placeholder words of all features."""
    placeholders: list[Placeholder] = []
    for feature in list_features().values():
        placeholders += feature.placeholders
    return placeholders


def find_placeholders(config: Mapping[str, Any]) -> list[Placeholder]:
    """Returns the placeholders in a config."""
    return [placeholder for placeholder in list_placeholders() if placeholder.is_in(config)]


def find_untrained_runs(params: Mapping[str, Any]) -> UntrainedRuns | None:
    """Returns the kind of untrained run that has these params; None if the run trains a model."""
    for feature in list_features().values():
        runs = feature.untrained_runs
        if runs is not None and runs.param in params:
            return runs
    return None


def find_file_word(suffix: str) -> str:
    """Returns "module:NAME" of the function that translates a command with a file of this kind; "" for no feature."""
    for feature in list_features().values():
        if suffix in feature.file_words:
            return feature.file_words[suffix]
    return ""


def find_feature_task(plan: Plan) -> str:
    """Returns "module:NAME" of the task that a feature gives a plan; "" for the usual training."""
    for feature in list_features().values():
        if feature.task and feature.is_used_by(plan):
            return feature.task
    return ""


def find_compiled_training() -> Callable[[Any, Any, Sequence[str]], CompiledTraining] | None:
    """Returns the function of a feature that plans the training of a compiled model; None without such a feature."""
    for feature in list_features().values():
        if feature.compiled_models:
            plan: Callable[[Any, Any, Sequence[str]], CompiledTraining] = import_named(feature.compiled_models)
            return plan
    return None


def find_own_runs(params: Mapping[str, Any]) -> OwnRuns | None:
    """Returns the kind of a feature's own run that has these params; None if it is a usual run."""
    for feature in list_features().values():
        runs = feature.own_runs
        if runs is not None and runs.param in params:
            return runs
    return None


def list_task_groups() -> set[str]:
    """Returns the config groups of features with a task: their keys say nothing about a run that trains as usual."""
    return {feature.config_group for feature in list_features().values() if feature.task}


def list_own_code(config: Mapping[str, Any]) -> list[Path]:
    """Returns the files with the user's code that features find in a config."""
    files: list[Path] = []
    for feature in list_features().values():
        with report_problems(feature.name, "its own_code is skipped"):
            files += [Path(path) for path in feature.own_code(config)]
    return files


@cache
def import_feature_events() -> None:
    """Imports the modules that define features' events, which registers their kinds."""
    for feature in list_features().values():
        for module in feature.events:
            with report_problems(feature.name, f"its events {module} are skipped"):
                import_module(module)


def list_ignored_keys() -> list[str]:
    """Returns the sections and keys of features that do not change what a run computes."""
    keys: list[str] = []
    for feature in list_features().values():
        keys += feature.ignored_keys
    return keys


def list_run_files() -> list[str]:
    """Returns the names of the files that features write into a run's folder."""
    names: list[str] = []
    for feature in list_features().values():
        names += feature.run_files
    return names


def list_compared_models() -> Mapping[str, str]:
    """Returns the models that features fit for comparison with a run's model: their descriptions by name in metrics."""
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
    """Returns the folders with config options: scaleflow's own, and those that features have."""
    folders = [FOLDER.parent / "conf"]
    for feature in list_features().values():
        if feature.conf:
            folders += list_package_folders(feature.conf)
    return folders


def list_option_files(group: str) -> list[Path]:
    """Returns the YAML files of a config group, including features' files, in the order of the options' names."""
    files: list[Path] = []
    for folder in list_conf_folders():
        files += (folder / group).glob("*.yaml")
    return sorted(files, key=lambda path: path.stem)
