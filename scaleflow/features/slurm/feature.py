from scaleflow.interfaces.features import Feature

FEATURE = Feature(
    name="slurm",
    about="runs in jobs of Slurm",
    engines=("scaleflow.features.slurm.engine:ENGINE",),
    conf="scaleflow.features.slurm.conf",
    option_names={"cluster=slurm": "sbatch srun"},
)
