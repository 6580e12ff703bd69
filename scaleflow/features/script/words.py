"""Translates the words after `scaleflow train.py` to the words of a run."""

import difflib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException

from scaleflow.config.words import FLAGS_WITH_VALUE, RUN_FLAGS, make_override, parse_typed_value, quote_value
from scaleflow.errors import ConfigError
from scaleflow.interfaces import name_command

#: Groups and keys whose words keep their meaning when a script runs.
SHARED_KEYS = ("strategy", "hardware", "precision", "seed", "tracking", "cluster", "debug", "hydra", "sweep")

#: Words about checkpoints that apply to a script.
CHECKPOINT_WORDS = ("checkpoint=none", "checkpoint=default")
CHECKPOINT_KEY = "checkpoint.every_seconds"


#: Groups that the script may also set itself. If the command sets them, the script must not.
CONTESTED_GROUPS = ("strategy", "precision", "seed")

#: Keys of other runs that are arguments of `model.fit` in a script.
FIT_WORDS = {
    "epochs": "epochs",
    "training.epochs": "epochs",
    "batch_size": "batch_size",
    "training.batch_size": "batch_size",
    "training.global_batch_size": "batch_size",
    "training.steps_per_epoch": "steps_per_epoch",
    "dataset.validation": "validation_split",
}

#: What ends the words of scaleflow: the following words are the script's own arguments.
END_OF_WORDS = "--"


def translate_script(words: Sequence[str], place: int) -> list[str]:
    """Returns the words of a run that runs a script.

    Args:
        words: all words of the command.
        place: the position of the script among them.

    Raises:
        ConfigError: if there is no such file, or if a word sets something that the script itself decides.
    """
    script = words[place]
    if not Path(script).is_file():
        raise ConfigError(f"{script}: there is no such file{suggest_file(Path(script))}")
    own, arguments = split_arguments(words, place)
    translated = [make_override("script.path", script)]
    if arguments:
        quoted = ",".join(quote_value(argument.replace("${", "\\${")) for argument in arguments)
        translated.append(f"script.arguments=[{quoted}]")
    typed: list[str] = []
    is_value = False
    for word in own:
        if word.startswith("--") and not is_value and word.partition("=")[0] not in RUN_FLAGS:
            raise ConfigError(
                f"{word}: scaleflow has no such flag; the script's own arguments follow {END_OF_WORDS}: "
                f"scaleflow {script} ... {END_OF_WORDS} {word} ..."
            )
        if is_value or word.startswith("-"):
            translated.append(word)
            is_value = word in FLAGS_WITH_VALUE and not is_value
            continue
        translated.append(translate_word(word, script))
        group = read_key(word).partition(".")[0]
        if group in CONTESTED_GROUPS and group not in typed:
            typed.append(group)
    if typed:
        translated.append(f"script.typed=[{','.join(typed)}]")
    return translated


def translate_rerun(config: Mapping[str, Any], folder: str, words: Sequence[str]) -> list[str]:
    """Returns the words of `scaleflow rerun` as overrides of the config of a script's run.

    Args:
        folder: the folder of the run's own command; "" if it is unknown.

    Raises:
        ConfigError: if the script is not here, or if a word sets something that the script itself decides.
    """
    section = config["script"]
    if section.get("in_process"):
        return list(words)  # a rule refuses to repeat such a run
    if not Path(section["path"]).is_file():
        place = f"cd {shlex.quote(folder)}" if folder else "cd to the folder of the run's own command"
        raise ConfigError(
            f"{section['path']}: there is no such file, and the run began with it; type {place}, and rerun it there"
        )
    translated: list[str] = []
    typed: list[str] = list(section["typed"])
    for word in words:
        translated.append(translate_word(word, str(section["path"])))
        group = read_key(word).partition(".")[0]
        if group in CONTESTED_GROUPS and group not in typed:
            typed.append(group)
    if typed != section["typed"]:
        translated.append(f"script.typed=[{','.join(typed)}]")
    return translated


def restore_command(words: Sequence[str]) -> list[str]:
    """Returns the words of a script's run as a command has them: the script first, and its own arguments last.

    It is the inverse of `translate_script`, except for the keys, which are typed ones already. Words of other runs stay
    as they are.
    """
    script: list[str] = []
    others: list[str] = []
    arguments: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "script.path":
            script = read_values(value)
        elif key == "script.arguments":
            arguments = [END_OF_WORDS, *read_values(value)]
        elif key != "script.typed":
            others.append(word)
    return [*script, *others, *arguments]


def read_values(text: str) -> list[str]:
    """Returns the value, or the list of values, after `KEY=`. A text that Hydra cannot read, because a secret in it is
    masked, is one value.
    """
    try:
        value = parse_typed_value(text)
    except HydraException:
        value = text
    values = value if isinstance(value, list) else [value]
    return [str(each).replace("\\${", "${") for each in values]


def split_arguments(words: Sequence[str], place: int) -> tuple[list[str], list[str]]:
    """Returns the words of scaleflow without the script, and the script's own arguments."""
    before = list(words[:place])
    after = list(words[place + 1 :])
    if END_OF_WORDS in after:
        end = after.index(END_OF_WORDS)
        return before + after[:end], after[end + 1 :]
    return before + after, []


def suggest_file(path: Path) -> str:
    """Returns the end of a message about a missing file: a similar file in the same folder, if there is one."""
    names = [each.name for each in path.parent.glob(f"*{path.suffix}")]
    similar = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(similar[0])}?" if similar else ""


def read_key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def translate_word(word: str, script: str) -> str:
    """Returns a word of the command as Hydra gets it. Raises ConfigError if a script does not have such a key."""
    key = read_key(word)
    value = word.partition("=")[2]
    group, _, name = key.partition(".")
    if "=" not in word and not word.startswith("~"):
        raise ConfigError(
            f"{word}: expected KEY=VALUE; the script's own arguments follow {END_OF_WORDS}: "
            f"scaleflow {script} {END_OF_WORDS} {word}"
        )
    if group == "script" and name:
        if "." in name or name in ("path", "arguments", "constants", "fit", "compiled_rate", "typed"):
            raise ConfigError(f"{key}: expected script.NAME=VALUE, where NAME is a constant at the top of {script}")
        return f"++script.constants.{name}={value}"
    if group == "fit" and name:
        return f"++script.fit.{name}={value}"
    if key == "optimizer.learning_rate":
        return f"script.compiled_rate={value}"
    if group == "resume":
        raise ConfigError(f"{word}: the run has its script already; leave {script} out: {name_command()} {word}")
    if group in SHARED_KEYS or word in CHECKPOINT_WORDS or key == CHECKPOINT_KEY:
        return word
    meant = FIT_WORDS.get(key)
    if meant is not None:
        raise ConfigError(f"{word}: {script} decides this itself; type fit.{meant}={value} to change its model.fit")
    raise ConfigError(
        f"{word}: {script} decides this itself; leave it out, or type script.NAME=VALUE to change a constant of the "
        "script, fit.NAME=VALUE to change an argument of model.fit"
    )
