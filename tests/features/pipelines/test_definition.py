"""The file of a pipeline: its stages, references, conditions, and what is refused, without TensorFlow."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scaleflow.cli import main
from scaleflow.errors import ConfigError
from scaleflow.features.pipelines.decisions import expand_sweep
from scaleflow.features.pipelines.definition import DeclaredPipeline, load_pipeline
from scaleflow.features.pipelines.python_stage import check_function
from scaleflow.features.pipelines.references import StageCondition, rewrite_references, select_output

HEAD = "overrides: [dataset=digits]\nlimit: 0.9\nstages:\n"
FIT = "  fit: {command: train}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "conf" / "pipeline").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(folder: Path, stages: str, *words: str) -> DeclaredPipeline:
    (folder / "conf" / "pipeline" / "mine.yaml").write_text(HEAD + stages)
    return load_pipeline("mine", ["conf"], words)


def read_nothing(name: str, path: object) -> str:
    return f"<{name}>"


def test_stages_are_ordered_by_their_references(folder: Path) -> None:
    stages = (
        "  week: {command: evaluate, run: '${stages.fit.run_id}', when: '${stages.look.metrics.faults} < ${limit}'}\n"
        "  fit: {command: train, overrides: ['${stages.search.best.overrides}', 'a=${limit}'], after: [look]}\n"
        "  search: {command: sweep, overrides: ['model.units=1,2']}\n"
        "  look: {command: check}\n"
        "  adapt: {command: train, foreach: {city: [ulm, berlin]}, overrides: ['x=${city}']}\n"
        "  end: {command: python, target: a.b, after: adapt}\n"
    )
    made = load(folder, stages, "fit.training.epochs=5", "limit=0.5", "adapt.seed=1")
    assert list(made.stages) == ["search", "look", "fit", "week", "adapt.ulm", "adapt.berlin", "end"]
    assert made.needs["week"] == {"fit", "look"}
    assert made.needs["end"] == {"adapt.ulm", "adapt.berlin"}
    assert made.find_dependents("search") == {"fit", "week"}
    resolved = made.resolve(made.stages["fit"], lambda *_: ["model.units=1", "seed=3"])
    assert resolved["overrides"] == ["dataset=digits", "model.units=1", "seed=3", "a=0.5", "training.epochs=5"]
    assert made.resolve(made.stages["adapt.ulm"], read_nothing)["overrides"] == ["dataset=digits", "x=ulm", "seed=1"]
    assert made.resolve(made.stages["week"], read_nothing)["run"] == "<fit>"
    assert made.holds(made.stages["week"], lambda *_: 0)
    assert not made.holds(made.stages["week"], lambda *_: 1)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("  fit: {command: trian}\n", r"line 4: stage fit: command: trian: .*did you mean train"),
        ("  fit: {command: train, overides: [a=1]}\n", "line 4: stage fit: overides: .*did you mean overrides"),
        ("  fit: {command: train, after: look}\n", "line 4: stage fit: after: look: there is no such stage"),
        (FIT + "  go: {command: promote, run: x}\n", "line 5: stage go: model: is missing"),
        (FIT + "  go: {command: evaluate, run: '${stages.fti.run_id}'}\n", "line 5: .*no stage fti; did you mean fit"),
        (FIT + "  go: {command: evaluate, run: '${stages.fit.id}'}\n", "line 5: .*fit has no output id"),
        (FIT + "  go: {command: evaluate, run: '${stages.fit}'}\n", "line 5: .*name one of its outputs"),
        (FIT + "  go: {command: evaluate, run: '${stages.fit.run_id.x}'}\n", "fit.run_id is a value"),
        (FIT + "  go: {command: evaluate, run: a, split: tset}\n", "split: tset: expected test or validation"),
        ("  a: {command: train, after: b}\n  b: {command: train, after: a}\n", "depends on itself: "),
        ("  fit: {command: train, when: '1 > 2'}\n", "is never true, so that the stage could never run"),
        ("  fit: {command: train, when: '__import__(1)'}\n", "cannot be read; write comparisons"),
        ("  fit: {command: train, when: '${limit} == high'}\n", "high is no value; put a text in quotes: 'high'"),
        ("  fit: {command: train, overrides: ['a=${nothing}']}\n", "line 4: stage fit: .*nothing"),
        ("  fit: {command: train, foreach: {city: [a b]}}\n", "foreach: city: a b: becomes a part"),
        (
            "  fit: {command: train, foreach: {c: [a, b]}}\n  g: {command: evaluate, run: '${stages.fit.run_id}'}\n",
            "fit.a",
        ),
        ("  fit.a: {command: train}\n", "its name must be of letters"),
        ("  fit: {command: train\n", "mine.yaml, line"),
    ],
)
def test_a_file_that_cannot_work_is_refused_with_its_line(folder: Path, stages: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, stages)


def test_of_two_words_for_one_key_the_last_one_counts(folder: Path) -> None:
    made = load(folder, "  fit: {command: train, overrides: [dataset=csv, seed=1]}\n", "fit.seed=2", "fit.dataset=csv")
    assert made.resolve(made.stages["fit"], read_nothing)["overrides"] == ["seed=2", "dataset=csv"]


def test_a_name_of_a_pipeline_of_ours_is_refused(folder: Path) -> None:
    (folder / "conf" / "pipeline" / "table.yaml").write_text(HEAD + FIT)
    with pytest.raises(ConfigError, match=r"table: there are two pipelines of this name, .*; rename yours"):
        load_pipeline("table", ["conf"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("fti.seed=1", r"fti.seed=1: expected STAGE.KEY=VALUE, or KEY=VALUE of the file"),
        ("fit", "fit: expected STAGE.KEY=VALUE"),
        ("tell.x=1", "a function of Python, takes no overrides"),
    ],
)
def test_a_word_that_names_no_stage_is_refused(folder: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, FIT + "  tell: {command: python, target: a.b}\n", word)


def test_a_condition_compares_values_and_runs_no_code() -> None:
    text = rewrite_references("${stages.a.metrics.x} > 0.5 and not ${b} == 'off' or ${c} == null")
    assert StageCondition(text).holds([0.6, "on", 1])
    assert not StageCondition(text).holds([0.4, "on", 1])
    assert StageCondition(text).holds([0.4, "off", None])
    assert StageCondition("-1 < ${a} <= 2").holds([2])
    with pytest.raises(ConfigError, match="'1' and 2 do not compare"):
        StageCondition("${a} < 2").holds(["1"])


def test_an_output_that_is_not_there_is_named() -> None:
    outputs = {"metrics": {"accuracy": 0.5}, "run_id": None}
    assert select_output(outputs, "fit", ["metrics", "accuracy"]) == 0.5
    with pytest.raises(ConfigError, match=r"fit.metrics has no acuracy; did you mean accuracy\? \(accuracy\)"):
        select_output(outputs, "fit", ["metrics", "acuracy"])
    with pytest.raises(ConfigError, match="fit has no run_id: its run is not recorded"):
        select_output(outputs, "fit", ["run_id"])


def test_the_jobs_of_a_sweep_are_its_first_values_and_each_other_one() -> None:
    words = ["dataset=digits", "model.units=[1],[2]", "seed=range(3,9)", "optimizer=adam,sgd"]
    assert list(expand_sweep(words)) == [
        ["dataset=digits", "model.units=[1]", "seed=3", "optimizer=adam"],
        ["dataset=digits", "model.units=[2]", "seed=3", "optimizer=adam"],
        ["dataset=digits", "model.units=[1]", "seed=3", "optimizer=sgd"],
    ]


def test_a_function_is_checked_without_its_import(folder: Path) -> None:
    (folder / "steps.py").write_text("raise SystemExit\ndef tell(accuracy, who='me'): ...\n")
    check_function("steps.tell", {"accuracy": 1})
    with pytest.raises(ConfigError, match=r"steps\.py has no function tel; did you mean tell"):
        check_function("steps.tel", {})
    with pytest.raises(
        ConfigError, match=r"arguments: acuracy: steps\.tell has no such parameter; did you mean accuracy"
    ):
        check_function("steps.tell", {"acuracy": 1})
    with pytest.raises(ConfigError, match="arguments: accuracy: missing"):
        check_function("steps.tell", {"who": "you"})
    with pytest.raises(ConfigError, match="there is no module stepz"):
        check_function("stepz.tell", {})


def test_the_command_refuses_a_wrong_config_before_anything_runs(folder: Path) -> None:
    stages = "  fit: {command: train, overrides: [model.unis=3]}\n"
    (folder / "conf" / "pipeline" / "mine.yaml").write_text(HEAD + stages)
    words = [sys.executable, "-m", "scaleflow", "pipeline", "mine", "--config-dir", "conf"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().startswith("scaleflow: pipeline/mine.yaml, line 4: stage fit: model.unis: ")
    assert "did you mean model.units" in done.stderr
    assert not (folder / "pipelines").exists()


@pytest.mark.usefixtures("folder")
def test_a_pipeline_is_no_option_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline=table"]) == 2
    assert re.search(
        r"pipeline=table: a pipeline is no option of a run; write .* pipeline NAME", capsys.readouterr().err
    )
