"""The words after `scaleflow train.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaleflow.commands.table import translate_file_word
from scaleflow.config.compose import compose_config
from scaleflow.config.words import show_keys, show_words
from scaleflow.errors import ConfigError
from scaleflow.features.script.check import read_fit_arguments
from scaleflow.features.script.feature import ScriptOptions
from scaleflow.features.script.task import RunScript
from scaleflow.features.script.words import translate_rerun
from scaleflow.launcher.prepare import make_plan, make_spec


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the script `train.py`."""
    (tmp_path / "train.py").write_text("EPOCHS = 3\nimport local_part\n")
    (tmp_path / "local_part.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "translated"),
    [
        ("train.py", "script.path=train.py"),
        ("train.py -- --lr 3", "script.path=train.py script.arguments=['--lr','3']"),
        ("-m train.py script.EPOCHS=1,2", "script.path=train.py -m ++script.constants.EPOCHS=1,2"),
        ("train.py fit.epochs=2", "script.path=train.py ++script.fit.epochs=2"),
        ("train.py optimizer.learning_rate=0.1", "script.path=train.py script.compiled_rate=0.1"),
        (
            "train.py strategy=mirrored hardware.logical_devices=2 seed=3",
            "script.path=train.py strategy=mirrored hardware.logical_devices=2 seed=3 script.typed=[strategy,seed]",
        ),
        ("--cfg job train.py", "script.path=train.py --cfg job"),
        ("training.epochs=3", "training.epochs=3"),
        ("--config-dir train.py training.epochs=3", "--config-dir train.py training.epochs=3"),
    ],
)
def test_words_become_those_of_a_run(here: Path, typed: str, translated: str) -> None:
    assert translate_file_word(typed.split()) == translated.split()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("trian.py", "trian.py: there is no such file; did you mean train.py?"),
        ("train.py model.units=3", "model.units=3: train.py decides this itself"),
        ("train.py training.epochs=3", "type fit.epochs=3 to change its model.fit"),
        ("train.py epochs=3", "type fit.epochs=3"),
        ("train.py --lr 3", "--lr: scaleflow has no such flag; the script's own arguments follow --"),
        ("train.py fast", "the script's own arguments follow --"),
        ("train.py script.path=other.py", "NAME is a constant at the top of train.py"),
        ("train.py resume=outputs", "leave train.py out: python -m scaleflow resume=outputs"),
    ],
)
def test_other_words_are_refused(here: Path, typed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate_file_word(typed.split())


@pytest.mark.parametrize(
    "typed",
    [
        "train.py",
        "train.py script.EPOCHS=[1,2] fit.epochs=2 optimizer.learning_rate=0.1 precision=mixed tracking=none",
        "train.py seed=3 -- --lr 3 a=b ${x}",
        "training.epochs=3 +dataset.x=1",
    ],
)
def test_words_are_shown_as_they_were_typed(here: Path, typed: str) -> None:
    assert show_words(translate_file_word(typed.split())) == typed.split()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("type '++script.constants.UNITS=[1]'", "type 'script.UNITS=[1]'"),
        ("script.compiled_rate=-1: expected a number", "optimizer.learning_rate=-1: expected a number"),
        ("script.fit.epochs, script.fits.x, my.script.fit.x", "fit.epochs, script.fits.x, my.script.fit.x"),
    ],
)
def test_messages_have_the_typed_keys(text: str, shown: str) -> None:
    assert show_keys(text) == shown


CONFIG = {"script": {"path": "train.py", "typed": ["seed"]}}


def test_words_of_rerun_are_those_of_the_script(here: Path) -> None:
    words = ["script.EPOCHS=4", "optimizer.learning_rate=0.5", "precision=mixed", "tracking=none"]
    assert translate_rerun(CONFIG, "", words) == [
        "++script.constants.EPOCHS=4",
        "script.compiled_rate=0.5",
        "precision=mixed",
        "tracking=none",
        "script.typed=[seed,precision]",
    ]
    with pytest.raises(ConfigError, match=r"model.units=3: train.py decides this itself"):
        translate_rerun(CONFIG, "", ["model.units=3"])


def test_a_rerun_without_its_script_says_where_the_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"train.py: there is no such file, .* type cd '/a b', and rerun it there"):
        translate_rerun(CONFIG, "/a b", [])
    assert translate_rerun({"script": {"path": None, "in_process": True}}, "", ["seed=3"]) == ["seed=3"]


def test_the_processes_of_the_run_run_the_script(here: Path) -> None:
    plan = make_plan(compose_config(translate_file_word(["train.py", "tracking=none", "--", "a b", "it's"])))
    assert plan.of(ScriptOptions).arguments == ["a b", "it's"]
    assert make_spec(plan, here / "run", 0.0, ()).task == RunScript()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("train.py script.EPOCH=3", "did you mean script.EPOCHS?"),
        ("train.py fit.epoch=3", "did you mean fit.epochs?"),
        ("train.py fit.epochs=abc", "fit.epochs=abc: expected a whole number of at least 1, such as fit.epochs=10"),
        ("train.py fit.epochs=null", "fit.epochs=null: expected a whole number"),
        ("train.py fit.epochs=1.5", "fit.epochs=1.5: expected a whole number"),
        ("train.py fit.batch_size=0", "fit.batch_size=0: expected a whole number of at least 1, or null"),
        ("train.py fit.initial_epoch=-1", "a whole number of at least 0"),
        ("train.py fit.initial_epoch=3 fit.epochs=3", "use fit.epochs=4 or more"),
        ("train.py fit.validation_split=2", "expected a number of at least 0 and below 1"),
        ("train.py fit.shuffle=maybe", "fit.shuffle=maybe: expected true or false"),
        ("train.py fit.validation_freq=[1,0]", "a whole number of at least 1, or a list of epochs"),
        ("train.py fit.steps_per_epoch=true", "fit.steps_per_epoch=true: expected a whole number"),
        ("train.py strategy=parameter_server", "a script's model.fit cannot train on parameter servers"),
        ("train.py strategy=multi_worker cluster.workers=2", "does not work with several workers"),
        ("train.py debug.inline=true", "a script needs a process of its own"),
        ("train.py cluster=slurm cluster.workers=1 cluster.submit=print", "a script runs on this machine"),
    ],
)
def test_a_plan_that_no_script_can_have_is_refused(here: Path, typed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(compose_config(translate_file_word([*typed.split(), "tracking=none"])))


def test_values_that_fit_accepts_are_kept(here: Path) -> None:
    words = "fit.batch_size=null fit.epochs=4 fit.initial_epoch=3 fit.shuffle=false fit.validation_split=0"
    plan = make_plan(
        compose_config(translate_file_word(["train.py", "tracking=none", *words.split(), "fit.validation_freq=[1,3]"]))
    )
    assert read_fit_arguments(plan) == {
        "batch_size": None,
        "epochs": 4,
        "initial_epoch": 3,
        "shuffle": False,
        "validation_split": 0,
        "validation_freq": [1, 3],
    }


def test_the_script_and_its_modules_are_code_of_the_user(here: Path) -> None:
    from scaleflow.runs.code_digest import find_code

    composed = compose_config(translate_file_word(["train.py"]))
    assert list(find_code(composed.resolved, ())) == ["local_part.py", "train.py"]


def test_refusals_import_no_tensorflow(here: Path) -> None:
    """The words, the plan and the check of a script need none of the heavy packages."""
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from scaleflow.cli import main\n"
        "assert main(['train.py', 'script.EPOCH=3', 'tracking=none']) == 2\n"
        "assert not {'tensorflow', 'keras', 'mlflow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=here, check=True, timeout=300)
