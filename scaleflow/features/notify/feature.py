import re
from dataclasses import dataclass

from scaleflow.interfaces.config import Plan, Rule
from scaleflow.interfaces.features import Feature


@dataclass(frozen=True)
class NotifyOptions:
    """The address for messages."""

    notify: str | None = None


def has_no_address(plan: Plan) -> bool:
    return not re.match(r"(slack:)?https?://[^/]", plan.of(NotifyOptions).notify or "")


FEATURE = Feature(
    name="notify",
    about="messages at the end of runs and sweeps, and when processes are restarted",
    section=NotifyOptions,
    group="tracking",
    conf="scaleflow.features.notify.conf",
    defaults=("notify_keys",),
    rules=(
        Rule(
            "tracking.notify!=null",
            "it is no address of the web",
            "type https://HOST/PATH, or slack:https://hooks.slack.com/... for Slack",
            only_if=has_no_address,
        ),
    ),
    launcher="scaleflow.features.notify.messages:Messages",
)
