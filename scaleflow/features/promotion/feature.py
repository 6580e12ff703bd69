from scaleflow.interfaces.features import Command, Feature

FEATURE = Feature(
    name="promotion",
    about="champion and challenger on the same examples",
    commands=(
        Command(
            name="promote",
            about="make it the champion if it is better: RUN_ID --model NAME",
            module="scaleflow.features.promotion.promote",
            group="tracked models",
            place=40,
            usage="RUN_ID --model NAME",
            other_names=("register", "deploy", "publish", "stage"),
        ),
    ),
    stages=("scaleflow.features.promotion.stage:STAGE",),
    public_names={
        "PromotionResult": "scaleflow.features.promotion.promote",
        "promote_model": "scaleflow.features.promotion.promote",
    },
)
