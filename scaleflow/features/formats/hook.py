"""Exports a run's model in the formats of `export.formats`, first as a trial before training."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from scaleflow.errors import ConfigError
from scaleflow.features.formats.events import FormatExported
from scaleflow.features.formats.feature import ExportOptions
from scaleflow.features.formats.task import export_formats, make_format_table
from scaleflow.interfaces.events import ArtifactWritten, MetricsLogged
from scaleflow.interfaces.hooks import TrainedRun, WorkerHook
from scaleflow.runs import RunFolder


class FormatsHook(WorkerHook):
    """Exports the formats of a run and reports them."""

    def after_build(self, run: TrainedRun, export: Callable[[Path], object]) -> None:
        """Exports a new run's untrained model in its formats, with two examples.

        Raises ConfigError if a format cannot express the model, before any training. Does nothing in a resumed run.
        """
        if run.is_resumed:
            return
        with tempfile.TemporaryDirectory(prefix="scaleflow-formats-") as folder:
            export(Path(folder))
            exported_formats = []
            if run.is_chief:
                exported_formats = export_formats(
                    run.plan, Path(folder), run.emit, log=run.log, should_stop=run.should_stop, is_trial=True
                )
        for exported in exported_formats:
            if exported.error:
                others = [other.name for other in exported_formats if not other.error]
                rest = f"[{', '.join(others)}]" if others else "null"
                raise ConfigError(f"export.formats: {exported.name}: {exported.error}; use export.formats={rest}")

    def after_export(self, run: TrainedRun, step: int) -> None:
        """Exports the formats of the trained model, reports them with their metrics, and writes their table."""
        model = RunFolder(run.folder).model
        try:
            formats = export_formats(run.plan, model, run.emit, log=run.log, should_stop=run.should_stop)
        except ConfigError as error:  # the data cannot be read; keep the trained model
            names = run.plan.of(ExportOptions).formats or ()
            formats = [FormatExported(name, "", error=str(error)) for name in names]
        for exported in formats:
            run.emit(exported)
            if exported.values:
                run.emit(
                    MetricsLogged(
                        step, {f"export/{exported.name}/{key}": value for key, value in exported.values.items()}
                    )
                )
        table = run.folder / "formats.json"
        table.write_text(json.dumps(make_format_table(formats), indent=1))
        run.emit(ArtifactWritten(str(table), "export"))
