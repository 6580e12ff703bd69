"""Prints in the launcher what the script prints in the worker."""

from scaleflow.features.script.events import ScriptPrinted
from scaleflow.interfaces.events import Event
from scaleflow.interfaces.hooks import LauncherHook


class ScriptOutput(LauncherHook):
    """Prints the script's lines between scaleflow's own."""

    def on_event(self, event: Event) -> None:
        if isinstance(event, ScriptPrinted):
            for line in event.text.split("\n"):
                self.run.print_line(line)
