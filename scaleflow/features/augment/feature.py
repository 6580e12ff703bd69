"""`dataset.augment`: random changes to training examples."""

from dataclasses import dataclass, field

from scaleflow.interfaces.config import Plan, Rule
from scaleflow.interfaces.features import Feature


@dataclass(frozen=True)
class Augment:
    """`dataset.augment`: random changes to training examples. Validation and test examples stay unchanged."""

    flip: bool = False
    crop: int = field(default=0, metadata={"at_least": 0})
    mixup: float = field(default=0.0, metadata={"at_least": 0.0})
    resized_crop: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 1.0})
    color_jitter: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 1.0})
    erase: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 1.0})
    vertical_flip: bool = False
    rotation: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 180.0})
    zoom: float = field(default=0.0, metadata={"at_least": 0.0, "below": 1.0})
    translation: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 1.0})
    contrast: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 1.0})
    randaugment: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 30.0})
    cutmix: float = field(default=0.0, metadata={"at_least": 0.0})
    word_dropout: float = field(default=0.0, metadata={"at_least": 0.0, "below": 1.0})


@dataclass(frozen=True)
class AugmentKeys:
    """The key of `dataset` with the augmentation options."""

    augment: Augment | None = None


def is_augmented(plan: Plan) -> bool:
    return plan.of(AugmentKeys).augment is not None


FEATURE = Feature(
    name="augment",
    about="random changes of the training examples",
    section=AugmentKeys,
    group="dataset",
    conf="scaleflow.features.augment.conf",
    defaults=("augment_keys",),
    key_names={
        "'dataset.augment={{flip: true}}'": "flip augment augmentation horizontalflip",
        "'dataset.augment={{rotation: {}}}'": "rotation rotationrange randomrotation",
        "'dataset.augment={{mixup: {}}}'": "mixup mixupalpha",
        "'dataset.augment={{cutmix: {}}}'": "cutmix cutmixalpha",
    },
    rules=(
        Rule(
            "dataset.augment.rotation>0 & dataset.augment.rotation<1",
            "it is in degrees, so images hardly turn; Keras's RandomRotation takes parts of a full turn, of which 0.1 "
            "are 36 degrees",
            "use for example dataset.augment.rotation=15",
            "warning",
        ),
    ),
    worker="scaleflow.features.augment.hook:AugmentExamples",
    changes_training=True,
    is_used=is_augmented,
)
