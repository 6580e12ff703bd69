"""Sections that other features add to the report."""

from __future__ import annotations

from collections.abc import Callable

from scaleflow.interfaces.extras import guard_extra
from scaleflow.interfaces.features import import_named, list_features
from scaleflow.interfaces.hooks import KeptPredictions, ReportSection
from scaleflow.pages.html import compose_section, make_table


def make_added_sections(kept: KeptPredictions, note: Callable[[str], None]) -> list[str]:
    """Returns the sections of features in HTML. If one fails, calls `note` with the feature's name and the error."""
    sections: list[str] = []
    for feature in list_features().values():
        with guard_extra(f"the sections of the feature {feature.name} in the report", note):
            if feature.report and feature.is_used_by(kept.plan):
                make_sections = import_named(feature.report)
                sections += [format_section(section) for section in make_sections(kept)]
    return sections


def format_section(section: ReportSection) -> str:
    """Returns a section in HTML."""
    return compose_section(section.title, section.html, make_table(section.rows))
