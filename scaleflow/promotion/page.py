"""The page and the record of a decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scaleflow.evaluation.page import make_page, compose_section, make_table
from scaleflow.promotion.decision import Decision

#: The most characters of the reasons in a tag.
LONGEST = 2000


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
        rows = [
            {"model": "candidate", found.metric: found.candidate, "better by": found.gain, "better on": found.better},
            {"model": "champion", found.metric: found.champion, "better on": found.worse},
        ]
        sections.append(compose_section(f"The same {found.examples:,} examples", make_table(rows)))
    if decision.smoke:
        sections.append(compose_section("Served", make_table([dict(decision.smoke)])))
    return make_page(title, "; ".join(decision.reasons) or "every condition holds", sections)


def make_record(decision: Decision, candidate: str, champion: str | None) -> dict[str, Any]:
    """Returns what a tag says of a decision.

    Args:
        decision: the decision.
        candidate: the ID of the candidate's logged model.
        champion: the version that it was compared with; None if there was none.
    """
    reasons = "; ".join(decision.reasons)[:LONGEST]
    figures = {}
    if (found := decision.comparison) is not None:
        figures = {"metric": found.metric, "candidate": found.candidate, "champion": found.champion}
        figures |= {"better_by": list(found.gain), "examples": found.examples, "left_out": found.left_out}
    known = {"is_good": decision.is_promoted, "reasons": reasons, "candidate": candidate, "compared_with": champion}
    return {**known, **figures, "smoke": dict(decision.smoke)}
