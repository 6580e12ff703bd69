"""The combinations that some of the supported versions of TensorFlow and Keras cannot do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import version

from scaleflow.interfaces import Plan, Rule
from scaleflow.interfaces.versions import to_series


def is_replicated_fit(plan: Plan) -> bool:
    return plan.training.engine == "fit" and plan.strategy.name == "mirrored"


#: For each: the package and the first version that can, the key, whether a plan needs it, and what works instead.
#: Older versions train, too, but with other losses or other numbers of examples than one device, which tests show.
NEEDS: tuple[tuple[str, tuple[int, int], str, Callable[[Plan], bool], str], ...] = (
    ("keras", (3, 14), "strategy", lambda plan: plan.strategy.name == "pipeline", "use strategy=mirrored"),
    ("keras", (3, 12), "training.engine", is_replicated_fit, "use training.engine=loop"),
    ("keras", (3, 11), "hardware.remat", lambda plan: plan.hardware.remat is not False, "use hardware.remat=false"),
)


@functools.cache
def find_version_rules(find_version: Callable[[str], str] = version) -> tuple[Rule, ...]:
    """Returns the rules that hold with the versions that are installed."""
    rules = []
    for package, least, key, is_needed, instead in NEEDS:
        installed = find_version(package)
        if to_series(installed) < least:
            name = f"{package.capitalize()} {'.'.join(map(str, least))}"
            reason = f"this needs {name} or newer, and {installed} is installed"
            rules.append(Rule((key,), is_needed, reason, f"{instead}, or install {name}"))
    return tuple(rules)
