"""Learns from the validation rows, after training, how the model's outputs become answers (`evaluation`)."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import BySplit, Feed, Outputs, Plan
from scaleflow.interfaces.config import EvaluationOptions
from scaleflow.interfaces.events import Emit, Note
from scaleflow.interfaces.learned_state import parse_leaves
from scaleflow.worker.kept_predictions import KeptSplit, PredictionKeeper

if TYPE_CHECKING:
    import numpy as np

    from scaleflow.training import Engine, WorkerSync

    Array = np.ndarray[Any, Any]


class AnswerRules:
    """Learns the calibration, the threshold, the sets and the intervals of answers from the validation rows.

    Args:
        outputs: the model's single output.
        kept: the split whose predictions are kept. It is the validation split if there is no test split.

    Attributes:
        outputs: the output; after `learn` it includes the learned values.

    Raises ConfigError if the output cannot have such answers, or if there are too few rows.
    """

    def __init__(
        self, plan: Plan, engine: Engine, feeds: BySplit[Feed], outputs: Outputs, kept: KeptSplit | None
    ) -> None:
        options = plan.evaluation
        feed = feeds.validation
        check_answers(options, outputs, 0 if feed is None else feed.examples)
        carried: dict[str, Any] = {}
        for name, answer in plan.answers.items():
            carried[name] = tuple(answer) if isinstance(answer, list) else answer
        self.outputs = replace(outputs, threshold=options.own_threshold, **carried)
        self._is_carried = bool(carried)
        self._options = options
        self._engine = engine
        self._feed = feed
        self._is_kept = kept is not None and kept.feed is feed
        if not options.learned:
            return
        if feed is None:
            raise ConfigError(
                f"{options.learned[0]}: there are no validation rows to decide by; set dataset.validation"
            )
        if self._is_kept and kept is not None:
            if not kept.keeper.is_raw:
                raise ConfigError(f"{options.learned[0]}: needs a test split if there are more than 20 classes")
            self._keeper = kept.keeper
        else:
            self._keeper = PredictionKeeper(outputs, feed, is_raw=True)
            engine.keep_outputs(feed, self._keeper)

    def learn(self, worker_sync: WorkerSync, worker: int, emit: Emit) -> None:
        """Evaluates the trained model on the validation rows, and learns from the result. All workers must call it."""
        if self._is_carried and self.outputs.calibration is not None:
            factor, shift = self.outputs.calibration
            self._engine.adjust_outputs(lambda outputs: outputs * factor + shift)
        if not self._options.learned or self._feed is None:
            return
        self._engine.evaluate(self._feed)
        contents = worker_sync.gather(self._keeper.collector.to_bytes(), worker)
        text = worker_sync.from_chief(
            lambda: json.dumps(learn_from(self._options, self.outputs, contents), default=vars)
        )
        learned, notes = json.loads(text)
        self.outputs = parse_leaves([{"name": "", **learned}], Outputs)
        calibration = self.outputs.calibration
        if calibration is not None:
            self._engine.adjust_outputs(lambda outputs: outputs * calibration[0] + calibration[1])
            if self._is_kept:
                self._engine.evaluate(self._feed)  # evaluate again, because the predictions of this split are kept
        for note in notes if worker == 0 else ():
            emit(Note(note))
        if self._is_kept and worker == 0:
            emit(Note("evaluation: there is no test split, so the figures are of the rows that decided"))


def check_answers(options: EvaluationOptions, described: Outputs, rows: int) -> None:
    """Raises ConfigError if the outputs cannot have the answers that `evaluation` requests."""
    from scaleflow.evaluation.calibration import count_needed
    from scaleflow.evaluation.collector import choose_form
    from scaleflow.serving.prediction_columns import MAX_PROBABILITIES

    has = f"the dataset has {described.kind} targets" + (f" {described.shape}" if described.shape else "")
    is_class = described.is_one_class
    count = described.shape[-1] if described.shape else 1
    if options.threshold != 0.5 and not (is_class and (described.kind == "binary" or count == 2)):
        raise ConfigError(f"evaluation.threshold: is for two classes, and {has}; leave it 0.5")
    if options.calibrate and not is_class:
        raise ConfigError(f"evaluation.calibrate: is for one class of each example, and {has}; leave it null")
    if options.interval is not None and (described.kind != "regression" or choose_form(described) != "values"):
        raise ConfigError(f"evaluation.interval: is for numbers, and {has}; leave it null")
    if options.sets is not None and not (is_class and choose_form(described) == "class"):
        raise ConfigError(
            f"evaluation.sets: is for one of up to {MAX_PROBABILITIES} classes of each example, and {has}; leave it "
            "null"
        )
    for key, level in (("interval", options.interval), ("sets", options.sets)):
        needed = 0 if level is None else count_needed(level)
        if rows < needed:
            raise ConfigError(
                f"evaluation.{key}={level:g}: needs {needed} validation rows, and there are {rows}; use a lower one, "
                "or a larger dataset.validation"
            )


def learn_from(options: EvaluationOptions, described: Outputs, contents: list[bytes]) -> tuple[Outputs, list[str]]:
    """Returns the outputs with the values learned from the validation rows, and notes about them. Runs on the chief.

    `contents` has the collected values of each worker.
    """
    import numpy as np

    from scaleflow.evaluation.calibration import find_margins

    parts = [dict(np.load(io.BytesIO(content))) for content in contents if content]
    values = {}
    for name in parts[0]:
        values[name] = np.concatenate([part[name] for part in parts])
    weights = values["weight"].astype(np.float64) if "weight" in values else np.ones(len(values["example"]))
    has_target = np.ones((len(weights), values["/target"].size // max(1, len(weights))), bool)
    if described.ignore is not None:
        has_target = (values["/target"] != described.ignore).reshape(has_target.shape)
    is_finite = np.isfinite(values["/output"]).reshape(len(weights), -1).all(axis=1)
    has_target &= (is_finite | (weights > 0))[:, None]  # NaN * 0 is NaN
    why = describe_not_finite(described, values["/output"], has_target)
    if why:
        return described, [f"{', '.join(options.learned)}: nothing is learned, as {why}"]
    if options.interval is None:
        is_used = has_target[:, 0]
        known = {name: values[name][is_used] for name in ("/output", "/target")}
        return learn_classes(options, described, known, weights=weights[is_used])
    margins: list[float] = []
    errors = (values["/output"] - values["/target"]).reshape(len(weights), -1)
    for column in range(errors.shape[1]):  # each column uses the rows that have a target for it
        is_used = has_target[:, column]
        why = find_shortage(options.interval, weights[is_used])
        if why:
            return described, [f"evaluation.interval: there are no intervals, as {why}"]
        margins += find_margins(errors[is_used, column : column + 1], options.interval, weights[is_used]).tolist()
    many = "" if len(margins) == 1 else f" and {len(margins) - 1} more"
    rows = describe_rows(has_target[:, 0])
    note = f"evaluation.interval={options.interval:g}: {rows} give +-{margins[0]:.4g}{many}"
    return replace(described, margins=tuple(margins)), [note]


def describe_rows(has_target: Array) -> str:
    """Describes how many validation rows are used."""
    count = int(has_target.sum())
    if count == len(has_target):
        return f"{count:,} validation rows"
    return f"the {count:,} of {len(has_target):,} validation rows with a target"


def describe_not_finite(described: Outputs, outputs: Array, has_target: Array) -> str:
    """Returns why nothing can be learned from outputs that are not finite; empty if all are finite.

    `has_target` marks the values of each row that have a target, [rows, values].
    """
    import numpy as np

    from scaleflow.serving.prediction_columns import find_not_finite

    is_bad = ~np.isfinite(outputs) if described.kind == "regression" else find_not_finite(described, outputs)
    is_bad = is_bad.reshape(has_target.shape) & has_target
    count = int(is_bad.any(axis=1).sum())
    rows = int(has_target.any(axis=1).sum())
    return f"the outputs of {count:,} of {rows:,} validation rows are NaN or infinite" if count else ""


def find_shortage(level: float, weights: Array) -> str:
    """Returns why weighted rows are too few for a level; empty if there are enough."""
    from scaleflow.evaluation.calibration import count_needed
    from scaleflow.evaluation.resampling import count_effective

    count = round(count_effective(weights), 6)
    needed = count_needed(level)
    if count >= needed:
        return ""
    if len(weights) < needed:
        return f"{len(weights):,} validation rows have a target, and {needed} are needed"
    return f"the weights make {len(weights):,} validation rows count as {count:.3g}, and {needed} are needed"


def learn_classes(
    options: EvaluationOptions, described: Outputs, values: Mapping[str, Array], weights: Array
) -> tuple[Outputs, list[str]]:
    """Returns the outputs with the calibration and the thresholds of answers and sets, and notes about them."""
    import numpy as np

    from scaleflow.evaluation.calibration import MIN_CLASS_ROWS, find_set_threshold, fit_calibration
    from scaleflow.serving.prediction_columns import compute_probabilities

    is_binary = described.kind == "binary"
    logits = values["/output"].astype(np.float64)
    logits = logits.reshape(-1) if is_binary else logits
    target = (values["/target"].reshape(-1) > 0.5 if is_binary else values["/target"].reshape(-1)).astype(np.int64)
    counts = np.bincount(target[weights > 0], minlength=1)
    is_rare = (counts > 0).sum() < 2 or counts[counts > 0].min() < MIN_CLASS_ROWS
    notes: list[str] = []
    if is_rare and options.learned != ["evaluation.sets"]:
        keys = ", ".join(key for key in options.learned if key != "evaluation.sets")
        notes.append(f"{keys}: nothing is learned, as a class has fewer than {MIN_CLASS_ROWS} validation rows")
    elif options.calibrate:
        calibration = fit_calibration(target, logits, weights)
        if calibration is None:
            notes.append("evaluation.calibrate: probabilities stay as they are, which no calibration makes better")
        else:
            described = replace(described, calibration=calibration)
            factor, shift = calibration
            logits = logits * factor + shift
            notes.append(f"evaluation.calibrate: logits are multiplied by {factor:.3g}" + f", {shift:+.3g}" * is_binary)
    chances = compute_probabilities(described, logits.reshape(values["/output"].shape))
    assert chances is not None
    if not isinstance(options.threshold, float) and not is_rare:
        described, note = learn_threshold(options, described, target, chance=chances[:, 1], weights=weights)
        notes.append(note)
    if options.sets is None:
        return described, notes
    shortage = find_shortage(options.sets, weights)
    if shortage:
        notes.append(f"evaluation.sets: there are no sets, as {shortage}")
        return described, notes
    least = find_set_threshold(chances[np.arange(len(target)), target], options.sets, weights)
    rows = f"{len(target):,} validation rows"
    notes.append(f"evaluation.sets={options.sets:g}: {rows} give the classes with a probability of {least:.3g} or more")
    return replace(described, set_threshold=least), notes


def learn_threshold(
    options: EvaluationOptions, described: Outputs, target: Array, chance: Array, weights: Array
) -> tuple[Outputs, str]:
    from scaleflow.evaluation.calibration import choose_threshold

    assert not isinstance(options.threshold, float)
    threshold, reached = choose_threshold(target, chance, weights, goal=options.threshold)
    second = described.names[1] if described.names else "1"
    used = "0.5 is used" if threshold is None else f"{second} from {threshold:.3g} on"
    note = f"evaluation.threshold: {used}, as {len(target):,} validation rows say ({reached})"
    return replace(described, threshold=threshold), note
