"""Handles the words of a command line: splits them, and quotes them for Hydra and the shell."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString

from scaleflow.errors import ConfigError
from scaleflow.interfaces.features import import_named, list_default_options, list_features
from scaleflow.interfaces.secret_masking import mask_override, mask_secrets

#: Hydra's flags that take the next word as their value.
FLAGS_WITH_VALUE = (
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--config-dir",
    "-cd",
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--info",
    "-i",
    "--experimental-rerun",
)

#: All flags of a run.
RUN_FLAGS = (
    *(*FLAGS_WITH_VALUE, "--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc", "--json"),
)


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits words into flags with their values, and overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    is_value = False  # whether the word is the value of the flag before it
    for word in words:
        if is_value or word.startswith("-"):
            flags.append(word)
        else:
            overrides.append(word)
        is_value = not is_value and word in FLAGS_WITH_VALUE
    return flags, overrides


def split_overrides(words: list[str]) -> list[str]:
    """Splits the value of `--overrides 'a=1 b=2'` into words, because MLflow passes a parameter as one word.

    Raises ConfigError if a quote is not closed.
    """
    if "--overrides" not in words[:-1]:
        return words
    index = words.index("--overrides")
    try:
        split = shlex.split(words[index + 1])
    except ValueError as error:
        wrong = next(word for word in words[index + 1].split() if "'" in word or '"' in word)
        key, _, value = wrong.partition("=")
        raise ConfigError(
            f"--overrides: {mask_override(wrong)}: {str(error).lower()}; write this word as "
            f"{mask_secrets(quote_override(key, value))}"
        ) from error
    return [*words[:index], *split, *words[index + 2 :]]


def quote_override(key: str, value: object) -> str:
    """Returns `KEY=VALUE` as a word for a shell, with the value quoted for Hydra if necessary."""
    word = make_override(key, value)
    if "'" in word and not set(word) & set("$`!"):  # easier to read than the output of shlex
        return '"{}"'.format(re.sub(r'(["\\])', r"\\\1", word))
    return shlex.quote(word)


def make_override(key: str, value: object) -> str:
    """Returns `KEY=VALUE` for Hydra, quoted so that Hydra reads the value as text."""
    return f"{key}={write_value(str(value))}"


def write_value(text: str) -> str:
    """Returns a text as typed after `KEY=`, in quotes if necessary."""
    is_plain = re.fullmatch(r"[\w./:@%+-][\w./:@%+ -]*", text, re.ASCII) is not None and text == text.strip()
    if is_plain and parse_typed_value(text) == text:
        return text
    return quote_value(text)


def quote_value(text: str) -> str:
    """Returns a text in quotes, according to Hydra's grammar."""
    return str(QuotedString(text, Quote.single).with_quotes())


def parse_typed_value(text: str) -> Any:
    """Returns the value that Hydra parses from the text after `KEY=`. Raises HydraException if it is invalid."""
    return OverridesParser.create().parse_override(f"key={text}").value()


def quote_nan_option(words: Sequence[str]) -> list[str]:
    """Quotes the option of `debug=nan`, which Hydra would parse as a number."""
    quoted = []
    for word in words:
        if word.startswith("debug="):
            word = re.sub(r"(?<=[=,])nan(?=,|$)", "'nan'", word)
        quoted.append(word)
    return quoted


def show_keys(text: str) -> str:
    """Returns a text with the keys of features as they are typed, such as `fit.epochs` for `++script.fit.epochs`."""
    for feature in list_features().values():
        for key, typed in feature.typed_keys.items():
            text = re.sub(rf"(?<![\w.])\+*{re.escape(key)}(?!\w)", typed, text)
    return text


def show_words(words: Sequence[str]) -> list[str]:
    """Returns the words of a run as a command has them, to be shown or typed again. Secrets are masked."""
    shown: list[str] = []
    for word in words:
        shown.append(show_keys(mask_override(word)))
    for feature in list_features().values():
        if feature.typed_words:
            shown = import_named(feature.typed_words)(shown)
    return shown


#: Options of `dataset` whose default model is `model=tabular`, and a pattern of words that choose one of them.
TABLES = ("table", "csv")
WORD_OF_TABLE = re.compile(rf"\+?dataset=.*\b({'|'.join(TABLES)})\b")

#: Overrides that `model=tabular` does not accept: keys of `model=mlp`, and a user's function, which ignores `by_size`.
KEYS_OF_MLP = re.compile(r"[+~]*model\.(_target_|dropout|batch_norm)\b")


def prepare_words(words: Sequence[str]) -> list[str]:
    """Converts the words of a command to the form that Hydra needs.

    Raises ConfigError for `~GROUP` if a run needs the group.
    """
    prepared = quote_nan_option(words)
    prepared = replace_removed_groups(prepared)
    prepared = choose_model_of_table(prepared)
    return accept_keys_of_run(prepared)


#: Optional config groups of the core: they have an option `none`.
OPTIONAL_GROUPS = ("tracking", "checkpoint", "evaluation", "profiler", "debug")

#: Config groups of the core that every run needs, each with an option to suggest.
NEEDED_GROUPS = {
    "strategy": "auto",
    "hardware": "auto",
    "precision": "float32",
    "optimizer": "adam",
    "objective": "auto",
    "training": "default",
    "model": "mlp",
    "dataset": "digits",
    "cluster": "local",
}


def list_needed_groups() -> dict[str, str]:
    """Returns the groups that every run needs, including those of features, each with an option to suggest."""
    needed = dict(NEEDED_GROUPS)
    for group, option in list_default_options().items():
        if option != "none":
            needed[group] = option
    return needed


def list_optional_groups() -> list[str]:
    """Returns the optional groups, including those of features."""
    of_features = [group for group, option in list_default_options().items() if option == "none"]
    return [*OPTIONAL_GROUPS, *of_features]


def replace_removed_groups(words: Sequence[str]) -> list[str]:
    """Replaces `~tracking` with `tracking=none`, and does the same for all optional groups.

    Without its section, a group would use its defaults. Raises ConfigError if a run needs the group.
    """
    replaced: list[str] = []
    for word in words:
        removal = re.fullmatch(r"~(\w+)(=.*)?", word)
        if removal is None:
            replaced.append(word)
            continue
        group = removal[1]
        if group in list_needed_groups():
            raise ConfigError(need_group(word, group))
        replaced.append(f"{group}=none" if group in list_optional_groups() else word)
    return replaced


def need_group(word: str, group: str) -> str:
    """Returns the message that refuses a word because it removes a group that a run needs."""
    example = f"{group}={list_needed_groups()[group]}"
    return f"{word}: a run needs an option of {group}, such as {example}; leave this word out"


def choose_model_of_table(words: Sequence[str]) -> list[str]:
    """Adds `model=mlp` if a table's run names no model but uses keys that the default model lacks."""
    is_table = any(WORD_OF_TABLE.match(word) for word in words)
    is_chosen = any(re.match(r"\+?(model|experiment|resume)=", word) for word in words)
    if not is_table or is_chosen or not any(KEYS_OF_MLP.match(word) for word in words):
        return list(words)
    return [*words, "model=mlp"]


def accept_keys_of_run(words: Sequence[str]) -> list[str]:
    """With `resume=RUN`, makes Hydra accept keys that only that run's options have, such as `model.filters=8` of a cnn.

    If the run also lacks the key, it is rejected when the run's config is read.
    """
    if not any(word.lstrip("+").startswith("resume=") for word in words):
        return list(words)
    accepted = []
    for word in words:
        sets_dotted_key = re.match(r"(?!hydra\.)\w+(\.\w+)+=", word)
        accepted.append(f"++{word}" if sets_dotted_key else word)
    return accepted
