"""Prepares the exact repetition of a run: compares its ingredients with the code, data and machine here."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from scaleflow.config.compose import CommandWords
from scaleflow.config.unknown_keys import suggest
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.features import find_untrained_runs
from scaleflow.interfaces.formatting import join_first
from scaleflow.runs.code_digest import VERSION, find_code
from scaleflow.runs.identity import CATEGORIES, MODEL_KEYS, Difference, compare_known, is_ignored, list_unknown
from scaleflow.runs.provenance.collect import LaunchFacts, describe_module, digest_changes
from scaleflow.runs.provenance.git import GONE, is_path_within, list_changes_since
from scaleflow.runs.provenance.machine import list_relevant_variables
from scaleflow.runs.provenance.record import CodeRecord, Provenance
from scaleflow.runs.reuse import RUN_DIR
from scaleflow.runs.run import Run
from scaleflow.worker.metadata import identify_files

#: Why runs with a strategy cannot be repeated exactly.
ASYNCHRONOUS = {"parameter_server": "its workers update the weights independently, in an order that differs each time"}

#: Keys for the length of a run, which `resume` may change.
LENGTHS = ("training.epochs", "training.max_steps")

#: Maximum number of differences per category that a message names.
MAX_NAMED = 5


def parse_despite(text: str) -> tuple[str, ...]:
    """Parses the value of `--despite`. Raises ConfigError for a word that is not a category."""
    categories = []
    for part in text.split(","):
        word = part.strip()
        if not word:
            continue
        if word not in CATEGORIES:
            raise ConfigError(f"--despite {word}: expected {', '.join(CATEGORIES)}{suggest(word, CATEGORIES)}")
        categories.append(word)
    return tuple(categories)


#: Schedules whose rates depend on the length of the run.
BY_LENGTH = ("cosine", "linear", "polynomial", "exponential", "one_cycle")


def check_repeatable(run: Run, words: CommandWords) -> None:
    """Raises ConfigError if this run cannot be repeated exactly, or if an override changes its results."""
    strategy = run.settings.get("resolved.strategy", run.settings.get("strategy", ""))
    reason = ASYNCHRONOUS.get(strategy)
    if reason:
        raise ConfigError(f"--exact: no run repeats one with strategy={strategy} exactly: {reason}; leave --exact out")
    untrained = find_untrained_runs(run.settings)
    if untrained is not None:
        raise ConfigError(f"--exact: this run {untrained.work}, which depends on the speed; repeat its command")
    if run.settings.get("training.max_seconds", "None") not in ("None", "null", ""):
        raise ConfigError("--exact: training.max_seconds ends a run by its speed; repeat its command")
    schedule = run.settings.get("optimizer.schedule", "constant")
    lengths = list_lengths(run) if schedule in BY_LENGTH else []
    if lengths:
        raise ConfigError(
            f"--exact: this run was resumed with {' '.join(lengths)}, and the rate of optimizer.schedule={schedule} "
            "depends on the length, so that no single run repeats it; leave --exact out"
        )
    for override in words.parsed:
        if not is_allowed(override, run.settings):
            raise ConfigError(
                f"{override.input_line}: --exact repeats a run with its own config; leave this out, or --exact"
            )


def is_allowed(override: Override, params: Mapping[str, str]) -> bool:
    """Returns whether an override sets only a location or the tracking, or repeats the run's own value."""
    key = str(override.key_or_group)
    if key in (RUN_DIR, "tracking") or (is_ignored(key) and not key.startswith(MODEL_KEYS)):
        return True
    if override.is_delete() or any(name.startswith(f"{key}.") for name in params):
        return False  # choosing a group's option replaces all its keys
    if key == "dataset.data_dir":
        return True
    value = override.value()
    if not isinstance(value, str):
        return params.get(key) == json.dumps(value)
    is_path = key.startswith("dataset.") and os.sep in value[1:] and Path(value).exists()
    return is_path or params.get(key) == value


def list_lengths(run: Run) -> list[str]:
    """Returns the overrides for the final length of a run that was resumed to train longer."""
    return [f"{key}={value}" for key, value in run.resumed_words.items() if key in LENGTHS]


def describe_here(plan: Plan, run: Run) -> Provenance:
    """Returns the provenance that a run with this plan would have here and now."""
    facts = LaunchFacts()
    code = find_code(plan.config, plan.search)
    git = facts.read_git()
    first = run.states[0].code
    modules = {name: describe_module(file, git) for name, file in code.items()}
    record = CodeRecord(first.is_kept, VERSION, modules)
    if git is not None:
        record = describe_repository(record, git, first)
    return Provenance(
        code=record,
        packages={name: package.identity for name, package in facts.packages.items()},
        editable={name: package.path for name, package in facts.packages.items() if package.path},
        machine=facts.machine,
        variables=list_relevant_variables(os.environ),
        data={"files": identify_files(plan)},
    )


def describe_repository(record: CodeRecord, git: CodeRecord, first: CodeRecord) -> CodeRecord:
    """Returns a record of the code here with the changes since the commit of the run's first record.

    So they can be compared even if another commit is checked out now. If that commit is not here, or the run kept no
    code, the record has the present commit.
    """
    changes = list_changes_since(git, first.commit) if first.is_kept else None
    if changes is None:
        return replace(record, commit=git.commit)
    for path in first.changed:
        if is_path_within(path):
            changes[path] = "changed" if (git.root / path).is_file() else GONE
    return replace(record, commit=first.commit, changed=digest_changes(replace(git, changed=changes)))


def compare_with_here(run: Run, here: Provenance, masked: Sequence[str] = ()) -> dict[str, list[Difference]]:
    """Returns the differences between a run and this machine, by category.

    Each resume of the run is compared as well as its start. Modules in `masked` differ only by a masked secret, which
    does not matter.
    """
    differences: dict[str, list[Difference]] = {category: [] for category in CATEGORIES}
    seen: set[Difference] = set()
    for state in run.states:
        since = f", since its resume {state.resume}," if state.resume else ""
        for difference in compare_known(state, here):
            if difference in seen:
                continue
            seen.add(difference)
            matters = difference.matters and difference.name not in masked
            named = replace(difference, name=f"{difference.name}{since}", matters=matters)
            differences[difference.category].append(named)
    return differences


def describe_categories(differences: Mapping[str, Sequence[Difference]], unknown: Sequence[str]) -> Iterator[str]:
    """Yields a line per category: differences that matter, then differences without effect."""
    for category, members in differences.items():
        if category in unknown:
            yield f"{category}: not known, the run has no record of it"
            continue
        line = f"{category}: {name_first(select_real(members)) or 'the same'}"
        others = [difference for difference in members if not difference.matters]
        if others:
            line += f"; without effect: {name_first(others)}"
        yield line


def select_real(differences: Sequence[Difference]) -> list[Difference]:
    """Returns the differences that can change results."""
    return [difference for difference in differences if difference.matters]


def refuse_differences(
    run: Run, differences: Mapping[str, Sequence[Difference]], despite: Sequence[str], can_check_out: bool
) -> None:
    """Raises ConfigError for differences that can change the results, unless `despite` allows their category."""
    unknown = list_unknown(run.states[0])
    reasons = {}
    for category, members in differences.items():
        if category in despite:
            continue
        reason = "not known" if category in unknown else name_first(select_real(members))
        if reason:
            reasons[category] = reason
    if reasons:
        what = "; ".join(f"{category}: {text}" for category, text in reasons.items())
        advice = ", or --checkout DIR for the code of the run" if "code" in reasons and can_check_out else ""
        raise ConfigError(
            f"--exact: what the run was made of is not what is here: {what}\n"
            f"restore it, or add --despite {','.join([*despite, *reasons])} to run all the same{advice}"
        )


def name_first(differences: Sequence[Difference]) -> str:
    """Describes differences for a message, at most `MAX_NAMED`; "" without differences."""
    return join_first([str(difference) for difference in differences], MAX_NAMED)


def list_resolved_changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Describes resolved values of `auto` that differ between two runs."""
    changes = []
    for key, before in first.items():
        if key.startswith("resolved.") and key in second and before != second[key]:
            changes.append(f"{key.removeprefix('resolved.')} was {before} and is {second[key]}")
    return changes
