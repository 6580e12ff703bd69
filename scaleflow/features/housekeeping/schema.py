"""Prints a JSON schema of configs, with which an editor completes and checks the keys of YAML files.

    scaleflow schema > scaleflow.schema.json               # of recipes (experiment/NAME.yaml), which may set any key
    scaleflow schema dataset > dataset.schema.json         # of the options of a group (dataset/NAME.yaml)

The first line of a YAML file names the schema, with a path from that file's folder:

    # yaml-language-server: $schema=../../dataset.schema.json

Keys that all options of a group share have their types and limits. The others are those of scaleflow's own options; a
class of yours may have more, which `scaleflow --cfg job` checks.

Exit code: 0 printed; 2 there is no such group.
"""

import dataclasses
import json
import re
import types
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin

from scaleflow.commands.frame import CommandParser, make_main
from scaleflow.config.parse import list_key_types, type_hints
from scaleflow.config.unknown_keys import suggest
from scaleflow.errors import ConfigError
from scaleflow.interfaces import EarlyStopping, Plan, Split, Target
from scaleflow.interfaces.features import list_conf_folders, list_option_files, list_sections
from scaleflow.launcher.command_exit import Outcome

#: Keys of a config that are read before it is parsed, or by Hydra.
MORE_KEYS = ("seed", "resume", "resume_data", "resume_code", "trusted_modules", "hydra", "defaults")

#: Schema of a value that is filled in later: an interpolation or `???`.
LATER = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}

PLAIN = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}
LIMITS = {"at_least": "minimum", "above": "exclusiveMinimum", "at_most": "maximum", "below": "exclusiveMaximum"}

#: Matches a line with a key and a comment, or a line that continues the comment.
COMMENTED = re.compile(r"(?P<indent> *)(?P<key>\w+):.*?\s# (?P<text>.*)$|\s{8,}# (?P<more>.*)$")


@make_main
def main(argv: list[str]) -> Outcome:
    parser = CommandParser("schema", __doc__)
    parser.add_argument("group", nargs="?", help="a config group; without it: of the whole config")
    print(json.dumps(describe_config(parser.parse_args(argv).group), indent=1))
    return Outcome()


def describe_config(group: str | None = None) -> dict[str, Any]:
    """Returns the schema of a group's options, or of the whole config.

    Raises ConfigError if there is no such group.
    """
    groups = list_groups()
    if group is None:
        keys: dict[str, Any] = {}
        for name, cls in groups.items():
            keys[name] = describe_section(name, cls)
        keys.update(dict.fromkeys(MORE_KEYS, True))
        schema = describe_object(keys, others=False)
    elif group in groups:
        schema = describe_section(group, groups[group])
        schema["properties"]["defaults"] = True
    else:
        raise ConfigError(f"{group}: there is no such group{suggest(group, groups)} ({', '.join(groups)})")
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def list_groups() -> dict[str, Any]:
    """Returns the dataclass of each config group: of the core, otherwise of a feature."""
    names = {"sweep"}
    for folder in list_conf_folders():
        names.update(path.name for path in folder.iterdir() if path.is_dir())
    groups: dict[str, Any] = {}
    for name, hint in type_hints(Plan).items():
        if dataclasses.is_dataclass(hint) and name in names:
            groups[name] = hint
    for name, classes in list_sections().items():
        groups.setdefault(name, classes[0])
    return groups


def describe_section(group: str, cls: Any) -> dict[str, Any]:
    """Returns the schema of a group: keys of its dataclass, and further keys of scaleflow's own options."""
    has_target = "target" in {field.name for field in dataclasses.fields(cls)}
    schema = describe_class(cls, group, others=has_target)
    properties = dict(schema["properties"])
    for section in list_sections().get(group, ()):
        properties.update(describe_class(section, group)["properties"])
    for key, comment in read_group_comments(group).items():
        properties[key] = {"description": comment, **properties.get(key, {})}
    return {**schema, "properties": properties}


def read_group_comments(group: str) -> dict[str, str]:
    """Returns the comments of a group's keys in the YAML files of its options and in those of the whole config."""
    comments: dict[str, str] = {}
    for file in list_option_files(group):
        comments |= read_comments(file.read_text())
    for folder in list_conf_folders():
        for file in folder.glob("*.yaml"):
            section = re.search(rf"^{group}:.*\n((?:[ ].*\n|\n)*)", file.read_text(), re.M)
            if section:
                comments |= read_comments(section[1])
    return comments


def read_comments(text: str) -> dict[str, str]:
    """Returns the comments of the top-level keys of a YAML text, by key."""
    lines = []
    key_indents = []
    for text_line in text.splitlines():
        line = COMMENTED.match(text_line)
        if line is None:
            continue
        lines.append(line)
        if line["key"]:
            key_indents.append(line["indent"])
    top_indent = min(key_indents, default="")
    comments: dict[str, str] = {}
    key = ""  # the last top-level key; "" after the key of an inner mapping
    for line in lines:
        if line["key"]:
            key = line["key"] if line["indent"] == top_indent else ""
            comments[key] = line["text"]
        else:
            comments[key] = f"{comments.get(key, '')} {line['more']}"
    comments.pop("", None)
    return comments


def describe_class(cls: Any, section: str = "", others: bool = False) -> dict[str, Any]:
    """Returns the schema of a section's dataclass, or of a dataclass inside one.

    `others` allows further keys: the arguments of a `_target_`.
    """
    hints = list_key_types(cls, section)
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name != "target":
            keys[field.name] = {"anyOf": [describe_hint(hints[field.name], field.metadata), LATER]}
    if others:
        keys["_target_"] = {"type": "string"}
    return describe_object(keys, others)


def describe_object(keys: Mapping[str, Any], others: bool) -> dict[str, Any]:
    """Returns the schema of a mapping with these keys. `others` allows further keys."""
    return {"type": "object", "properties": dict(keys), "additionalProperties": others}


def describe_hint(hint: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a type's values, as `scaleflow.config.parse.convert_value` takes them."""
    origin = get_origin(hint)
    inner = get_args(hint)
    describe = partial(describe_hint, limits=limits)
    if origin in (Union, types.UnionType):
        return {"anyOf": [describe(option) for option in inner]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": describe(inner[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": inner[1] is str or describe(inner[1])}
    if hint is Target:
        return {"type": "object", "required": ["_target_"]}
    if dataclasses.is_dataclass(hint):
        described = describe_class(hint)
        if hint is EarlyStopping:
            return {"anyOf": [described, {"enum": ["auto"]}]}
        if hint is Split:
            return {"anyOf": [described, described["properties"]["by"]]}
        return described
    bounds = describe_bounds(limits) if hint in (int, float) else {}
    return {"type": PLAIN[hint], **bounds}


def describe_bounds(limits: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the limits of a number by their names in a schema."""
    bounds = {}
    for name, bound in limits.items():
        if name in LIMITS:
            bounds[LIMITS[name]] = bound
    return bounds
