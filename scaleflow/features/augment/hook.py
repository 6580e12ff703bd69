"""Changes training examples as `dataset.augment` says, and writes some of them to files."""

from __future__ import annotations

from pathlib import Path

from scaleflow.features.augment.feature import AugmentKeys
from scaleflow.interfaces import Feed, Plan
from scaleflow.interfaces.events import ArtifactWritten, Emit
from scaleflow.interfaces.hooks import TrainingData, WorkerHook
from scaleflow.runs import RunFolder
from scaleflow.worker.failures import guard


class AugmentExamples(WorkerHook):
    """Changes training examples at random."""

    def explain_no_folds(self, plan: Plan) -> str:
        return "dataset.augment mixes examples of several folds"

    def change_feed(self, data: TrainingData, feed: Feed) -> Feed:
        from scaleflow.features.augment.feed import augment_feed

        options = data.plan.of(AugmentKeys).augment
        splits = data.splits
        return augment_feed(feed, options, data.plan.seed, inputs=splits.inputs, outputs=splits.outputs)

    def report_examples(self, data: TrainingData, feed: Feed, folder: Path, emit: Emit) -> None:
        """Writes some examples as training sees them, for a look. A failure does not end the run."""
        from scaleflow.features.augment.sheet import write_sheet

        plots = RunFolder(folder).plots
        with guard("the sheet of augmented examples", emit):
            for path in write_sheet(feed, data.splits, plots):
                emit(ArtifactWritten(str(path), plots.name))
