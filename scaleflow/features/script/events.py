"""The events of a script's run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from scaleflow.interfaces.events import MASKED, Event


class ScriptPrinted(Event, event="printed"):
    """The script has printed whole lines."""

    text: str = field(metadata=MASKED)  # without the last line break


class ParamsLogged(Event, event="params"):
    """The script has trained a model with these arguments, or logged params itself."""

    values: Mapping[str, str] = field(metadata=MASKED)

    def list_params(self) -> Mapping[str, str]:
        return self.values
