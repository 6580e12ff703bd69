"""The result of a trial, as an event of its run."""

from __future__ import annotations

import subprocess
import sys

from scaleflow.features.search.events import SettingFound

#: Reads an event in a process that has not imported the module with its kind.
READ = """
import sys
from scaleflow.interfaces.events import parse_event

assert "scaleflow.features.search.events" not in sys.modules
key = "training.batch_size"
event = parse_event({"event": "found", "key": key, "value": 64, "reason": "the fastest", "path": "a.csv"})
print(event.list_tags())
print(event.list_rows())
print(event.to_values())
print(event.describe())
print(parse_event({"event": "no such kind"}))
"""


def test_a_process_reads_the_event_without_importing_its_module_before() -> None:
    ended = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True, timeout=240)
    assert ended.stdout.splitlines() == [
        "{'scaleflow.found': 'training.batch_size=64', 'scaleflow.found.reason': 'the fastest'}",
        "[('use', 'training.batch_size=64'), ('because', 'the fastest')]",
        "{'found': {'word': 'training.batch_size=64', 'reason': 'the fastest'}}",
        "Use `training.batch_size=64`: the fastest.",
        "None",
    ]


def test_a_whole_number_is_typed_without_a_point() -> None:
    assert SettingFound("training.batch_size", 16.0, "", "").word == "training.batch_size=16"
    assert SettingFound("optimizer.learning_rate", 0.0025, "", "").word == "optimizer.learning_rate=0.0025"
