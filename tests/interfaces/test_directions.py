"""Which values of a metric are better: by what the run knows, by the names of Keras and scikit-learn, or not known."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from scaleflow.interfaces import find_direction, find_directions, is_smaller_better

BETTER = {
    "max": (
        *("test/accuracy", "test/accuracy_at_threshold", "test/accuracy_at_threshold_low", "val_auc", "test/auc_1"),
        *("test/neg_log_loss", "val/neg_mean_absolute_error_high", "neg_brier_score", "d2_absolute_error_score"),
        *("f1_macro", "test/kind/recall/cat", "baseline/boosting/balanced_accuracy", "perf/examples_per_second"),
        *("coverage", "precision_at_recall", "all/roc_auc_ovr_weighted"),
        *("test/temp_error/r2", "test/f1/my_error", "brier_skill_score"),
    ),
    "min": (
        *("loss", "test/price/mae", "val_loss", "test/mae_high", "test/my_cost", "test/cost_at_threshold", "MyCost"),
        *("brier_score", "davies_bouldin_score", "error in standard deviations", "test/calibration_error_low"),
        *("test/math_score/mae", "test/math_score/rmse_low", "test/interval_score", "winkler_score"),
        *(
            "set_size",
            "pinball",
            "perf/step_ms",
            "false_positives",
            "test/log_loss",
            "test/score/mae",
            "negative_log_likelihood",
        ),
    ),
    None: (
        *("test/profit", "val/mine", "bias", "test/neg_recall", "negative_precision", "train/learning_rate"),
        *("rmse_score", "test/log_loss_score"),  # an error, or one with the sign turned
        "test/f1/loss",  # a class is called `loss`
    ),
}


@pytest.mark.parametrize(("metric", "wanted"), [(each, mode) for mode, names in BETTER.items() for each in names])
def test_a_name_says_which_values_are_better(metric: str, wanted: str | None) -> None:
    assert find_direction(metric) == wanted


def test_what_the_run_knows_comes_first() -> None:
    known = {"top3": "max", "f1/loss": "max", "wave/mine": "min", "linear/odd": "max"}
    found = [
        find_direction(each, known)
        for each in ("val_top3", "test/top3_low", "test/f1/loss_high", "val/wave/mine", "test/linear/odd", "test/top")
    ]
    assert found == ["max", "max", "max", "min", "max", None]
    assert find_direction("baseline/boosting/top3", known) == "max"
    assert find_directions("mae", "r2") == {"mae": "min", "r2": "max"}
    with pytest.raises(ValueError, match="not known whether larger or smaller values of profit are better"):
        is_smaller_better("profit")


def test_names_of_scikit_learn_say_what_its_scorers_do() -> None:
    from sklearn.metrics import get_scorer, get_scorer_names

    wrong = []
    for name in get_scorer_names():
        scorer = get_scorer(name)
        of_function = find_direction(f"test/{scorer._score_func.__name__}")
        if find_direction(f"val/{name}") != "max" or of_function != ("max" if scorer._sign > 0 else "min"):
            wrong.append(name)
    assert wrong == []


ARGUMENTS: tuple[dict[str, Any], ...] = (
    *({}, {"num_classes": 3}, {"num_classes": 3, "target_class_ids": [0]}),
    *({name: 0.5} for name in ("specificity", "sensitivity", "recall", "precision")),
)


def list_keras_directions() -> list[tuple[str, str | None, str | None]]:
    """The name, the direction and that of the name, of Keras's metrics."""
    import keras

    from scaleflow.objective.metrics import BASES, find_keras_direction

    found = []
    for cls in vars(keras.metrics).values():
        if not inspect.isclass(cls) or not issubclass(cls, keras.Metric) or cls.__name__ in BASES:
            continue
        for arguments in ARGUMENTS:
            try:
                metric = cls(**arguments)
                break
            except (TypeError, ValueError):
                continue
        found.append((metric.name, find_keras_direction(metric), find_direction(metric.name)))

    class Turned(keras.metrics.MeanAbsoluteError):  # type: ignore[misc]
        def result(self) -> Any:
            return -super().result()

    found.append(("turned", find_keras_direction(Turned()), None))
    return found


def test_names_of_keras_say_what_keras_says(isolated: Callable[..., Any]) -> None:
    found = isolated(list_keras_directions)
    assert len(found) > 40
    assert [each for each in found if each[1] != each[2]] == []
    assert ("turned", None, None) in found
    assert [name for name, mode, _ in found if mode is None] == ["turned"]
