"""A run as an object, for all code that starts, follows, records or repairs it.

`RunSpec` describes what one process of a run does: it holds the `Task`, which runs in a `WorkerProcess`. `RunFolder`
names every file and lock in a run's folder. `EventWriter` and `EventReader` write and read `events.jsonl`. `RunState`
is computed from the events. Nothing here imports TensorFlow or MLflow.
"""

from scaleflow.runs.event_log import EventReader, EventWriter
from scaleflow.runs.folder import RunFolder
from scaleflow.runs.spec import RunSpec, Task, WorkerProcess
from scaleflow.runs.state import RunState
