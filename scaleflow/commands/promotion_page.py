"""The page of a decision about a promotion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scaleflow.evaluation.page import compose_section, make_page, make_table
from scaleflow.evaluation.resampling import Figure
from scaleflow.promotion.decision import Decision


def make_decision_page(title: str, models: Sequence[Mapping[str, Any]], decision: Decision) -> str:
    """Returns the page of a decision: the conditions, the comparison, and both models.

    Args:
        title: what was decided.
        models: a row for the candidate and for the champion.
        decision: the decision.
    """
    conditions = [{"holds": "yes" if each.holds else "no", "condition": each.text} for each in decision.conditions]
    sections = [compose_section("Conditions", make_table(conditions)), compose_section("Models", make_table(models))]
    if (found := decision.comparison) is not None:
        gain = Figure(found.gain, found.low, found.high)
        rows = [
            {"model": "candidate", found.metric: found.candidate, "better by": gain, "better on": found.better},
            {"model": "champion", found.metric: found.champion, "better on": found.worse},
        ]
        sections.append(compose_section(f"The same {found.examples:,} examples", make_table(rows)))
    if decision.smoke:
        sections.append(compose_section("Served", make_table([dict(decision.smoke)])))
    return make_page(title, "; ".join(decision.reasons) or "every condition holds", sections)
