"""What Hydra composed, as the plain values that a plan is made of, and the folder that it chose."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from scaleflow.config.compose import to_plain
from scaleflow.config.plan import make_plan
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.secret_masking import mask_override, mask_secrets

#: What Hydra writes about a sweep, in its folder.
MULTIRUN = "multirun.yaml"


def plan_from_hydra(config: DictConfig) -> Plan:
    """The checked plan of a composed config."""
    return make_plan(*resolve_hydra(config), may_submit=HydraConfig.get().mode is not RunMode.MULTIRUN)


def resolve_hydra(config: DictConfig) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """The config as plain containers, the option chosen in each group, and where a user's modules are."""
    chosen = HydraConfig.get().runtime
    choices = {g: str(o) for g, o in chosen.choices.items() if "/" not in g and "@" not in g and o is not None}
    own = [source.path for source in chosen.config_sources if source.schema == "file"]
    found = to_plain(config)
    return found, choices, [str(Path.cwd()), *own]


def read_typed_overrides() -> list[str]:
    """The overrides as they were typed, interpolations and all."""
    words = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(words, list)
    return [str(word) for word in words]


def check_folder_writable(folder: Path) -> Path:
    """The run's folder, if files can be made in it."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"hydra.run.dir={folder}: cannot be written ({error.strerror}); choose another folder"
        ) from error
    return folder


def mask_sweep_files(folder: Path) -> None:
    """Masks the secrets in what Hydra wrote about a sweep."""
    path = folder / MULTIRUN
    if path.is_file():
        kept: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        kept["hydra"]["overrides"] = {k: [mask_override(o) for o in v] for k, v in kept["hydra"]["overrides"].items()}
        kept["hydra"]["job"].pop("override_dirname", None)  # the overrides once more, in a line
        OmegaConf.save(OmegaConf.create(mask_secrets(kept)), path)
