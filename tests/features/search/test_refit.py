"""A refit uses what the validation rows of its run decided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scaleflow.features.search.refit import carry_answers
from scaleflow.interfaces import Inputs, LearnedState, Outputs

DECIDED = Outputs("binary", (1,), threshold=0.25, set_threshold=0.4, calibration=(1.5, 0.1))
GOAL = {"cost": [5, 2], "recall": None}


def make_run(evaluation: dict[str, Any], outputs: Any = DECIDED) -> Any:
    state = LearnedState(Inputs((2,), "float32"), outputs)
    return SimpleNamespace(run_id="r", config={"evaluation": evaluation}, learned_state=state)


@pytest.mark.parametrize(
    ("evaluation", "typed", "answers", "changes"),
    [
        ({"threshold": 0.3, "sets": None}, (), {}, []),
        ({"threshold": "auto"}, (), {}, ["evaluation.threshold=0.25"]),
        (
            {"threshold": GOAL},
            (),
            {},
            ["evaluation.threshold=0.25", "evaluation.miss_cost=5", "evaluation.alarm_cost=2"],
        ),
        ({"threshold": GOAL}, ("evaluation.miss_cost",), {}, ["evaluation.threshold=0.25"]),
        ({"threshold": "auto"}, ("evaluation.threshold",), {}, []),
        ({"sets": 0.9}, (), {"set_threshold": 0.4}, ["evaluation.sets=null"]),
        ({"sets": 0.9}, ("evaluation.sets",), {}, []),
        ({"sets": 0.9}, ("evaluation",), {}, []),
        ({"interval": 0.9, "threshold": 0.5}, (), {}, ["evaluation.interval=null"]),
        (
            {"calibrate": "auto", "sets": 0.9},
            (),
            {"calibration": (1.5, 0.1), "set_threshold": 0.4},
            ["evaluation.calibrate=null", "evaluation.sets=null"],
        ),
    ],
)
def test_what_was_decided_is_carried(
    evaluation: dict[str, Any], typed: tuple[str, ...], answers: dict[str, Any], changes: list[str]
) -> None:
    assert carry_answers(make_run(evaluation), typed) == (answers, changes)
