from dataclasses import dataclass, field

from scaleflow.interfaces.features import Feature


@dataclass(frozen=True)
class BaselineOptions:
    """Options of the baselines."""

    baselines: int = field(default=1_000_000, metadata={"at_least": 0, "at_most": 1_000_000})


FEATURE = Feature(
    name="baselines",
    about="boosting and a linear model of a table, to compare with",
    section=BaselineOptions,
    group="evaluation",
    conf="scaleflow.features.baselines.conf",
    defaults=("baselines_keys",),
    worker="scaleflow.features.baselines.hook:BaselinesHook",
    other_files=("baseline_data.npz", "baseline_outputs.npz", "baselines.json"),
    compared_models={
        "boosting": "is scikit-learn's HistGradientBoosting",
        "linear": "its logistic or ridge regression",
    },
)
