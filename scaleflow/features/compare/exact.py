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
    words = tuple(filter(None, (word.strip() for word in text.split(","))))
    for word in words:
        if word not in CATEGORIES:
            raise ConfigError(f"--despite {word}: expected {', '.join(CATEGORIES)}{suggest(word, CATEGORIES)}")
    return words


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
    if schedule in BY_LENGTH and (lengths := list_lengths(run)):
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
    value = None if override.is_delete() else override.value()
    if key in (RUN_DIR, "tracking") or (is_ignored(key) and not key.startswith(MODEL_KEYS)):
        return True
    if override.is_delete() or any(name.startswith(f"{key}.") for name in params):
        return False  # choosing a group's option replaces all its keys
    is_path = key.startswith("dataset.") and isinstance(value, str) and os.sep in value[1:] and Path(value).exists()
    is_same = params.get(key) == (value if isinstance(value, str) else json.dumps(value))
    return key == "dataset.data_dir" or is_path or is_same


def list_lengths(run: Run) -> list[str]:
    """Returns the overrides for the final length of a run that was resumed to train longer."""
    return [f"{key}={value}" for key, value in run.resumed_words.items() if key in LENGTHS]


def describe_here(plan: Plan, run: Run) -> Provenance:
    """Returns the provenance that a run with this plan would have here and now."""
    facts = LaunchFacts()
    code = find_code(plan.config, plan.search)
    git = facts.read_git()
    first = run.states[0].code
    record = CodeRecord(first.is_kept, VERSION, {name: describe_module(file, git) for name, file in code.items()})
    changed = list_changes_since(git, first.commit) if git is not None and first.is_kept else None
    if git is not None and changed is not None:  # even if another commit is checked out now
        paths = filter(is_path_within, first.changed)
        known = {path: "changed" if (git.root / path).is_file() else GONE for path in paths}
        digests = digest_changes(replace(git, changed={**changed, **known}))
        record = replace(record, commit=first.commit, changed=digests)
    elif git is not None:
        record = replace(record, commit=git.commit)
    return Provenance(
        code=record,
        packages={name: each.identity for name, each in facts.packages.items()},
        editable={name: each.path for name, each in facts.packages.items() if each.path},
        machine=facts.machine,
        variables=list_relevant_variables(os.environ),
        data={"files": identify_files(plan)},
    )


def compare_with_here(run: Run, here: Provenance, masked: Sequence[str] = ()) -> dict[str, list[Difference]]:
    """Returns the differences between a run and this machine, by category.

    Each resume of the run is compared as well as its start. Modules in `masked` differ only by a masked secret, which
    does not matter.
    """
    found: dict[str, list[Difference]] = {category: [] for category in CATEGORIES}
    seen: set[Difference] = set()
    for state in run.states:
        since = f", since its resume {state.resume}," if state.resume else ""
        for each in compare_known(state, here):
            if each not in seen:
                matters = each.matters and each.name not in masked
                found[each.category].append(replace(each, name=f"{each.name}{since}", matters=matters))
                seen.add(each)
    return found


def describe_categories(differences: Mapping[str, Sequence[Difference]], unknown: Sequence[str]) -> Iterator[str]:
    """Yields a line per category: differences that matter, then differences without effect."""
    for category, each in differences.items():
        if category in unknown:
            yield f"{category}: not known, the run has no record of it"
            continue
        real, others = ([one for one in each if one.matters is matters] for matters in (True, False))
        text = name_first(real) or "the same"
        yield f"{category}: {text}" + (f"; without effect: {name_first(others)}" if others else "")


def refuse_differences(
    run: Run, differences: Mapping[str, Sequence[Difference]], despite: Sequence[str], can_check_out: bool
) -> None:
    """Raises ConfigError for differences that can change the results, unless `despite` allows their category."""
    unknown = list_unknown(run.states[0])
    reasons = {
        category: "not known" if category in unknown else name_first([each for each in found if each.matters])
        for category, found in differences.items()
        if category not in despite
    }
    reasons = {category: text for category, text in reasons.items() if text}
    if reasons:
        what = "; ".join(f"{category}: {text}" for category, text in reasons.items())
        advice = ", or --checkout DIR for the code of the run" if "code" in reasons and can_check_out else ""
        raise ConfigError(
            f"--exact: what the run was made of is not what is here: {what}\n"
            f"restore it, or add --despite {','.join([*despite, *reasons])} to run all the same{advice}"
        )


def name_first(differences: Sequence[Difference]) -> str:
    return join_first([*map(str, differences)], MAX_NAMED)


def list_resolved_changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Describes resolved values of `auto` that differ between two runs."""
    keys = [key for key in first if key.startswith("resolved.") and key in second and first[key] != second[key]]
    return [f"{key.removeprefix('resolved.')} was {first[key]} and is {second[key]}" for key in keys]
