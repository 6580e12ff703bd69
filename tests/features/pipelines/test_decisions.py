"""Which stages run again, and why: without TensorFlow and without a process."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scaleflow.errors import ConfigError
from scaleflow.features.pipelines import decisions
from scaleflow.features.pipelines.decisions import Decider, StageComposer, StageDecision
from scaleflow.features.pipelines.definition import load_pipeline
from scaleflow.features.pipelines.ledger import PipelineLedger, StageRecord, StoredRuns
from scaleflow.features.pipelines.recording import describe_pipeline, link_model
from scaleflow.interfaces import Tracking

FILE = "limit: 1\nstages:\n  tell: {command: python, target: steps.tell, arguments: {limit: '${limit}'}}\n"
STEPS = "import numpy\nimport helper\ndef tell(limit):\n    return helper.half(limit)\n"

Decide = Callable[..., StageDecision]


@pytest.fixture
def decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decide:
    """`decide("limit=2", force=True)`: what becomes of the stage, whose last execution `ledger` has."""
    (tmp_path / "conf" / "pipeline").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    Path("conf/pipeline/mine.yaml").write_text(FILE)
    Path("steps.py").write_text(STEPS)
    Path("helper.py").write_text("def half(x):\n    return x / 2\n")

    def run(*words: str, ledger: PipelineLedger | None = None, force: bool = False) -> StageDecision:
        pipeline = load_pipeline("mine", ["conf"], words)
        ledger = ledger or PipelineLedger(tmp_path / "none")
        stored, forced = StoredRuns(Tracking(name="none")), ["tell"] if force else []
        decider = Decider(pipeline, ledger, StageComposer(["conf"], {}), stored, forced)
        return decider.decide(pipeline.stages["tell"])

    return run


@pytest.fixture
def ledger(decide: Decide, tmp_path: Path) -> PipelineLedger:
    """The stage has finished, in the first execution."""
    first = decide()
    assert (first.action, first.why) == ("run", "has not run")
    assert first.key is not None
    ledger = PipelineLedger(tmp_path / "none")
    ledger.execution, ledger.status = 1, "FINISHED"
    ledger.records["tell"] = StageRecord(first.key, 1, 1, "FINISHED", {"result": 0.5})
    return ledger


def test_a_stage_is_reused_until_something_that_it_is_made_of_changes(
    decide: Decide, ledger: PipelineLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decide(ledger=ledger).action == "reuse"
    Path("helper.py").write_text("# a comment\ndef half(x):\n\n    return x/2\n")
    Path("conf/pipeline/mine.yaml").write_text(f"# a comment\n{FILE}")
    assert decide(ledger=ledger).action == "reuse"
    assert decide("limit=2", ledger=ledger).why == "arguments {'limit': 1} -> {'limit': 2}"
    Path("helper.py").write_text("def half(x):\n    return x / 3\n")
    assert decide(ledger=ledger).why == "helper.py changed"
    Path("helper.py").write_text("def half(x):\n    return x / 2\n")
    packages = decisions.read_packages()
    newer = {**packages, "numpy": replace(packages["numpy"], version="99.0")}
    monkeypatch.setattr(decisions, "read_packages", lambda: newer)
    assert decide(ledger=ledger).why == f"numpy {packages['numpy'].identity} -> 99.0"
    monkeypatch.setattr(
        decisions, "read_packages", lambda: {**packages, "pandas": replace(packages["numpy"], version="9")}
    )
    assert decide(ledger=ledger).action == "reuse"  # it imports no pandas


def test_a_moved_or_copied_pipeline_names_its_own_files(ledger: PipelineLedger, tmp_path: Path) -> None:
    ledger.folder.mkdir()
    record = ledger.records["tell"]
    record.outputs = {"folder": f"{ledger.folder}/tell/1", "best": {"folder": f"{ledger.folder}er"}, "other": [1, "x"]}
    record.files = [f"{ledger.folder}/tell/1/a.csv"]
    ledger.save()
    copied = PipelineLedger(shutil.copytree(ledger.folder, tmp_path / "copy")).records["tell"]
    assert copied.outputs == {**record.outputs, "folder": f"{tmp_path}/copy/tell/1"}
    assert copied.files == [f"{tmp_path}/copy/tell/1/a.csv"]
    assert PipelineLedger(ledger.folder).records["tell"] == record


@pytest.mark.parametrize("content", ["", "{}", '{"execution": 1}'])
def test_a_damaged_ledger_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "pipeline.json").write_text(content)
    with pytest.raises(ConfigError, match=r"pipeline.json: cannot be read .*; delete it to run all stages again"):
        PipelineLedger(tmp_path)


def test_a_forced_stage_runs_once_though_its_command_is_interrupted(decide: Decide, ledger: PipelineLedger) -> None:
    assert decide(ledger=ledger, force=True).why == "is forced"
    ledger.status = "FAILED"  # another stage has failed after it
    assert decide(ledger=ledger, force=True).why == "is forced"
    ledger.records["tell"].is_forced = True  # it has run because it was forced
    assert decide(ledger=ledger, force=True).action == "reuse"
    ledger.status = "FINISHED"
    assert decide(ledger=ledger, force=True).why == "is forced"


def test_a_long_table_is_cut_and_links_lead_to_runs_and_versions() -> None:
    head = ["stage", "command", "status", "time", "results", "run", "model", "data", "own run"]
    row = [
        "fit",
        "train",
        "FINISHED",
        "1.0 s",
        "x" * 60,
        "a" * 32,
        "models:/churn/3",
        f"csv train {'b' * 16}",
        "c" * 32,
    ]
    text = describe_pipeline("FINISHED", [head, row, row], "scaleflow pipeline churn")
    assert "**FINISHED.** Stages: 2 FINISHED" in text
    assert f"[fit](#/runs/{'c' * 32})" in text
    assert f"[aaaaaaaa](#/runs/{'a' * 32})" in text
    assert "[churn v3](#/models/churn/versions/3)" in text
    assert "csv train bbbbbbbb " in text.replace("&emsp;", " ")
    assert link_model(f"models:/m-{'d' * 32}") == "m-dddddddd"
    long = describe_pipeline("FINISHED", [head, *[row] * 99], "scaleflow pipeline churn")
    assert len(long) < 8000
    assert f"and {99 - long.count('churn v3')} more stages, in the artifact results.csv" in long
