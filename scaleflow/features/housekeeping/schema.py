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
from collections.abc import Iterator, Mapping
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
    hints = type_hints(Plan)
    known = {*(path.name for folder in list_conf_folders() for path in folder.iterdir() if path.is_dir()), "sweep"}
    groups: dict[str, Any] = {}
    for name, hint in hints.items():
        if dataclasses.is_dataclass(hint) and name in known:
            groups[name] = hint
    for name, classes in list_sections().items():
        groups.setdefault(name, classes[0])
    if group is None:
        sections: dict[str, Any] = {name: describe_section(name, hint) for name, hint in groups.items()}
        schema = describe_object(sections | dict.fromkeys(MORE_KEYS, True), others=False)
    elif group in groups:
        schema = describe_section(group, groups[group])
        schema["properties"]["defaults"] = True
    else:
        raise ConfigError(f"{group}: there is no such group{suggest(group, groups)} ({', '.join(groups)})")
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def describe_section(group: str, cls: Any) -> dict[str, Any]:
    """Returns the schema of a group: keys of its dataclass, and further keys of scaleflow's own options."""
    texts = {key: text for file in list_option_files(group) for key, text in read_comments(file.read_text())}
    for shared in (file for folder in list_conf_folders() for file in folder.glob("*.yaml")):
        part = re.search(rf"^{group}:.*\n((?:[ ].*\n|\n)*)", shared.read_text(), re.M)
        texts |= dict(read_comments(part[1] if part else ""))
    schema = describe_class(cls, group, others="target" in {each.name for each in dataclasses.fields(cls)})
    properties = dict(schema["properties"])
    for section in list_sections().get(group, ()):
        properties.update(describe_class(section, group)["properties"])
    keys = {name: properties.get(name, {}) for name in (*properties, *texts)}
    described = {name: {"description": texts[name], **key} if name in texts else key for name, key in keys.items()}
    return {**schema, "properties": described}


def read_comments(text: str) -> Iterator[tuple[str, str]]:
    """Yields the top-level keys of a YAML text with their comments."""
    lines = [match for line in text.splitlines() if (match := COMMENTED.match(line))]
    first = min((match["indent"] for match in lines if match["key"]), default="")
    found = dict[str, str]()
    name = ""
    for match in lines:
        if match["key"]:
            name = match["key"] if match["indent"] == first else ""
            found |= {name: match["text"]}
        else:
            found[name] = f"{found.get(name, '')} {match['more']}"
    return ((key, text) for key, text in found.items() if key)


def describe_class(cls: Any, section: str = "", others: bool = False) -> dict[str, Any]:
    """Returns the schema of a section's dataclass, or of a dataclass inside one.

    `others` allows further keys: the arguments of a `_target_`.
    """
    hints = list_key_types(cls, section)
    fields = {each.name: each.metadata for each in dataclasses.fields(cls) if each.name != "target"}
    keys = {name: {"anyOf": [describe_hint(hints[name], limits), LATER]} for name, limits in fields.items()}
    return describe_object(keys | ({"_target_": {"type": "string"}} if others else {}), others)


def describe_object(keys: Mapping[str, Any], others: bool) -> dict[str, Any]:
    return {"type": "object", "properties": dict(keys), "additionalProperties": others}


def describe_hint(hint: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a type's values, as `scaleflow.config.parse.convert_value` takes them."""
    origin = get_origin(hint)
    inner = get_args(hint)
    describe = partial(describe_hint, limits=limits)
    if origin in (Union, types.UnionType):
        return {"anyOf": [describe(each) for each in inner]}
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
        return {"anyOf": [described, described["properties"]["by"]]} if hint is Split else described
    bounds = {LIMITS[name]: bound for name, bound in limits.items() if name in LIMITS and hint in (int, float)}
    return {"type": PLAIN[hint], **bounds}
