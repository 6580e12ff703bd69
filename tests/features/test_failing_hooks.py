"""A feature of another package that fails, or returns a wrong type, at every point where it is called ends no run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from scaleflow.interfaces.events import Event, read_tags
from scaleflow.testing import Events
from tests.features.installed import install_feature, run_installed

#: The declaration of a feature with all functions and hooks, which are in the module `code`.
FEATURE = """
from scaleflow.interfaces.features import Feature

FEATURE = Feature(
    name="{name}",
    check="{name}.code:call",
    check_job="{name}.code:call",
    fill_in="{name}.code:call",
    before_run="{name}.code:call",
    end_task="{name}.code:Task",
    launcher="{name}.code:Follower",
    worker="{name}.code:Worker",
    report="{name}.code:call",
)
"""

#: Hooks of which each method does `call`.
CODE = """
from scaleflow.interfaces.hooks import LauncherHook, WorkerHook

class Task:
    def run(self, monitor, is_recorded):
        return call()

class Follower(LauncherHook):
    def describe_end(self): return call()
    def after_run(self, answer): return call()

class Worker(WorkerHook):
    def explain_no_folds(self, plan): return call()
    def after_data(self, data): return call()
    def before_test(self, split): return call()
    def after_build(self, run, export): return call()
    def report_examples(self, data, feed, folder, emit): return call()
    def at_ready(self, run): return call()
    def after_epoch(self, run, epoch, metrics): return call()
    def after_test(self, kept): return call()
    def after_export(self, run, step): return call()
    def finish_test(self): return call()
    def at_end(self, run): return call()
    def close(self): return call()
"""

#: What `call` does, by the name of the feature.
CALLS = {
    "raising": "def call(*values):\n    raise KeyError('lost')\n",
    "odd": "def call(*values):\n    return [3]\n",
    "leaving": "import sys\n\ndef call(*values):\n    sys.exit(3)\n",
}

RUN = "training.max_steps=2 dataset=synthetic dataset.examples=200 tracking=none debug.inline=true hydra.run.dir=run"


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    for name, call in CALLS.items():
        files = {"feature.py": FEATURE.format(name=name), "code.py": CODE + call}
        install_feature(folder, name, files)
    return folder


def test_a_run_ends_well_with_features_that_fail_everywhere(failing: Path, tmp_path: Path) -> None:
    ended = run_installed(f"{RUN} --json", failing, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    events = Events.of(tmp_path / "run")
    assert events.status == "FINISHED"
    assert events.last("test/loss") > 0
    for name, error in (("raising", "KeyError: 'lost'"), ("odd", "Error: "), ("leaving", "RuntimeError: it calls")):
        for what in ("it cannot check the config", "before the run"):
            lines = [line for line in ended.stderr.splitlines() if f"the feature {name}: {what}" in line]
            assert len(lines) == 1, (name, what)
        notes = [text for text in events.notes if f"the feature {name}: " in text]
        assert any(error in text for text in notes), (name, notes)
        lines = [line for line in ended.stdout.splitlines() if line.startswith(f"note: the feature {name}: ")]
        assert len(lines) >= 3, (name, lines)
    assert "Traceback" not in ended.stderr.partition("scaleflow: ")[0]


#: A feature that changes the training; NAME does what `call` does.
CHANGING = """
from dataclasses import dataclass
from scaleflow.interfaces.features import Feature

@dataclass(frozen=True)
class Options:
    pace: int = 1

def is_used(plan):
    {use}

FEATURE = Feature(
    name="changing", section=Options, conf="changing.conf", defaults=({{"changing": "default"}},),
    worker="changing.code:Worker", changes_training=True, is_used=is_used,
)
"""

WORKER = """
from scaleflow.interfaces.hooks import WorkerHook

class Worker(WorkerHook):
    def {method}(self, *values):
        {body}
"""


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("use", "method", "body", "expected"),
    [
        ("return True", "draw_examples", "raise KeyError('lost')", "(KeyError: 'lost'"),
        slow(
            "return True", "draw_examples", "return 3", "(TypeError: draw_examples returns int, and not DrawnExamples)"
        ),
        slow("return True", "change_feed", "return None", "(TypeError: change_feed returns NoneType, and not a Feed)"),
        slow("return True", "explain_no_folds", "raise KeyError('lost')", "(KeyError: 'lost'"),
        slow("raise KeyError('lost')", "close", "pass", "cannot say if this run uses it (KeyError: 'lost'"),
    ],
)
def test_a_feature_that_changes_the_training_and_fails_refuses_the_run(
    tmp_path: Path, use: str, method: str, body: str, expected: str
) -> None:
    files = {
        "feature.py": CHANGING.format(use=use),
        "code.py": WORKER.format(method=method, body=body),
        "conf/__init__.py": "",
        "conf/changing/default.yaml": "pace: 1\n",
    }
    install_feature(tmp_path / "packages", "changing", files)
    ended = run_installed(f"{RUN} changing.pace=2", tmp_path / "packages", tmp_path)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    start = "scaleflow: the feature changing: it changes what the model is trained on, and "
    assert ended.stderr.splitlines()[-1].startswith(start)
    assert expected in ended.stderr.splitlines()[-1]


def test_an_event_whose_tags_cannot_be_made_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    class Torn(Event, event="torn_in_test"):
        def list_tags(self) -> dict[str, str]:
            raise KeyError("lost")

    assert read_tags(Torn()) == {}
    assert "the tags of its event torn_in_test are left out: KeyError: 'lost'" in capsys.readouterr().err


def test_an_event_cannot_replace_another_one() -> None:
    with pytest.raises(ValueError, match="there is an event metrics already"):
        type("Other", (Event,), {}, event="metrics")
