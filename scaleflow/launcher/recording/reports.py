"""Makes reports from a run's events: draws tables, and analyses traces.

Each report becomes an event that names its files. The launcher makes it in a thread during the run. If the launcher
dies before that, `scaleflow sync` or `resume` makes it.
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from scaleflow.errors import read_reason
from scaleflow.interfaces.events import ConfusionWritten, Event, ReportMade, StepsProfiled, TaskResult
from scaleflow.runs import RunFolder
from scaleflow.runs.event_log import append_event, read_event
from scaleflow.tracking.plot import draw_confusion

#: Events that need a report.
EVENTS_WITH_REPORTS = (ConfusionWritten, StepsProfiled, TaskResult)

#: Only one profile is analysed at a time, because it needs much memory.
ANALYSIS_LOCK = threading.Lock()


def explain_missing_report(event: Event) -> str:
    """Returns why the files of an event do not exist yet."""
    if isinstance(event, StepsProfiled):
        return f"the profile of steps {event.first} to {event.last} is still being analyzed"
    return f"the picture for the event {event.event} is still being drawn"


def append_report(
    events: Path, event_offset: int, locate: Callable[[str], Path], is_late: Callable[[], bool] = bool
) -> None:
    """Makes the report of the event at `event_offset`, and appends it to the events, unless it `is_late`.

    Args:
        locate: returns the path of a file that an event names.

    Raises OSError if the report cannot be written.
    """
    from scaleflow.profiler import analyze_window

    event = read_event(events, event_offset)
    try:
        if isinstance(event, StepsProfiled):
            with ANALYSIS_LOCK:
                report = analyze_window(event, event_offset)
        else:
            report = draw_report(event, event_offset, locate)
    except Exception as error:  # for instance a damaged file; without a report, the recorder would wait for it
        line = f"no report of the event {event.event} could be made: {read_reason(error)}"
        report = ReportMade(event_offset, [], line=line, time=event.time)
    if not is_late():
        append_event(events, report)


def draw_report(event: Event, event_offset: int, locate: Callable[[str], Path]) -> ReportMade:
    """Draws a table. If drawing fails, the report has no picture."""
    assert isinstance(event, ConfusionWritten | TaskResult)
    path = event.path if isinstance(event, ConfusionWritten) else event.find_table()
    table = locate(path)
    folder = event.folder if isinstance(event, ConfusionWritten) else RunFolder(table.parent).plots.name
    picture = None
    with contextlib.suppress(Exception):
        picture = draw_confusion(table, event.split) if isinstance(event, ConfusionWritten) else event.draw(table)
    files = [(path, folder)]
    if picture is not None:
        files.insert(0, (str(Path(path).with_name(picture.name)), folder))
    return ReportMade(event_offset, files, time=event.time)
