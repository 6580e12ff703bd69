"""One chain: the first run, the change, the second command, and whether its result is right."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.campaign.bench import Bench, Command
from tests.case_command import CaseTrial, Outcome
from tests.chains.data import Data
from tests.chains.draw import CHANGES, FORMS, Case
from tests.chains.oracle import compute_metrics, compute_outputs, to_probabilities
from tests.event_log import events_in
from tests.processes import call
from tests.random.judge import refusal_of, wrong_refusal

#: A command that has not ended by then hangs.
SECONDS = 300.0

#: How far a value may be from the oracle's, relative and absolute; with mixed precision.
NEAR, NEAR_MIXED = 1e-4, 0.05

RIGHT, REFUSED = "right", "refused"


Result = Outcome


class Trial(CaseTrial[Outcome]):
    """One chain; its folder has a store."""

    def __init__(self, case: Case, bench: Bench) -> None:
        super().__init__(bench, Result(case))
        self._folder = bench.folder
        self._case = case
        self._near = NEAR_MIXED if "precision=mixed" in case.words else NEAR

    def try_out(self) -> None:
        self.result.wrong += self._try()

    def _try(self) -> Iterator[str]:
        case = self._case
        data = case.make_data()
        path = data.write(self._folder / "first")
        words = (f"dataset.data_dir={path.name}", "dataset.target=answer", "training.epochs=2", *FORMS[case.form])
        words = ("dataset=table", *words, *case.words, "optimizer.learning_rate=0.01")
        first = self._bench.command(*words, "hydra.run.dir=first")
        if first.end(SECONDS) != 0:
            yield f"the first run failed: {first.said()[-500:]}"
            return
        changed = CHANGES[case.change].make(data)
        steps: Mapping[str, Callable[..., Iterator[str]]] = {
            "evaluate": self._evaluate,
            "predict": self._predict,
            "init_from": self._fine_tune,
            "resume": self._resume,
            "rerun": self._rerun,
        }
        yield from steps[case.second](data, changed, words)

    def _end(self, command: Command) -> bool:
        """Judges the end of the second command by what is allowed; returns whether there is a number to check."""
        code, case, wrong = command.end(SECONDS), self._case, self.result.wrong
        if code == 0:
            self.result.outcome = RIGHT
            if case.must_refuse:
                wrong.append(f"not refused: {command.said()[-600:]}")
            return not case.must_refuse
        self.result.outcome, self.result.refusal = REFUSED, refusal_of(command.said())
        if code == 1 and case.second == "predict":  # a bad row is found while the file is read
            if "row" not in self.result.refusal:
                wrong.append(f"a bad row without its place: {self.result.refusal}")
        elif code != 2:
            wrong.append(f"ended with {code}: {command.said()[-600:]}")
        wrong += wrong_refusal(command.said())
        if case.must_work:
            wrong.append(f"refused without need: {self.result.refusal}")
        return False

    def _run_id(self) -> str:
        return str(json.loads((self._folder / "first" / "record.json").read_text())["run_id"])

    def _classes(self, run: str = "first") -> Sequence[str] | None:
        """The names of a run's classes, as its record has them."""
        record = json.loads((self._folder / run / "learned_state.json").read_text())
        names: Sequence[str] | None = record["outputs"][0]["names"]
        return names

    def _compute(self, data: Data, run: str = "first") -> Any:
        return call(compute_outputs, str(self._folder / run / "model" / "saved_model"), data.to_inputs())

    def _differs(self, name: str, found: float, wanted: float) -> Iterator[str]:
        if not abs(found - wanted) <= self._near * max(1.0, abs(wanted)):
            yield f"{name} is {found:.7g}, and should be {wanted:.7g}"

    def _evaluate(self, data: Data, changed: Data, words: Sequence[str]) -> Iterator[str]:
        path = changed.write(self._folder / "second")
        command = self._bench.command(
            self._run_id(), f"dataset.data_dir={path.name}", "--json", module="scaleflow evaluate"
        )
        if not self._end(command):
            return
        printed = json.loads(command.said().splitlines()[-1])["metrics"]
        metrics = {name.rpartition("/")[2]: value for name, value in printed.items()}
        wanted = compute_metrics(self._compute(changed), changed.answers, self._classes())
        for name, value in wanted.items():
            yield from self._differs(name, metrics.get(name, math.nan), value)

    def _predict(self, data: Data, changed: Data, words: Sequence[str]) -> Iterator[str]:
        path = changed.write(self._folder / "second")
        command = self._bench.command(
            self._run_id(), "--input", path.name, "--output", "out.csv", module="scaleflow predict"
        )
        if not self._end(command):
            return
        with (self._folder / "out.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        outputs, classes = self._compute(changed), self._classes()
        if len(rows) != len(outputs):
            yield f"{len(rows)} predictions for {len(outputs)} rows"
            return
        if classes is None:
            found = np.array([float(row["prediction"]) for row in rows])
            # 16 bits round sums of terms, which may be larger than the sum
            least = max(1.0, float(outputs.std())) if self._near == NEAR_MIXED else 1.0
            limit = self._near * np.maximum(least, np.abs(outputs[:, 0]))
            wrong = np.flatnonzero(np.abs(found - outputs[:, 0]) > limit).tolist()
        else:
            chances = to_probabilities(outputs)
            found = np.array([[float(row[f"probability_{name}"]) for name in classes] for row in rows])
            wrong = np.flatnonzero(np.abs(found - chances).max(axis=1) > self._near).tolist()
            wrong += [n for n, row in enumerate(rows) if row["prediction"] != classes[int(found[n].argmax())]]
        if wrong:
            yield f"the predictions of {len(wrong)} rows differ, the first of row {min(wrong) + 1}"
        blanks = {name: sum(row.get(name) is None for row in changed.rows) for name in ("age", "born")}
        for name, count in blanks.items():
            if count and f"{name}: {count} missing" not in command.said():
                yield f"{count} values of {name} were blank, and the command does not say so"

    def _fine_tune(self, data: Data, changed: Data, words: Sequence[str]) -> Iterator[str]:
        """With a learning rate of nearly 0 the new model answers as the old one did."""
        path = changed.write(self._folder / "second")
        words = [word for word in words if not word.startswith(("dataset.data_dir", "training.epochs", "optimizer"))]
        own = ("model.init_from=first/model", "training.max_steps=1", "optimizer.learning_rate=1e-12")
        command = self._bench.command(*words, f"dataset.data_dir={path.name}", *own, "hydra.run.dir=second")
        if not self._end(command) or self._case.change in ("a column renamed", "a column more"):
            return
        old, new = self._compute(data), self._compute(data, "second")
        classes, names = self._classes(), self._classes("second")
        if classes is None or names is None:
            wrong = np.abs(old - new).max() > self._near * max(1.0, float(np.abs(old).max()))
        else:
            if list(names[: len(classes)]) != list(classes):
                yield f"the classes {classes} became {names}"
                return
            before, after = to_probabilities(old), to_probabilities(new)[:, : len(classes)]
            wrong = np.abs(before - after / after.sum(axis=1, keepdims=True)).max() > self._near
        if wrong:
            yield f"the fine-tuned model answers otherwise before a step: {old[:2].tolist()}, {new[:2].tolist()}"

    def _resume(self, data: Data, changed: Data, words: Sequence[str]) -> Iterator[str]:
        changed.write(self._folder / "first")
        if not self._end(self._bench.command("resume=first", "training.epochs=3")):
            if self.result.outcome == REFUSED and self._case.must_refuse:
                again = self._bench.command("resume=first", "training.epochs=3", "resume_data=changed")
                code = again.end(SECONDS)
                if code not in (0, 2):
                    yield f"with resume_data=changed it ended with {code}: {again.said()[-400:]}"
            return
        if last_status(self._folder / "first") != "FINISHED":
            yield "the resumed run is not finished"

    def _rerun(self, data: Data, changed: Data, words: Sequence[str]) -> Iterator[str]:
        changed.write(self._folder / "first")
        command = self._bench.command(self._run_id(), "hydra.run.dir=second", module="scaleflow rerun")
        if not self._end(command):
            return
        is_said = "data" in command.said() and "first run" in command.said()
        if CHANGES[self._case.change].is_content and not is_said:
            yield f"the data is other than the first run's, and the command does not say so: {command.said()[:400]}"
        if self._case.change == "none":
            old, new = (self._compute(data, run) for run in ("first", "second"))
            if not (old == new).all():
                yield "the same run again has another model"


def last_status(folder: Path) -> str:
    ends = [event for event in events_in(folder / "events.jsonl") if event["event"] == "end"]
    return str(ends[-1]["status"]) if ends else ""
