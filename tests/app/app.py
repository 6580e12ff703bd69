"""Another Hydra app, as its owner would write it."""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import scaleflow

RESULTS: list[scaleflow.Result] = []


@hydra.main(version_base="1.2", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    before = GlobalHydra.instance().hydra
    assert scaleflow.compose("model=cnn").model._target_ == "scaleflow.model.cnn.build"
    RESULTS.append(scaleflow.run(cfg.train, folder=Path(HydraConfig.get().runtime.output_dir, "training")))
    assert GlobalHydra.instance().hydra is before
    assert cfg.team == "vision"


if __name__ == "__main__":
    main()
