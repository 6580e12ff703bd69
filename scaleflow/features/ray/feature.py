from scaleflow.interfaces.features import Feature

FEATURE = Feature(
    name="ray",
    about="runs on a Ray cluster",
    engines=("scaleflow.features.ray.engine:ENGINE",),
    conf="scaleflow.features.ray.conf",
)
