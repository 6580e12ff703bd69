from dataclasses import dataclass, field

from scaleflow.interfaces.config import Plan
from scaleflow.interfaces.features import Feature


@dataclass(frozen=True)
class ReportOptions:
    """What the report of a test shows in addition to the metrics."""

    slices: list[str] | None = None
    worst: int = field(default=24, metadata={"at_least": 0, "at_most": 1000})
    importance: int = field(default=5000, metadata={"at_least": 0, "at_most": 1_000_000})


def keeps_predictions(plan: Plan) -> bool:
    return plan.evaluation.name != "none"


FEATURE = Feature(
    name="report",
    about="the report of a test: findings, slices, the importance of columns, mistakes",
    section=ReportOptions,
    group="evaluation",
    conf="scaleflow.features.report.conf",
    defaults=("report_keys",),
    worker="scaleflow.features.report.hook:ReportHook",
    launcher="scaleflow.features.report.launcher_hook:ReportFollower",
    is_used=keeps_predictions,
)
