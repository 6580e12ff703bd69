"""Which targets and outputs the losses and metrics of Keras take, by their names."""

from __future__ import annotations

from scaleflow.objective.forms import plain_names

#: Keras's losses that take integer classes; its others take targets of the outputs' shape.
INTEGER_LOSSES = plain_names("SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy")

#: Losses and metrics that take any numbers as outputs, and no probabilities.
HINGES = plain_names("Hinge", "SquaredHinge", "CategoricalHinge")

#: Losses that need one of several classes.
CLASS_LOSSES = INTEGER_LOSSES | plain_names(
    "CategoricalCrossentropy", "CategoricalFocalCrossentropy", "CategoricalHinge"
)

#: Losses that need classes or labels.
LOSSES_NOT_FOR_VALUES = (
    CLASS_LOSSES | HINGES | plain_names("BinaryCrossentropy", "BinaryFocalCrossentropy", "Dice", "Tversky")
)

#: Losses that no kind of target fits.
LOSSES_FOR_NO_KIND = plain_names("CTC", "Circle")

#: Metrics of Keras that take integer classes.
INTEGER_METRICS = plain_names(
    "SparseCategoricalAccuracy", "SparseTopKCategoricalAccuracy", "SparseCategoricalCrossentropy", "Accuracy"
)

#: Metrics that need one of several classes.
CLASS_METRICS = (INTEGER_METRICS - plain_names("Accuracy")) | plain_names(
    *("CategoricalAccuracy", "TopKCategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge"),
    *("OneHotIoU", "OneHotMeanIoU"),
)

#: Metrics that need classes, and no labels of which several can be true.
CLASS_OR_LABEL_METRICS = CLASS_METRICS | plain_names("Accuracy", "IoU", "MeanIoU")

#: Metrics for values.
VALUE_METRICS = plain_names(
    *("MeanSquaredError", "RootMeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "LogCoshError"),
    *("MeanSquaredLogarithmicError", "CosineSimilarity", "R2Score", "PearsonCorrelation", "ConcordanceCorrelation"),
    *("Poisson", "KLDivergence"),
)
