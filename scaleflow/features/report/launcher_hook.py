"""The report's work in the launcher: findings at the end of a run, and the report over the folds of a sweep's
best job.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from scaleflow.features.report.names import FINDINGS, REPORT
from scaleflow.interfaces.hooks import KeptPredictions, LauncherHook
from scaleflow.runs import RunFolder

#: Maximum number of findings in the summary of a run.
MAX_FINDINGS = 5


class ReportFollower(LauncherHook):
    """Shows a run's findings, and makes the report of folds."""

    def describe_end(self) -> Sequence[tuple[str, str]]:
        """Returns summary rows with the first findings and the path of the report; empty without a report."""
        folder = RunFolder(self.run.folder).evaluation
        try:
            findings = json.loads((folder / FINDINGS).read_text())
            texts = [f"{finding['rule']}: {finding['text']}" for finding in findings]
        except (OSError, ValueError, KeyError, TypeError):
            return []
        shown = texts[:MAX_FINDINGS]
        if len(texts) > MAX_FINDINGS:
            shown.append(f"and {len(texts) - MAX_FINDINGS} more")
        rows = [("" if n else "findings", text) for n, text in enumerate(shown)]
        return [*rows, ("report", os.path.relpath(folder / REPORT))]

    def after_folds(self, kept: KeptPredictions) -> Sequence[Path]:
        """Makes the report of the predictions of all folds and returns its files."""
        from scaleflow.features.report.findings import KnownOfRun
        from scaleflow.features.report.page import make_report
        from scaleflow.features.report.sections import make_added_sections

        added = make_added_sections(kept, self.run.print_note)
        report = make_report(kept, KnownOfRun(), added)
        folder = RunFolder(kept.folder).evaluation
        return [folder / path for path in report.files]
