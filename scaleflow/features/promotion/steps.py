"""Decides about the promotion of a tracked model and carries the decision out."""

import csv
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from scaleflow.commands.tracked_run import (
    find_run,
    make_evaluation_plan,
    make_evaluation_task,
    make_plan_on,
    run_evaluation,
    show_notes,
)
from scaleflow.config.compose import CommandWords
from scaleflow.config.policies import DATA, Policy
from scaleflow.config.words import quote_override
from scaleflow.errors import ConfigError, RunError
from scaleflow.evaluation.collector import EXAMPLE
from scaleflow.evaluation.comparison import PairedScores, ScoreComparison, count_not_finite, pair_scores
from scaleflow.evaluation.predictions import FILE, PREDICTIONS, ROW, Predictions, load_predictions
from scaleflow.evaluation.skills import find_constant_parts, find_useless_skills, measure_skills
from scaleflow.features.promotion.decision import (
    MAX_TAG,
    Condition,
    Decision,
    SmokeTest,
    check_floor,
    check_served_model,
    describe_comparison,
    make_record,
)
from scaleflow.features.promotion.feature import SLICE, PromotionOptions
from scaleflow.features.promotion.trained_rows import SEEN, EvaluateUnseen
from scaleflow.interfaces import NOT_FINITE, LearnedState, Plan, find_direction, name_leaves
from scaleflow.interfaces.directions import NAME_ADVICE
from scaleflow.interfaces.events import Note
from scaleflow.launcher.display import Display
from scaleflow.launcher.processes.stop import StopRequest
from scaleflow.pages.html import compose_section, make_page, make_table
from scaleflow.runs import RunFolder
from scaleflow.runs.learned_state import read_learned_state
from scaleflow.runs.reuse import find_store_options
from scaleflow.runs.run import Run
from scaleflow.tracking.registry import DECISION, ChampionRegistry
from scaleflow.tracking.store import MlflowTracker
from scaleflow.tracking.tracked_runs import choose_store, download_artifact, find_model
from scaleflow.tracking.uri import check_model_name
from scaleflow.worker.evaluate import ALL


def make_decision_page(title: str, models: Sequence[Mapping[str, Any]], decision: Decision) -> str:
    """Returns the HTML page of a decision: conditions, models, and the comparison with a row per model."""
    conditions = []
    for condition in decision.conditions:
        conditions.append({"holds": "yes" if condition.holds else "no", "condition": condition.text})
    sections = [compose_section("Conditions", make_table(conditions)), compose_section("Models", make_table(models))]
    compared = decision.comparison
    if compared is not None:
        candidate = compared.value.value
        champion = compared.other
        rows = [
            {
                "model": "candidate",
                compared.metric: candidate,
                "better by": compared.gain,
                "better on": compared.better,
            },
            {"model": "champion", compared.metric: champion, "better on": compared.worse},
        ]
        sections.append(compose_section(f"The same {compared.examples:,} examples", make_table(rows)))
    if decision.smoke:
        sections.append(compose_section("Served", make_table([dict(decision.smoke)])))
    return make_page(title, "; ".join(decision.reasons) or "every condition holds", sections)


Array = np.ndarray[Any, Any]

#: Config sections that a promotion takes from the model's run.
PROMOTE = Policy((*DATA, "evaluation", "promotion"), "evaluations")

#: Minimum number of examples for comparing models.
MIN_EXAMPLES = 30

#: Split for comparing models.
SPLIT = "test"

#: Artifact with the slices of a run's report.
SLICES = "evaluation/slices.csv"

#: Number of comparisons if other commands change the champion meanwhile.
TRIES = 3

ALREADY = "it is the champion already"


@dataclass(frozen=True)
class PromotionOutcome:
    """The outcome of a promotion."""

    run: Run
    name: str
    champion: str | None  # version of the previous champion; None: no champion
    version: str | None  # the candidate's version; None if nothing was changed
    decision: Decision


def open_registry(name: str, overrides: Sequence[str]) -> ChampionRegistry:
    """Returns a registered model in the store of `tracking.uri`, or in the default store."""
    check_model_name("--model ", name)
    tracker = MlflowTracker(choose_store(find_store_options(CommandWords(overrides))))
    tracker.connect()
    return tracker.open_registry(name)


def promote_if_better(
    words: CommandWords,
    display: Display,
    stop: StopRequest,
    *,
    name: str | None = None,
    is_dry: bool = False,
    on: str | None = None,
) -> PromotionOutcome:
    """Promotes a tracked model if every condition holds.

    Args:
        words: the run, and overrides.
        name: name of the registered model; None: `promotion.model` of the run.
        is_dry: decide, but change nothing.
        on: a file or folder. The models are compared on all its examples; None: on the candidate's test split.

    Raises:
        ConfigError: if it cannot work.
        RunError: if it failed.
        Stopped: if a signal stopped it.
    """
    if name is not None:
        check_model_name("--model ", name)
    display.begin_phase("reading the run and its model from MLflow")
    run, words = find_run(words)
    words, name = complete_promotion(words, run, name)
    if on is None:
        plan = make_evaluation_plan(show_notes(run.reuse_config(words, PROMOTE), display))
    else:
        plan = make_plan_on(on, run, words, policy=PROMOTE)
    with tempfile.TemporaryDirectory(prefix="scaleflow-promote-") as folder:
        candidate = Candidate(words, plan, run, name=name, on=on or "", folder=Path(folder), display=display, stop=stop)
        return candidate.decide(is_dry)


def complete_promotion(words: CommandWords, run: Run, name: str | None) -> tuple[CommandWords, str]:
    """Completes a command with `promotion=champion` and the registered model's name. Returns the command and this name.

    Raises ConfigError without a name.
    """
    section = run.config.get("promotion")
    known = section if isinstance(section, dict) and section.get("name") == "champion" else None
    name = name or (known or {}).get("model")
    if not name:
        raise ConfigError("--model: name the registered model whose champion this model may become")
    added = [quote_override("promotion.model", name)]
    if known is None and not any(override.startswith("promotion=") for override in words.overrides):
        added = ["promotion=champion", *added]
    return replace(words, overrides=[*added, *words.overrides]), name


#: Note for a comparison with a champion whose run was deleted.
CHAMPION_DELETED = (
    "the run of the champion was deleted, so it is not known which of these rows it was trained on: all are compared, "
    "which can only favour the champion"
)


@dataclass(frozen=True)
class SliceValue:
    """The result of a slice."""

    value: float
    metric: str


class Candidate:
    """A model that may become the champion.

    Args:
        plan: plan with the data of the candidate's run and the options of `promotion`.
        run: the candidate's run.
        folder: folder for temporary files.
        on: file or folder with the plan's data, if the models are compared on all of it; else empty.

    Raises:
        ConfigError: if the store lacks the model's files.
    """

    def __init__(
        self,
        words: CommandWords,
        plan: Plan,
        run: Run,
        *,
        name: str,
        on: str,
        folder: Path,
        display: Display,
        stop: StopRequest,
    ) -> None:
        self.words = words
        self.plan = plan
        self.name = name
        self.on = on
        self.run = run
        self.tracker = run.tracker
        self.display = display
        self.stop = stop
        self.folder = folder
        logged = download_artifact(find_model(run.tracker, run.model), run.tracker.uri, folder / "logged")
        if logged is None:
            raise ConfigError(f"{run.run_id}: the store does not have the files of its model {run.model.model_id}")
        self.logged = logged
        #: The candidate's predictions, and which rows it was trained on; None before the first comparison.
        self.predictions: tuple[Predictions, Array] | None = None

    @property
    def options(self) -> PromotionOptions:
        return self.plan.of(PromotionOptions)

    def decide(self, is_dry: bool) -> PromotionOutcome:
        """Decides and, unless it is a dry run, carries the decision out. The alias moves last."""
        registry = self.tracker.open_registry(self.name)
        self.show_doubts_about_data()
        floors = [*self.check_floors(), *self.check_answers()]
        smoke: SmokeTest | None = None
        for _ in range(TRIES):
            champion = registry.find_champion()
            if champion is not None and registry.find_model(champion) == self.run.model.model_id:
                return self.confirm_champion(registry, champion, is_dry)
            conditions: list[Condition] = []
            comparison = None
            if champion is not None:
                comparison, conditions = self.compare_with(champion)
            finite = self.check_finite(None if self.predictions is None else self.predictions[0])
            if finite is not None:
                conditions.append(finite)
            smoke = smoke or self.serve()
            self.stop.check()
            decision = Decision([*conditions, *floors, *smoke.conditions], comparison, smoke.values)
            outcome = PromotionOutcome(self.run, self.name, champion, version=None, decision=decision)
            if is_dry:
                return outcome
            self.display.begin_phase("recording the decision in MLflow")
            recorded = carry_out_decision(registry, self.tracker, outcome, folder=self.folder)
            if recorded is not None:
                return recorded
        raise RunError(
            f"--model {self.name}: other commands have changed the champion {TRIES} times meanwhile; try again"
        )

    def show_doubts_about_data(self) -> None:
        """Shows findings about rows that belong together in the data of the candidate's run."""
        learned = read_learned_state(self.logged / "data")
        if self.on:  # then the models are compared on other data
            return
        for finding in learned.schema.get("together", ()):
            self.display.show_event(Note(f"the candidate's data: {finding['text']}"))

    def confirm_champion(self, registry: ChampionRegistry, version: str, is_dry: bool) -> PromotionOutcome:
        """Returns the outcome for a candidate that is the champion. Completes a command that was killed."""
        if not is_dry:
            registry.remove_challenger(version)
            self.tracker.set_tags({DECISION: f"{self.name}, version {version}: champion"})
        decision = Decision([Condition(ALREADY, True)])
        return PromotionOutcome(self.run, self.name, version, version=version, decision=decision)

    def compare_with(self, champion: str) -> tuple[ScoreComparison, list[Condition]]:
        """Compares the candidate with version `champion`. Returns the comparison and its conditions."""
        if self.predictions is None:
            self.predictions = self.read_predictions()
        candidate, seen_by_candidate = self.predictions
        other, seen_by_champion = self.predict_with(champion, candidate)
        is_seen = seen_by_candidate | seen_by_champion
        comparison = compare_models(candidate, other, is_seen, options=self.options, on=Path(self.on).name)
        conditions = [describe_comparison(comparison, self.options)]
        conditions += check_skills(candidate, other, is_seen)
        return comparison, conditions

    def serve(self) -> SmokeTest:
        """Serves the candidate's logged model and sends it requests."""
        policy = self.run.params.get("resolved.precision", "float32")
        return check_served_model(
            self.logged, self.options, policy, folder=self.folder, begin_phase=self.display.begin_phase
        )

    def check_finite(self, predictions: Predictions | None) -> Condition | None:
        """Returns a failing condition if an output of the candidate is not finite, else None.

        Args:
            predictions: the candidate's; None without a champion. Then the run's metric decides.
        """
        count = 0
        if self.run.is_result:
            count = int(self.run.tracked.data.metrics.get(f"{SPLIT}/{NOT_FINITE}", 0))
        if predictions is not None:
            count = max(count, count_not_finite(predictions))
        if not count:
            return None
        return Condition(f"the model's outputs for {count:,} examples are NaN or infinite, and none may be", False)

    def check_floors(self) -> list[Condition]:
        """Returns the conditions of `promotion.at_least`. Raises ConfigError if the run lacks a metric."""
        floors = self.options.at_least or {}
        if floors and not self.run.is_result:
            raise ConfigError(
                f"promotion.at_least: {self.run.model.model_id} is not the result of its run {self.run.run_id}, and "
                "the metrics are those of its result"
            )
        metrics: Mapping[str, float] = self.run.tracked.data.metrics if floors else {}
        slices: Mapping[str, SliceValue] = {}
        if any(key.startswith(SLICE) for key in floors):
            slices = self.read_slices()
        conditions = []
        for key, floor in floors.items():
            known: Mapping[str, Any] = slices if key.startswith(SLICE) else metrics
            if key not in known:
                similar = sorted(name for name in known if name.startswith(("test/", SLICE)))
                shown = ", ".join(similar[:20])
                raise ConfigError(f"promotion.at_least: the run has no {key}; it has {shown or 'none'}")
            if key.startswith(SLICE):
                value = slices[key].value
                metric = slices[key].metric
            else:
                value = metrics[key]
                metric = key
            direction = find_direction(metric)
            if direction is None:
                raise ConfigError(
                    f"promotion.at_least: {key}={floor:g}: it is not known whether larger values of {metric} are "
                    f"better; {NAME_ADVICE}"
                )
            conditions.append(check_floor(key, value, floor, is_error=direction == "min"))
        return conditions

    def check_answers(self) -> list[Condition]:
        """Returns failing conditions for a candidate that answers every example the same.

        Such a model is very accurate if one class is rare, so `promotion.at_least` may not catch it.
        """
        try:
            kept = self.read_kept(self.run, "candidate")
        except ConfigError:  # the comparison with a champion reports this
            return []
        if kept is None:
            return []
        conditions = []
        for part in find_constant_parts(kept):
            where = f" for {part}" if part else ""
            conditions.append(Condition(f"it gives every example the same answer{where}", False))
        if self.options.at_least and not conditions:
            for name, skill in measure_skills(kept).items():
                if skill.value <= skill.constant and "balanced_accuracy" in name:
                    text = f"{name} {skill.value:.4g} is no better than always the same answer"
                    conditions.append(Condition(text, False))
        return conditions

    def read_slices(self) -> dict[str, SliceValue]:
        """Returns each slice in the run's report, by `slice/COLUMN/VALUE`.

        With several outputs, the key is `slice/OUTPUT/COLUMN/VALUE`.
        """
        path = self.run.download(SLICES, self.folder)
        if path is None:
            return {}
        slices = {}
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                names = [row[key] for key in ("output", "column", "slice") if row[key]]
                slices[SLICE + "/".join(names)] = SliceValue(float(row["value"]), row["metric"])
        return slices

    def read_predictions(self) -> tuple[Predictions, Array]:
        """Returns the candidate's predictions, and which rows it was trained on.

        For its test split, predictions kept by its run are used if possible.
        """
        folder = self.folder / "candidate-evaluation"
        if self.on:
            predictions = self.evaluate(self.run, self.make_training_plan(self.run), folder)
            return predictions, np.load(folder / SEEN)
        predictions = self.read_kept(self.run, "candidate") or self.evaluate(self.run, None, folder)
        if predictions.split != SPLIT:
            raise ConfigError(
                f"{self.run.run_id}: its predictions are of the {predictions.split} split, and a test split is needed"
            )
        return predictions, np.zeros(predictions.examples, bool)

    def make_training_plan(self, run: Run) -> Plan:
        """Returns the plan with the data that a run was trained on."""
        words = run.complete(replace(self.words, overrides=[]))
        return make_evaluation_plan(run.reuse_config(words, PROMOTE))

    def read_kept(self, run: Run, label: str) -> Predictions | None:
        """Returns the predictions kept by a run, or None if they are not from the named model."""
        folder = self.folder / label
        folder.mkdir(exist_ok=True)
        if not run.is_result:
            return None
        path = run.download(f"{RunFolder(folder).evaluation.name}/{PREDICTIONS}", folder)
        if path is None:
            return None
        return load_predictions(path)

    def predict_with(self, champion: str, candidate: Predictions) -> tuple[Predictions, Array]:
        """Returns the champion's predictions for the same examples, and which rows it was trained on."""
        run = Run.find(f"models:/{self.name}/{champion}", self.run.store, needs_run=False)
        folder = self.folder / f"champion-{champion}-evaluation"
        if run.is_deleted:
            self.display.show_event(Note(CHAMPION_DELETED))
            predictions = self.evaluate(run, None, folder)
            check_same_rows(candidate, predictions)
            return predictions, np.zeros(candidate.examples, bool)
        kept = None if self.on else self.read_kept(run, f"champion-{champion}")
        if kept is not None and candidate.digest and (kept.split, kept.digest) == (SPLIT, candidate.digest):
            return kept, np.zeros(candidate.examples, bool)  # the champion's own test split
        predictions = self.evaluate(run, self.make_training_plan(run), folder)
        check_same_rows(candidate, predictions)
        return predictions, np.load(folder / SEEN)

    def evaluate(self, run: Run, trained: Plan | None, folder: Path) -> Predictions:
        """Returns predictions of a run's model, computed by a worker in `folder`.

        If `trained` is the plan of the model's training, the worker also finds out which rows it was trained on.
        """
        folder.mkdir()
        task = make_evaluation_task(run, self.words, self.plan, folder=folder, named=self.run)
        known = read_learned_state(Path(task.model).parent)
        counts_unknown = has_unknown_classes(read_learned_state(self.logged / "data"), known)
        split = ALL if self.on else SPLIT
        task = replace(task, split=split, counts_unknown=counts_unknown)
        if trained is not None:
            task = EvaluateUnseen(**vars(task), trained=trained)
        run_evaluation(self.plan, task, folder, stop=self.stop, display=self.display)
        return load_predictions(RunFolder(folder).evaluation / PREDICTIONS)


def carry_out_decision(
    registry: ChampionRegistry, tracker: MlflowTracker, outcome: PromotionOutcome, folder: Path
) -> PromotionOutcome | None:
    """Registers the candidate as a version, records the decision, and moves an alias. Returns the outcome.

    The alias `champion` moves in one request, after the page and the version's tag are written. If the command is
    killed before that, the old champion stays. If it is killed after that, the same command completes the rest. Returns
    None if another command changed the champion since the decision.
    """
    decision = outcome.decision
    run = outcome.run
    version = registry.add_version(run.model.run_id, str(run.model.model_id))
    models = [{"model": "candidate", "version": version, "logged model": run.model.model_id}]
    if outcome.champion is not None:
        logged_model = registry.find_model(outcome.champion)
        models.append({"model": "champion", "version": outcome.champion, "logged model": logged_model})
    page = folder / f"{outcome.name}.html"
    result = "hold" if decision.is_promoted else "do not hold"
    title = f"{outcome.name}, version {version}: the conditions {result}"
    page.write_text(make_decision_page(title, models, decision), encoding="utf-8")
    tracker.log_artifact(page, "promotion")
    record = make_record(decision, str(run.model.model_id), outcome.champion)
    if not decision.is_promoted:
        registry.keep_challenger(version, record)
    elif not registry.move_champion(version, outcome.champion, record):
        return None
    reasons = "; ".join(decision.reasons)
    end = f"challenger: {reasons}" if reasons else "champion"
    tracker.set_tags({DECISION: f"{outcome.name}, version {version}: {end}"[:MAX_TAG]})
    return replace(outcome, version=version)


def compare_models(
    candidate: Predictions, champion: Predictions, is_seen: Array, options: PromotionOptions, on: str = ""
) -> ScoreComparison:
    """Compares the predictions of two models by `promotion.metric`.

    Args:
        candidate, champion: predictions for the candidate's split.
        is_seen: examples that a model was trained on, [examples] bool; they are left out.

    Raises ConfigError if the models lack the metric, or too few examples are left.
    """
    pair = choose_pair([*pair_scores(candidate, champion)], options.metric)
    is_used = ~is_seen[pair.examples]
    count = int(is_used.sum())
    left_out = int((~is_used).sum())
    if count < MIN_EXAMPLES:
        why = ""
        if left_out:
            who = "a model" if on else "the champion"
            why = f"; {who} was trained on {left_out:,} others"
        raise ConfigError(
            f"the champion and the candidate can be compared on {count:,} examples{why}; at least {MIN_EXAMPLES} "
            f"are needed: use {'other data' if on else 'a larger test split'}"
        )
    return replace(pair.select(is_used).compare(options.confidence), left_out=left_out, on=on)


def check_skills(candidate: Predictions, champion: Predictions, is_seen: Array) -> list[Condition]:
    """Returns failing conditions for skills of the champion that the candidate lacks.

    If one class is rare, a candidate that always gives the same answer may have the higher accuracy.
    """
    before = measure_skills(drop_seen(champion, is_seen))
    now = measure_skills(drop_seen(candidate, is_seen))
    conditions = []
    for name, (value, champion_value) in find_useless_skills(before, now).items():
        text = f"{name} {value:.4g}, the champion {champion_value:.4g}: hardly better than always the same answer"
        conditions.append(Condition(text, False))
    return conditions


def drop_seen(predictions: Predictions, is_seen: Array) -> Predictions:
    """Returns the predictions without those for examples that a model was trained on."""
    is_new = ~is_seen[predictions.column(EXAMPLE)]
    return replace(predictions, table=predictions.table.filter(pyarrow.array(is_new)))


def choose_pair(pairs: Sequence[PairedScores], metric: str | None) -> PairedScores:
    """Returns the scores of a metric; None: the first ones. Raises ConfigError if there is no such metric."""
    names = [pair.metric for pair in pairs]
    if metric is not None and metric not in names:
        raise ConfigError(f"promotion.metric={metric}: the models are compared by {', '.join(names)}")
    return pairs[0 if metric is None else names.index(metric)]


def has_unknown_classes(candidate: LearnedState, champion: LearnedState) -> bool:
    """Returns whether the candidate has classes that the champion does not know."""
    known = name_leaves(champion.outputs)
    for name, output in name_leaves(candidate.outputs).items():
        if name in known and output.is_one_class and set(output.names or ()) - set(known[name].names or ()):
            return True
    return False


def check_same_rows(candidate: Predictions, champion: Predictions) -> None:
    """Raises ConfigError if the predictions of two models are for different rows."""
    columns = [column for column in (ROW, FILE) if candidate.has(column) and champion.has(column)]
    if not columns or len(candidate.table) != len(champion.table):
        return
    if list_names(candidate, columns[0]) != list_names(champion, columns[0]):
        raise ConfigError("the data of the candidate's run has changed: its test split has other rows; train it again")


def list_names(predictions: Predictions, column: str) -> list[str]:
    """Returns the last part of each path, or of each other value, in a column."""
    return [Path(str(value)).name for value in predictions.table[column].to_pylist()]
