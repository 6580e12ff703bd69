"""Has one set of versions read what another wrote: a run that is resumed, a checkpoint, a model, a store."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

COMMAND_SECONDS = 300.0

#: A short job: the same seed gives the same test loss in each set of versions, to this many digits.
JOB = ("hardware=cpu", "dataset.validation=0.1", "tracking.system_metrics=false")
LOSS = re.compile(r"^(?:test loss|evaluate/digits/loss) +([0-9.]+)", re.MULTILINE)


class Exchange:
    """Commands of several versions in one folder with one store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, python: Path, *words: str) -> tuple[int, str]:
        """Returns the exit code and all that the command printed."""
        hidden = ("PYTHONPATH", "MLFLOW_TRACKING_URI", "SCALEFLOW_WARM")
        variables = {name: value for name, value in os.environ.items() if name not in hidden}
        done = subprocess.run(
            [python, "-m", "scaleflow", *words],
            cwd=self._folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        return done.returncode, done.stdout

    def find_faults(self, writer: Path, reader: Path, is_older: bool) -> Iterator[str]:
        """Yields what is wrong if `reader` reads what `writer` wrote. `is_older`: the writer's versions are older."""
        for name, epochs in (("short", 2), ("long", 4)):
            code, text = self.run(writer, *JOB, f"training.epochs={epochs}", f"hydra.run.dir={name}", "tracking=none")
            if code:
                yield f"a run of {epochs} epochs: {text[-400:]}"
                return
        expected = LOSS.search(text)
        code, text = self.run(reader, "resume=short", "training.epochs=4")
        found = LOSS.search(text)
        if code or not expected or not found or found[1] != expected[1]:
            yield f"resume: expected a test loss of {expected and expected[1]}: {text[-400:]}"
        code, text = self.run(reader, *JOB, "model.init_from=long", "training.epochs=1", "tracking=none")
        if code and (is_older or "wrote it, and this is the older Keras" not in text):
            yield f"model.init_from: {text[-400:]}"
        code, text = self.run(writer, "sync", "long", "--uri", "sqlite:///store.db")
        if code:
            yield f"sync: {text[-400:]}"
        code, text = self.run(reader, "evaluate", "long")
        found = LOSS.search(text)
        is_refused = code == 2 and "a newer MLflow than" in text
        if not (is_refused and not is_older) and (code or not expected or not found or found[1] != expected[1]):
            yield f"evaluate: {text[-400:]}"


def check_exchange(older: str, old: Path, newer: str, new: Path) -> list[str]:
    """Prints what comes of both directions; returns the names of those that failed."""
    failed = []
    for writer, writing, reader, reading in ((older, old, newer, new), (newer, new, older, old)):
        with tempfile.TemporaryDirectory() as folder:
            faults = list(Exchange(Path(folder)).find_faults(writing, reading, is_older=writer == older))
        name = f"{reader} reads what {writer} wrote"
        print(f"== {name}: {'; '.join(faults) if faults else 'as it should'}", flush=True)
        failed += [name] if faults else []
    return failed
