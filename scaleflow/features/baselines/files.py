"""Files of the baselines in a run's folder."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BaselineFiles:
    """Files that the worker and the process fitting the baselines exchange, in the run's folder."""

    folder: Path

    @property
    def rows(self) -> Path:
        """The rows for the baselines. Deleted after fitting."""
        return self.folder / "baseline_data.npz"

    @property
    def outputs(self) -> Path:
        """The baselines' outputs for the test rows. Deleted at the end of the run."""
        return self.folder / "baseline_outputs.npz"

    @property
    def metrics(self) -> Path:
        """The baselines' metrics, or why they are missing."""
        return self.folder / "baselines.json"
