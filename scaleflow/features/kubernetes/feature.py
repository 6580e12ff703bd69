from scaleflow.interfaces.features import Feature

FEATURE = Feature(
    name="kubernetes",
    about="runs on Kubernetes",
    engines=("scaleflow.features.kubernetes.engine:ENGINE",),
    conf="scaleflow.features.kubernetes.conf",
    option_names={"cluster=kubernetes": "k8s kube"},
)
