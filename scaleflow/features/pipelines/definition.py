"""Reads and checks a pipeline, the file `pipeline/NAME.yaml` in a config folder. Hydra composes it."""

import contextlib
import graphlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scaleflow.config.compose import (
    CommandWords,
    explain_error,
    list_options,
    open_hydra,
    shorten_error,
)
from scaleflow.config.unknown_keys import suggest
from scaleflow.config.words import make_override, parse_typed_value
from scaleflow.errors import ConfigError
from scaleflow.features.pipelines.references import (
    ReadOutput,
    StageCondition,
    flatten_list,
    resolve_values,
    rewrite_references,
    split_reference,
)
from scaleflow.features.pipelines.stage_commands import list_stage_commands
from scaleflow.interfaces.features import list_conf_folders
from scaleflow.interfaces.stages import COMMON_KEYS, StageCommand

GROUP = "pipeline"

#: Valid names of stages, and valid values of `foreach`, which become part of a name.
STAGE_NAME = re.compile(r"[A-Za-z][\w-]*")
MEMBER_NAME = re.compile(r"[\w-]+")

#: Keys of the file with a fixed meaning. All others are the user's.
OWN_KEYS = ("overrides", "stages")


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline."""

    name: str  # such as `fit`, or `adapt.berlin` with `foreach`
    command: StageCommand
    values: Mapping[str, Any]  # keys of its command, with interpolations
    variables: Mapping[str, Any]  # variables of `foreach`
    after: tuple[str, ...]  # stages that must end first without being referred to
    condition: StageCondition | None  # None: always runs
    line: str  # its place in the file, for messages


@dataclass(frozen=True)
class DeclaredPipeline:
    """A pipeline, as declared in its file."""

    name: str
    config_dirs: tuple[str, ...]  # absolute paths of the user's config folders
    text: str  # the composed file, as YAML
    overrides: Sequence[Any]  # for all stages that compose a config, with interpolations
    values: Mapping[str, Any]  # the user's own keys, with interpolations
    stages: Mapping[str, Stage]  # by name, in a possible running order
    needs: Mapping[str, frozenset[str]]  # stages that must end before a stage begins, by name

    def resolve(self, stage: Stage, read: ReadOutput) -> dict[str, Any]:
        """Returns a stage's keys with interpolations resolved.

        `overrides` begins with the pipeline's overrides and is flat. Raises ConfigError if a reference cannot be
        resolved. The message names the stage's line.
        """
        values = dict(stage.values)
        if stage.command.composes:
            values["overrides"] = [*self.overrides, *(values.get("overrides") or [])]
        with name_line(stage.line):
            resolved = resolve_values(values, {**self.values, **stage.variables}, self.split_reference, read=read)
            if "overrides" in resolved:
                quoted_words = []
                for word, resolved_word in zip(values["overrides"], resolved["overrides"], strict=True):
                    quoted_words.append(quote_result(word, resolved_word))
                resolved["overrides"] = check_override_words(flatten_list(quoted_words))
        return resolved

    def holds(self, stage: Stage, read: ReadOutput) -> bool:
        """Returns whether a stage's condition is true. Raises ConfigError if a value of it is not known."""
        if stage.condition is None:
            return True
        with name_line(stage.line):
            return stage.condition.holds(self.resolve_condition(stage, read))

    def resolve_condition(self, stage: Stage, read: ReadOutput) -> list[Any]:
        """Returns the values that a stage's condition compares. Raises ConfigError if one cannot be resolved."""
        values = {"when": stage.condition.interpolations if stage.condition else []}
        root = {**self.values, **stage.variables}
        resolved: list[Any] = resolve_values(values, root, self.split_reference, read=read)["when"]
        return resolved

    def split_reference(self, path: str) -> tuple[str, list[str]]:
        """Returns the stage and the path of the output that a reference names. Raises ConfigError if there is none."""
        commands = {name: stage.command for name, stage in self.stages.items()}
        return split_reference(path, commands, group_members(self.stages))

    def select(self, names: Sequence[str], flag: str) -> list[str]:
        """Returns the stages named by a flag. The name of a stage with `foreach` selects all its members."""
        members = group_members(self.stages)
        unknown = [name for name in names if name not in self.stages and name not in members]
        if unknown:
            hint = suggest(unknown[0], [*self.stages, *members])
            raise ConfigError(f"{flag} {unknown[0]}: there is no such stage{hint} ({', '.join(self.stages)})")
        selected: list[str] = []
        for name in names:
            if name in self.stages:
                selected.append(name)
            else:
                selected += members[name]
        return selected

    def find_dependents(self, name: str) -> set[str]:
        """Returns all stages that need this one, directly or through others."""
        dependents = {name}
        for other, needs in self.needs.items():  # in running order
            if needs & dependents:
                dependents.add(other)
        return dependents - {name}


@contextlib.contextmanager
def name_line(line: str) -> Iterator[None]:
    """Prefixes each ConfigError of the block with the stage's place in the file."""
    try:
        yield
    except ConfigError as refusal:
        raise ConfigError(f"{line}: {refusal}") from refusal


def group_members(stages: Mapping[str, Stage]) -> dict[str, list[str]]:
    """Returns the member stages of each stage with `foreach`."""
    members: dict[str, list[str]] = {}
    for name, stage in stages.items():
        if stage.variables:
            members.setdefault(name.partition(".")[0], []).append(name)
    return members


def quote_result(written: Any, word: Any) -> Any:
    """Quotes an override's value if a reference gave it characters that Hydra cannot parse.

    `written` is the override before references were resolved, `word` the one after, or a list.
    """
    if isinstance(word, list):
        return [quote_result(written, item) for item in word]
    if not (isinstance(written, str) and isinstance(word, str)) or "${" not in written or "=" not in word:
        return word
    key, _, value = word.partition("=")
    try:
        parse_typed_value(value)
    except HydraException:
        return make_override(key, value)
    return word


def check_override_words(words: Sequence[Any]) -> list[str]:
    """Returns the overrides, only the last one of each key. Hydra rejects two options of one group."""
    for word in words:
        if not isinstance(word, str):
            raise ConfigError(f"overrides: {word}: expected words KEY=VALUE in quotes")
    last_places: dict[str, int] = {}
    for place, word in enumerate(words):
        last_places[word.partition("=")[0]] = place
    return [words[place] for place in sorted(last_places.values())]


def load_pipeline(name: str, config_dirs: Sequence[str], words: Sequence[str] = ()) -> DeclaredPipeline:
    """Reads a pipeline and checks everything that needs no configs of its stages.

    Args:
        name: name of the file, without folder and `.yaml`.
        words: `STAGE.KEY=VALUE` adds an override to a stage. `KEY=VALUE` sets one of the user's keys in the file.

    Raises ConfigError if the pipeline cannot work. The message names the line of the file.
    """
    config = compose_pipeline(name, config_dirs)
    text = OmegaConf.to_yaml(config)
    raw: Any = rewrite_references(OmegaConf.to_container(config, resolve=False))
    lines = SourceLines(name, config_dirs)
    values = {str(key): value for key, value in raw.items() if key not in OWN_KEYS}
    sections = raw.get("stages")
    if not isinstance(sections, dict) or not sections:
        raise ConfigError(f"{lines.find()}: has no stages; write stages: {{NAME: {{command: COMMAND}}}}")
    with name_line(lines.find("overrides")):
        overrides = list_overrides(raw.get("overrides"))
    stages: dict[str, Stage] = {}
    for key, section in sections.items():
        line = f"{lines.find('stages', str(key))}: stage {key}"
        with name_line(line):
            stages |= read_stages(str(key), section, values, line=line)
    dirs = tuple(str(Path(folder).absolute()) for folder in config_dirs)
    pipeline = DeclaredPipeline(name, dirs, text, overrides=overrides, values=values, stages=stages, needs={})
    return order_stages(apply_words(pipeline, words))


def compose_pipeline(name: str, config_dirs: Sequence[str]) -> Any:
    """Composes the file, with its content at the root of the config."""
    command = CommandWords(config_dirs=config_dirs).prepare()
    files = find_pipeline_files(name, config_dirs)
    if not files:
        known = list_options(config_dirs).get(GROUP, [])  # reads many files
        if name not in known:
            raise ConfigError(
                f"{name}: there is no such pipeline{suggest(name, known)} ({', '.join(known)}); it is a file "
                f"{GROUP}/NAME.yaml in the folder of --config-dir"
            )
    if len(files) > 1:
        raise ConfigError(f"{name}: there are two pipelines of this name, {files[0]} and {files[1]}; rename yours")
    try:
        with open_hydra():
            return hydra.compose(overrides=[*command.search, f"+{GROUP}@_global_={name}"])
    except yaml.MarkedYAMLError as error:
        raise ConfigError(explain_error(error, command)) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{GROUP}/{name}.yaml: {shorten_error(error)}") from error


def find_pipeline_files(name: str, config_dirs: Sequence[str]) -> list[Path]:
    """Returns the files with this pipeline's name. Hydra takes the first."""
    paths = (folder / GROUP / f"{name}.yaml" for folder in (*list_conf_folders(), *map(Path, config_dirs)))
    return [path for path in paths if path.is_file()]


class SourceLines:
    """Finds the lines of keys in a pipeline's file."""

    def __init__(self, name: str, config_dirs: Sequence[str]) -> None:
        self._name = f"{GROUP}/{name}.yaml"
        files = find_pipeline_files(name, config_dirs)
        self._tree = yaml.compose(files[0].read_text()) if files else None

    def find(self, *keys: str) -> str:
        """Returns the file's name, and the line of a key if the file has it."""
        node = self._tree
        line = 0
        for key in keys:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            matching = [pair for pair in pairs if pair[0].value == key]
            if not matching:
                return self._name
            key_node, node = matching[0]
            line = key_node.start_mark.line + 1
        return f"{self._name}, line {line}" if line else self._name


def read_stages(key: str, section: Any, values: Mapping[str, Any], line: str) -> dict[str, Stage]:
    """Reads a stage, or all members of its `foreach`. Raises ConfigError if it is wrong."""
    if not STAGE_NAME.fullmatch(key):
        raise ConfigError("its name must be of letters, digits, _ and -, and begin with a letter")
    known = list_stage_commands()
    if not isinstance(section, dict) or not isinstance(section.get("command"), str):
        raise ConfigError(f"expected {{command: COMMAND, ...}}, one of {', '.join(known)}")
    command = known.get(section["command"])
    if command is None:
        hint = suggest(section["command"], known)
        raise ConfigError(f"command: {section['command']}: is no command of a stage{hint} ({', '.join(known)})")
    check_section(command, section)
    own = {str(name): value for name, value in section.items() if name not in COMMON_KEYS and value is not None}
    check_stage_keys(command, own)
    after = resolve_now("after", section.get("after") or [], values)
    after = tuple(map(str, after if isinstance(after, list) else [after]))
    condition = read_condition(section.get("when"))
    make = partial(Stage, command=command, values=own, after=after, condition=condition, line=line)
    if section.get("foreach") is None:
        return {key: make(key, variables={})}
    stages = {}
    for variables in list_members(section["foreach"], values):
        name = ".".join([key, *map(str, variables.values())])
        stages[name] = make(name, variables=variables)
    return stages


def check_section(command: StageCommand, section: Mapping[Any, Any]) -> None:
    """Raises ConfigError if a stage has keys that its command does not take, or lacks one that it needs."""
    for name in section:
        if name not in command.keys:
            hint = suggest(str(name), command.keys)
            raise ConfigError(f"{name}: is no key of {command.name}{hint} ({', '.join(command.keys)})")
    for name in command.required:
        if section.get(name) is None:
            raise ConfigError(f"{name}: is missing; {command.name} needs {', '.join(command.required)}")


def read_condition(when: Any) -> StageCondition | None:
    """Returns the condition of a stage; None if it has none. Raises ConfigError if it is never true."""
    if when is None:
        return None
    condition = StageCondition(str(when))
    if not condition.interpolations and not condition.holds([]):
        raise ConfigError(f"when: {when}: is never true, so that the stage could never run")
    return condition


def check_stage_keys(command: StageCommand, values: dict[str, Any]) -> None:
    """Checks types and literal choices of a stage's own keys. Turns its `overrides` into a list."""
    for key, value in values.items():
        choices = command.flags.get(key, ())
        text = str(value).lower() if isinstance(value, bool) else value
        if choices and not (isinstance(text, str) and (text in choices or "${" in text)):
            raise ConfigError(f"{key}: {value}: expected {' or '.join(choices)}")
        if key == "overrides":
            values[key] = list_overrides(value)
        if key == "arguments" and not isinstance(value, dict) and "${" not in str(value):
            raise ConfigError(f"arguments: {value}: expected {{NAME: VALUE}}")
        if key in ("run", "target") and not isinstance(value, str):
            raise ConfigError(f"{key}: {value}: expected a text")


def list_overrides(value: Any) -> list[Any]:
    """Returns overrides as a list. Raises ConfigError if they are neither a list nor a reference."""
    if isinstance(value, str) and value.startswith("${"):
        return [value]
    if not isinstance(value, list | None):
        raise ConfigError(f"overrides: {value}: expected a list of words KEY=VALUE, or a reference to one")
    return value or []


def list_members(foreach: Any, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the variables of each member of `foreach`: all combinations of its values."""
    resolved = resolve_now("foreach", foreach, values)
    if not isinstance(resolved, dict) or not resolved:
        raise ConfigError(f"foreach: {resolved}: expected {{VARIABLE: [VALUE, ...]}}")
    for name, choices in resolved.items():
        if not isinstance(choices, list) or not choices:
            raise ConfigError(f"foreach: {name}: {choices}: expected a list of values")
        for value in choices:
            if not MEMBER_NAME.fullmatch(str(value)):
                raise ConfigError(
                    f"foreach: {name}: {value}: becomes a part of the stage's name; it must be of letters, "
                    "digits, _ and -"
                )
        if len({str(value) for value in choices}) < len(choices):
            raise ConfigError(f"foreach: {name}: {choices}: names a value twice")
    return [dict(zip(resolved, row, strict=True)) for row in itertools.product(*resolved.values())]


def resolve_now(key: str, value: Any, values: Mapping[str, Any]) -> Any:
    """Resolves a key from the user's keys alone. Raises ConfigError if it refers to a stage's output."""

    def refuse(path: str) -> tuple[str, list[str]]:
        raise ConfigError(f"{key}: ${{stages.{path}}}: the stages must be known before any of them has run")

    return resolve_values({key: value}, values, refuse, read=lambda *_: None)[key]


def apply_words(pipeline: DeclaredPipeline, words: Sequence[str]) -> DeclaredPipeline:
    """Applies the words of the command: adds overrides to stages and sets the user's keys."""
    stages = dict(pipeline.stages)
    values = OmegaConf.create(dict(pipeline.values))
    members = group_members(stages)
    for word in words:
        key, equals, _ = word.partition("=")
        heads = [head for head in (*stages, *members) if key.startswith(f"{head}.")]
        if heads and equals:
            head = max(heads, key=len)
            for name in [head] if head in stages else members[head]:
                if not stages[name].command.takes_overrides:
                    raise ConfigError(f"{word}: the stage {name}, a function of Python, takes no overrides")
                own = [*(stages[name].values.get("overrides") or []), word.removeprefix(f"{head}.")]
                stages[name] = replace(stages[name], values={**stages[name].values, "overrides": own})
            continue
        if not equals or key.partition(".")[0] not in pipeline.values:
            known = [*stages, *members, *pipeline.values]
            hint = suggest(key.partition(".")[0], known)
            raise ConfigError(
                f"{word}: expected STAGE.KEY=VALUE{', or KEY=VALUE of the file' if pipeline.values else ''}{hint} "
                f"({', '.join(known)})"
            )
        OmegaConf.update(values, key, CommandWords([word]).parsed[0].value(), merge=True)
    raw: Any = OmegaConf.to_container(values, resolve=False)
    return replace(pipeline, stages=stages, values=raw)


def order_stages(pipeline: DeclaredPipeline) -> DeclaredPipeline:
    """Orders stages by their dependencies. Raises ConfigError if they depend on each other in a circle."""
    members = group_members(pipeline.stages)
    needs: dict[str, set[str]] = {}
    for name, stage in pipeline.stages.items():
        needed = set[str]()
        needs[name] = needed
        for other in stage.after:
            if other not in pipeline.stages and other not in members:
                hint = suggest(other, [*pipeline.stages, *members])
                raise ConfigError(f"{stage.line}: after: {other}: there is no such stage{hint}")
            needed |= {other} if other in pipeline.stages else set(members[other])

        def note(other: str, path: Sequence[str], needed: set[str] = needed) -> str:
            """Notes that the stage reads a value of another stage, and returns a text in place of the value."""
            needed.add(other)
            return ""

        # To find what a stage reads, its values are resolved with a function that only notes.
        pipeline.resolve(stage, note)
        with name_line(stage.line):
            pipeline.resolve_condition(stage, note)
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        circle = [*reversed(error.args[1])]
        raise ConfigError(
            f"{pipeline.stages[circle[0]].line}: depends on itself: {' -> '.join(circle)} (each needs the next)"
        ) from error
    order = sort_stages(needs)
    return replace(
        pipeline,
        stages={name: pipeline.stages[name] for name in order},
        needs={name: frozenset(needs[name]) for name in order},
    )


def sort_stages(needs: Mapping[str, set[str]]) -> list[str]:
    """Orders stages so that each comes after the stages it needs, and otherwise as in the file."""
    rest = [*needs]
    done = list[str]()
    while rest:
        first = next(name for name in rest if needs[name] <= {*done})
        rest.remove(first)
        done.append(first)
    return done
