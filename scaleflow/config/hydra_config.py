"""Reads what Hydra composed for a job, and masks the secrets in what Hydra writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from scaleflow.config.compose import ComposedConfig
from scaleflow.interfaces.secret_masking import mask_override, mask_secrets


def read_composed_config(config: DictConfig) -> ComposedConfig:
    """Returns what Hydra composed for the current job. `config` lacks Hydra's own part, and has its interpolations."""
    runtime = HydraConfig.get().runtime
    choices = {g: str(o) for g, o in runtime.choices.items() if "/" not in g and "@" not in g and o is not None}
    return ComposedConfig(config, choices, list_module_folders(runtime), Path(runtime.output_dir))


def list_module_folders(runtime: Any) -> list[str]:
    """Lists the folders in which modules of `_target_` are looked for, given `hydra.runtime`."""
    return [str(Path.cwd()), *(source.path for source in runtime.config_sources if source.schema == "file")]


def read_typed_overrides() -> list[str]:
    """Returns the overrides as they were typed, with their interpolations."""
    words = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(words, list)
    return [str(word) for word in words]


def list_hydra_names() -> list[str]:
    """Lists the names of what Hydra itself writes to the folder of the current job, before the job begins."""
    hydra = HydraConfig.get()
    return [str(hydra.output_subdir).partition("/")[0], f"{hydra.job.name}.log"]


def mask_sweep_config(path: Path) -> None:
    """Masks the secrets in Hydra's `multirun.yaml` of a sweep, if it exists."""
    if path.is_file():
        config: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        overrides = config["hydra"]["overrides"]
        config["hydra"]["overrides"] = {key: [mask_override(o) for o in words] for key, words in overrides.items()}
        config["hydra"]["job"].pop("override_dirname", None)  # all overrides again, in one line
        OmegaConf.save(OmegaConf.create(mask_secrets(config)), path)
