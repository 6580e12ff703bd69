"""Records what a script asks of MLflow's fluent API in the run of the script.

A worker does not use the store, so MLflow's functions are replaced while the script runs. They report to the launcher,
which records everything. MLflow itself is imported only by the script.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import ModuleType, SimpleNamespace
from typing import Any

import wrapt

from scaleflow.compat.mlflow import draw_run_name
from scaleflow.features.script.recorder import ScriptRecorder
from scaleflow.interfaces.events import ArtifactWritten, Note

#: The folder in the run's folder that has the script's own artifacts until they are recorded.
ARTIFACTS = "script_artifacts"

#: Functions of MLflow that have no effect in a script, and why.
WITHOUT_EFFECT: Mapping[str, str] = {
    "set_experiment": "the command names the experiment: tracking.experiment=NAME",
    "set_tracking_uri": "the command names the store: tracking.uri=ADDRESS",
    "autolog": "the run has the params, metrics and the model already",
    "log_input": "the run has a description of its data already",
    "log_inputs": "the run has a description of its data already",
    "log_model": "the run logs the last fitted model itself",
    "enable_system_metrics_logging": "the run has the metrics of the machine already",
}

#: Functions of MLflow that ask the store.
WITH_STORE = ("MlflowClient", "get_run", "search_runs", "search_experiments", "search_logged_models", "register_model")

#: Modules of MLflow whose `autolog` and `log_model` a script of Keras calls.
FLAVORS = ("mlflow.keras", "mlflow.tensorflow")


#: Seconds to wait for the id of a run that begins, and between two looks.
SECONDS_FOR_ID = 30.0
SECONDS_BETWEEN_LOOKS = 0.05


class RunInfo:
    """The facts about the script's run that `run.info` has. The id is known when the launcher has begun the run."""

    def __init__(self, recorder: ScriptRecorder) -> None:
        self._recorder = recorder
        self.run_name = recorder.program.path.name
        self.status = "RUNNING"
        self.artifact_uri = str(recorder.process.spec.folder)

    @property
    def run_id(self) -> str:
        """The id of the run in the store. Begins the run, and waits for its id; "" if the store does not answer."""
        self._recorder.begin_run()
        files = self._recorder.process.spec.files
        deadline = time.monotonic() + SECONDS_FOR_ID
        while time.monotonic() < deadline:
            run_id = files.read_record().get("run_id")
            if run_id is not None or self._recorder.process.spec.plan.tracking.name == "none":
                return str(run_id or "")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return ""


class ActiveRun(SimpleNamespace):
    """What `mlflow.start_run` and `mlflow.active_run` return in a script: its only run."""

    def __enter__(self) -> ActiveRun:
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing: the run ends with the script."""


class MlflowCalls:
    """Replaces the functions of MLflow that a script uses.

    Args:
        recorder: records what they report.
    """

    def __init__(self, recorder: ScriptRecorder) -> None:
        self._recorder = recorder
        self._folder = recorder.process.spec.folder / ARTIFACTS
        self._numbers = itertools.count()
        self._has_logged = False
        self._is_open = False

    @property
    def has_logged(self) -> bool:
        """Whether the script has logged anything."""
        return self._has_logged

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Replaces the functions while the script runs, as soon as it imports MLflow."""
        self._is_open = True
        wrapt.register_post_import_hook(self._replace_functions, "mlflow")
        for name in FLAVORS:
            wrapt.register_post_import_hook(self._replace_flavor, name)
        try:
            yield
        finally:
            self._is_open = False

    def _replace_functions(self, mlflow: ModuleType) -> None:
        if not self._is_open:
            return
        names = [name for name in dir(type(self)) if not name.startswith("_")]
        for name in names:
            if name not in ("record", "has_logged") and hasattr(mlflow, name):
                setattr(mlflow, name, getattr(self, name))
        for name in WITH_STORE:
            if hasattr(mlflow, name):
                setattr(mlflow, name, self._make_refusal(name))
        self._replace_without_effect(mlflow)

    def _make_refusal(self, name: str) -> Callable[..., None]:
        def refuse(*arguments: Any, **named: Any) -> None:
            raise RuntimeError(
                f"mlflow.{name}: a script has no connection to the store while it runs, because the launcher records "
                "it; use mlflow.log_metric and the like, or look at the run after its end"
            )

        return refuse

    def _replace_flavor(self, flavor: ModuleType) -> None:
        if self._is_open:
            self._replace_without_effect(flavor)

    def _replace_without_effect(self, module: ModuleType) -> None:
        for name, reason in WITHOUT_EFFECT.items():
            if hasattr(module, name):
                setattr(module, name, self._make_without_effect(f"{module.__name__}.{name}", reason))

    def _make_without_effect(self, name: str, reason: str) -> Callable[..., None]:
        def do_nothing(*arguments: Any, **named: Any) -> None:
            self._recorder.send(Note(f"{name} has no effect in a script: {reason}"))

        return do_nothing

    # The run ---------------------------------------------------------------------------------

    def start_run(self, *arguments: Any, **named: Any) -> ActiveRun:
        """Returns the script's run. A nested run is this run, too."""
        if named.get("nested"):
            self._recorder.send(Note("mlflow.start_run(nested=True): what it logs goes to the run of the script"))
        tags = {"mlflow.note.content": named["description"]} if named.get("description") else {}
        tags |= named.get("tags") or {}
        if not named.get("run_name"):
            draw_run_name()  # MLflow takes these random numbers, and the script's later ones depend on it
        if named.get("run_name") and not self._recorder.process.spec.plan.tracking.run_name:
            tags["mlflow.runName"] = named["run_name"]
        if tags:
            self.set_tags(tags)
        return self._make_run()

    def active_run(self) -> ActiveRun:
        return self._make_run()

    def end_run(self, status: str = "FINISHED") -> None:
        """Does nothing: the run ends with the script."""

    def _make_run(self) -> ActiveRun:
        return ActiveRun(info=RunInfo(self._recorder), data=SimpleNamespace(params={}, metrics={}, tags={}))

    # Values ----------------------------------------------------------------------------------

    def log_metric(self, key: str, value: Any, step: int | None = None, *rest: Any, **named: Any) -> None:
        self.log_metrics({key: value}, step)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None, *rest: Any, **named: Any) -> None:
        self._begin()
        self._recorder.log_metrics({name: float(value) for name, value in metrics.items()}, step)

    def log_param(self, key: str, value: Any, *rest: Any, **named: Any) -> Any:
        self.log_params({key: value})
        return value

    def log_params(self, params: Mapping[str, Any], *rest: Any, **named: Any) -> None:
        self._has_logged = True
        self._recorder.log_params(params)

    def set_tag(self, key: str, value: Any, *rest: Any, **named: Any) -> None:
        self.set_tags({key: value})

    def set_tags(self, tags: Mapping[str, Any], *rest: Any, **named: Any) -> None:
        self._has_logged = True
        self._recorder.set_tags(tags)

    # Files -----------------------------------------------------------------------------------

    def log_artifact(self, local_path: Any, artifact_path: str | None = None, *rest: Any, **named: Any) -> None:
        source = Path(local_path)
        if source.is_dir():
            name = source.name if artifact_path is None else f"{artifact_path}/{source.name}"
            self.log_artifacts(source, name)
            return
        target = self._make_file(source.name if artifact_path is None else f"{artifact_path}/{source.name}")
        shutil.copyfile(source, target)
        self._send_file(target)

    def log_artifacts(self, local_dir: Any, artifact_path: str | None = None, *rest: Any, **named: Any) -> None:
        folder = Path(local_dir)
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            parts = [artifact_path or "", path.relative_to(folder).parent.as_posix()]
            place = "/".join(part for part in parts if part not in ("", "."))
            self.log_artifact(path, place or None)

    def log_text(self, text: str, artifact_file: str, *rest: Any, **named: Any) -> None:
        target = self._make_file(artifact_file)
        target.write_text(text, encoding="utf-8")
        self._send_file(target)

    def log_dict(self, dictionary: Mapping[str, Any], artifact_file: str, *rest: Any, **named: Any) -> None:
        """Writes JSON, or YAML if the file's name ends in .yaml or .yml."""
        if artifact_file.endswith((".yaml", ".yml")):
            import yaml

            self.log_text(yaml.safe_dump(dictionary, sort_keys=False), artifact_file)
        else:
            self.log_text(json.dumps(dictionary, indent=2, default=str), artifact_file)

    def log_figure(self, figure: Any, artifact_file: str, *rest: Any, **named: Any) -> None:
        """Writes a figure of Matplotlib or Plotly."""
        target = self._make_file(artifact_file)
        if hasattr(figure, "savefig"):
            figure.savefig(target, **(named.get("save_kwargs") or {}))
        elif target.suffix == ".html":
            figure.write_html(str(target))
        else:
            figure.write_image(str(target))
        self._send_file(target)

    def log_image(
        self,
        image: Any,
        artifact_file: str | None = None,
        key: str | None = None,
        step: int | None = None,
        **named: Any,
    ) -> None:
        """Writes a picture: one of Pillow, or an array [height, width, channels] of bytes or of numbers from 0 to 1."""
        at = self._recorder.step if step is None else step
        target = self._make_file(artifact_file or f"images/{key}_step_{at}.png")
        if not hasattr(image, "save"):
            image = to_picture(image)
        image.save(target)
        self._send_file(target)

    def log_table(self, data: Any, artifact_file: str, *rest: Any, **named: Any) -> None:
        """Writes a DataFrame, or a dict of columns, in the form of `DataFrame.to_json(orient="split")`."""
        import pandas

        frame = data if isinstance(data, pandas.DataFrame) else pandas.DataFrame(data)
        self.log_text(frame.to_json(orient="split", index=False), artifact_file)

    def _make_file(self, name: str) -> Path:
        """Returns the place of a new artifact. Raises ValueError if its name leaves the run's folder."""
        place = PurePosixPath(str(name))
        if place.is_absolute() or ".." in place.parts or not place.name:
            raise ValueError(f"mlflow: the artifact {str(name)!r} would leave the folder of the run")
        # A later artifact of the same name is another file: the first may not be recorded yet.
        folder = self._folder / str(next(self._numbers)) / place.parent
        folder.mkdir(parents=True, exist_ok=True)
        return folder / place.name

    def _send_file(self, path: Path) -> None:
        self._begin()
        place = path.parent.relative_to(self._folder).parts[1:]
        self._recorder.send(ArtifactWritten(str(path), "/".join(place) or None))

    def _begin(self) -> None:
        """Begins the run: what is logged from now on is recorded at once."""
        self._has_logged = True
        self._recorder.begin_run()


def to_picture(array: Any) -> Any:
    """Returns an array as a picture of Pillow."""
    import numpy
    from PIL import Image

    values = numpy.asarray(array)
    if values.dtype != numpy.uint8:
        scale = 255.0 if values.size and values.max() <= 1.0 else 1.0
        values = numpy.clip(values * scale, 0, 255).astype(numpy.uint8)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    return Image.fromarray(values)
