"""The files of the baselines in the folder of a run."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BaselineFiles:
    """The files in the folder of a run by which its worker and the process that fits the baselines speak."""

    folder: Path

    @property
    def rows(self) -> Path:
        """The rows for the baselines, until these are fitted."""
        return self.folder / "baseline_data.npz"

    @property
    def outputs(self) -> Path:
        """The outputs of the baselines for the test rows, until the end of the run."""
        return self.folder / "baseline_outputs.npz"

    @property
    def metrics(self) -> Path:
        """The metrics of the baselines, or why there are none."""
        return self.folder / "baselines.json"
