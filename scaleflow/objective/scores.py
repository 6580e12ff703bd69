"""Macro averages: the score of each class, averaged over the classes that occur, as in scikit-learn."""

from __future__ import annotations

from typing import Any, Literal

import keras
from keras import ops


class MacroScore(keras.metrics.FBetaScore):  # type: ignore[misc]  # keras has no types
    """Macro F1, precision or recall. A class occurs if it is a target or a prediction; for recall, if it is a target.

    Args:
        score: the score to average.
        name: the name of the metric; None: the name of the score.
        threshold: the probability above which a label is predicted; None: the largest one is.
    """

    def __init__(
        self, score: Literal["f1", "precision", "recall"], name: str | None = None, threshold: float | None = None
    ) -> None:
        super().__init__(average="macro", threshold=threshold, name=name or score)
        self._score = score

    def result(self) -> Any:
        hits = self.true_positives
        wrong = self.false_positives
        missed = self.false_negatives
        parts = {"f1": (2 * hits, wrong + missed), "precision": (hits, wrong), "recall": (hits, missed)}
        numerator, others = parts[self._score]
        occurs = hits + missed + (0.0 if self._score == "recall" else wrong) > 0
        values = ops.divide_no_nan(numerator, numerator + others)
        return ops.divide_no_nan(ops.sum(values), ops.sum(ops.cast(occurs, values.dtype)))


class MacroAUC(keras.metrics.AUC):  # type: ignore[misc]
    """The macro area under the curve of each class against the others. Counts classes with positives and negatives.

    Args:
        num_classes: the number of classes or labels.
        curve: ROC or PR.
        name: the name of the metric.
    """

    def __init__(self, num_classes: int, curve: Literal["ROC", "PR"] = "ROC", name: str = "auc") -> None:
        super().__init__(curve=curve, name=name, multi_label=True, num_labels=num_classes)

    def result(self) -> Any:
        positive = self.true_positives[0] + self.false_negatives[0]
        negative = self.false_positives[0] + self.true_negatives[0]
        self.label_weights = ops.cast((positive > 0) & (negative > 0), positive.dtype)
        try:
            return super().result()
        finally:
            self.label_weights = None
