"""What a command does about the promotion of its model, after the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scaleflow.features.promotion.end_task import PromoteModel
from scaleflow.features.promotion.promote import PromotionResult
from scaleflow.features.search.trial_kinds import RateTest
from scaleflow.features.search.trial_task import FindSetting
from scaleflow.launcher.display import hidden_display
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.runs import RunSpec
from scaleflow.worker.tasks import TrainModel

CHAMPION = ("promotion=champion", "promotion.model=digits")


def end(made: Any, folder: Path, status: str = "FINISHED", is_recorded: bool = True, **changes: Any) -> Any:
    """The rows for the last lines."""
    spec = RunSpec(made, folder, 0.0, **{"task": TrainModel(), **changes})
    with hidden_display() as display:
        monitor: Any = SimpleNamespace(
            spec=spec, state=SimpleNamespace(status=status), display=display, stop=StopRequest()
        )
        return PromoteModel().run(monitor, is_recorded)


def test_only_a_finished_training_of_the_chief_that_asks_for_it_is_promoted(
    plan: Callable[..., Any], tmp_path: Path
) -> None:
    made = plan(*CHAMPION)
    assert end(plan(), tmp_path) == []
    assert end(made, tmp_path, status="KILLED") == []
    assert end(made, tmp_path, worker=1) == []
    assert end(made, tmp_path, task=FindSetting(RateTest())) == []


def test_a_run_that_is_not_recorded_or_not_found_can_be_promoted_later(
    plan: Callable[..., Any], tmp_path: Path
) -> None:
    made = plan(*CHAMPION)
    ((label, text),) = end(made, tmp_path, is_recorded=False)
    assert label == "promoted"
    assert text.startswith("no: the run is not recorded completely; afterwards: python -m scaleflow promote ")
    ((label, text),) = end(made, tmp_path)
    assert label == "promoted"
    assert text.startswith("no: ")
    assert "; again: python -m scaleflow promote " in text


def test_a_promotion_is_printed_as_rows() -> None:
    result = PromotionResult(False, "3", None, [("test accuracy is 0.8, at least 0.9", False)], None, {})
    assert str(result).splitlines()[-1] == "does not hold  test accuracy is 0.8, at least 0.9"
