"""Makes the name of a run from the typed model and optimizer keys, the data and the main options."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleflow.config.parse import is_under
from scaleflow.interfaces import Plan
from scaleflow.interfaces.secret_masking import MASK, mask_override, mask_secrets

#: Overrides that are repeated in a run's name, because its other parts do not contain them.
NAMED_OVERRIDE = re.compile(r"\+*(optimizer|(model|optimizer)\.[\w.]+)=")

#: Maximum length of a value in a run's name, in characters.
MAX_LENGTH = 24


def label_overrides(overrides: Sequence[str], config: Mapping[str, Any]) -> str:
    """Returns the typed keys of model and optimizer for the run's name, such as `units=64 learning_rate=0.1`.

    Args:
        overrides: the words of the command. A later override of a key replaces an earlier one.
        config: the resolved config; interpolations get their values from it.

    Secrets are left out, and long values are cut.
    """
    typed = {}
    for word in overrides:
        if NAMED_OVERRIDE.match(word):
            key, _, value = resolve_override(mask_override(word), config).lstrip("+").partition("=")
            typed[key] = value
    uses = Counter(key.rpartition(".")[2] for key in typed)  # how many keys have the same last part
    labels = []
    for key, value in typed.items():
        if MASK in value:
            continue
        leaf = key.rpartition(".")[2]
        name = leaf if uses[leaf] == 1 else key
        text = " ".join(value.split())
        if len(text) > MAX_LENGTH:
            text = f"{text[:MAX_LENGTH]}..."
        labels.append(f"{name}={text}")
    return " ".join(labels)


def resolve_override(override: str, config: Mapping[str, Any]) -> str:
    """Returns an override with its interpolation replaced by the value in the resolved config."""
    key, _, value = override.partition("=")
    if "${" not in value:
        return override
    resolved: Any = config
    for part in key.lstrip("+").split("."):
        if not isinstance(resolved, Mapping) or part not in resolved:
            return override
        resolved = resolved[part]
    return f"{key}={mask_secrets(resolved)}"


#: An interpolation that refers to a key.
KEY_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def name_sweep(raw: str | None, swept: Sequence[str], config: Mapping[str, Any]) -> str:
    """Returns the name of a sweep's parent run, with `*` where the jobs differ.

    Args:
        raw: `tracking.run_name` as the user wrote it, such as `exp-s${seed}`.
        swept: the keys and groups with several values.
        config: the resolved config of one job.
    """
    default = f"sweep of {', '.join(swept) or 'one job'}"
    if not raw:
        return default

    def fill(match: re.Match[str]) -> str:
        key = match[1]
        if is_under(key, swept):
            return "*"
        return resolve_override(f"{key}={match[0]}", config).partition("=")[2]

    name = KEY_REFERENCE.sub(fill, raw)
    return default if "${" in name else name


def describe_name(plan: Plan) -> str:
    """Returns the dataset option with its argument `name`, if there is one, such as `tfds mnist`."""
    target = plan.dataset.target
    chosen = plan.choices.get("dataset") or target.path.rpartition(".")[2]
    name = target.arguments.get("name")
    return f"{chosen} {name}" if isinstance(name, str) and name != chosen else chosen


def describe_data_name(plan: Plan) -> str:
    """Returns the user's name for the data: the name of its file or folder, else the name of the dataset."""
    data_dir = plan.dataset.target.arguments.get("data_dir")
    has_name = "name" in plan.dataset.target.arguments  # `data_dir` is then a folder of many datasets
    if isinstance(data_dir, str) and not has_name:
        return Path(data_dir).name
    return describe_name(plan)


def make_run_name(plan: Plan, resolved: Mapping[str, Any], label: str) -> str:
    """Returns the run's name: `tracking.run_name` and the label, or the label, the data and the main options.

    The label comes first because lists of runs show only the first 20 characters of a name.
    """
    if plan.tracking.run_name:
        return f"{plan.tracking.run_name} {label}".rstrip()
    parts = (*name_data(plan), plan.choices.get("model", "?"), resolved["strategy"], resolved["precision"])
    labeled = label.split()
    name = "-".join(part for part in parts if part not in labeled)
    return f"{label} {name}".strip()


def name_data(plan: Plan) -> list[str]:
    """Returns the name of the data's file or folder, and of the target if there is one: `churn.csv`, `churned`."""
    file = describe_data_name(plan)
    is_copy = file.startswith("data-") and file.endswith(".feather")  # the copy of a DataFrame in the run's folder
    data = describe_name(plan) if is_copy or not file else file
    names = [str(mask_secrets(data))]
    target = plan.dataset.target.arguments.get("target")
    columns = [target] if isinstance(target, str) else target
    if isinstance(columns, list | tuple) and columns:
        names.append("+".join(str(column) for column in columns)[:MAX_LENGTH])
    return names
