"""The digests of a user's code in the run's folder: written when the run begins, compared when it is resumed."""

from __future__ import annotations

import json
import sys

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.runs.code_digest import digest_code, list_digest_changes
from scaleflow.runs.folder import RunFolder, read_json

#: Digests of other versions are not compared: another version of Python may write the same code in another way.
VERSION = f"1, Python {sys.version_info.major}.{sys.version_info.minor}"


def write_code(plan: Plan, files: RunFolder) -> None:
    """Writes the digests of the code that the plan's config names, and of what this imports."""
    record = {"version": VERSION, "files": digest_code(plan.config, plan.search)}
    files.code.write_text(json.dumps(record, indent=1))


def list_code_changes(plan: Plan, files: RunFolder) -> list[str]:
    """Names the files of code that changed since the run was begun, or was resumed with changed code."""
    before = read_json(files.code)
    if before.get("version") != VERSION:
        return []
    return list_digest_changes(before["files"], digest_code(plan.config, plan.search))


def refuse_changed_code(plan: Plan, files: RunFolder) -> None:
    """Raises ConfigError if code changed since the run was begun, unless `resume_code=changed`."""
    if plan.resume_code == "same" and (changes := list_code_changes(plan, files)):
        raise ConfigError(
            f"resume={plan.resume}: the code is not what the run was trained with: {', '.join(changes)}; restore it, "
            "or add resume_code=changed to continue with it"
        )
