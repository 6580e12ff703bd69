import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from scaleflow import __version__, cli
from scaleflow.__main__ import surely_trains
from scaleflow.cli import main
from scaleflow.commands.table import list_commands
from scaleflow.config.words import split_flags, split_overrides
from scaleflow.interfaces.features import list_option_files
from scaleflow.launcher import launch
from scaleflow.launcher.command_exit import Outcome
from scaleflow.launcher.prepare import PreparedRun
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.sweep import runner
from tests.conftest import Command
from tests.sweep.fake_runs import FakeLaunch
from tests.test_refusals import write_options


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one: empty but for a `conf` with mistakes and a plain file."""
    write_options(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("conf", "plain"))


@pytest.fixture
def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`refused("training.epochs=0")`: what the command prints in this process, where it must start nothing."""

    def start(*arguments: Any, **named: Any) -> int:
        raise AssertionError("started")

    def run(*words: str) -> str:
        monkeypatch.setattr(launch, "supervise_run", start)
        monkeypatch.setattr(sys, "argv", ["scaleflow"])
        code = main(words)
        shown = capsys.readouterr()
        assert code == 2, shown
        assert shown.out in ("", f"scaleflow {__version__}\n")  # the first line comes before the rules are checked
        assert "Traceback" not in shown.err
        assert left_in(folder) == []
        return shown.err

    return run


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    "word",
    [
        "tracking.uri=http://me:sesame@127.0.0.1:{port}",
        "tracking.uri=http://me:p@sesame@127.0.0.1:{port}",
        "tracking.uri=postgresql://me:se(same@h/db",
        "tracking.uri=http://me:sesame@h,b",
        "tracking.uri=[http://me:sesame@h]",
        "tracking=http://me:sesame@h",
        "seed=http://me:sesame@h",
        "tracking.uri=http://me:sesame@h${{",
        "+tracking.password=sesame",
        "tracking.password=sesame",
        "+password=[sesame",
        "seed={{password: sesame}}",
    ],
)
def test_a_password_is_not_shown(refused: Callable[..., str], word: str) -> None:
    message = refused(word.format(port=free_port()))
    assert "sesame" not in message
    assert "se(same" not in message


def test_help_is_a_page_that_lists_every_group_with_its_options(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scaleflow"])
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    conf = Path(cli.__file__).parent.parent / "conf"
    groups = [path for path in conf.iterdir() if path.is_dir() and path.name not in ("hydra", "__pycache__")]
    assert len(groups) >= 10
    for group in groups:
        options = ", ".join(path.stem for path in list_option_files(group.name))
        assert f"{group.name}: {options}" in lines
    for command in list_commands().values():
        assert f"  {command.group}" in lines
        assert f"    scaleflow {command.name:<10} {command.about}" in lines
    assert len(lines) < 75
    listed = ("dataset: ", "experiment: ", "optimizer: ")  # options in a line by Hydra, however many there are
    assert max(len(line) for line in lines if not line.startswith(listed)) <= 120
    assert not re.search(r"\$\{|\$[A-Z]", "\n".join(lines))
    assert left_in(folder) == []


@pytest.mark.parametrize(
    "words",
    [
        ("hydra.run.dir={}/exp/a", "training.epochs=0"),
        ("-m", "hydra.sweep.dir={}/exp/a", "training.epochs=0,-1"),
    ],
    ids=["run", "sweep"],
)
def test_a_refused_command_removes_only_folders_that_it_created(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scaleflow"])
    (folder / "data" / "theirs").mkdir(parents=True)
    for place in ("data", "data/theirs", "new"):
        assert main([word.format(folder / place) for word in words]) == 2
        found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir())
        assert [path for path in found if path != "conf" and "conf/" not in path] == ["data", "data/theirs"]


def test_version_is_scaleflows_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"scaleflow {version('scaleflow')}\n"
    assert left_in(folder) == []


def test_cfg_shows_the_config_and_runs_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scaleflow"])
    assert main(["--cfg", "job", "model=cnn", "training.epochs=3"]) == 0
    shown = capsys.readouterr().out
    assert "filters:" in shown
    assert "epochs: 3" in shown
    assert left_in(folder) == []


# ---------------------------------------------------------------------------------------------
# What is launched
# ---------------------------------------------------------------------------------------------


def test_a_good_command_is_launched_once_with_its_plan_and_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[PreparedRun] = []

    def launch_run(run: PreparedRun) -> Outcome:
        runs.append(run)
        return Outcome(7)

    monkeypatch.setattr(launch, "launch_run", launch_run)
    monkeypatch.setattr(sys, "argv", ["scaleflow"])
    before = time.time()
    assert main(["model=cnn", "training.epochs=3"]) == 7
    (run,) = runs
    plan, run_folder = run.spec.plan, run.spec.folder
    assert plan.training.epochs == 3
    assert plan.choices["model"] == "cnn"
    assert plan.choices["strategy"] == "auto"
    assert set(plan.choices) >= {"strategy", "hardware", "precision", "dataset", "model", "optimizer", "training"}
    assert "experiment" not in plan.choices
    assert str(folder) in plan.search
    assert run.composed.raw["dataset"]["_target_"] == "scaleflow.dataset.digits.Digits"
    assert run.composed.words.overrides == ["model=cnn", "training.epochs=3"]
    assert run.resume_number == 0
    assert run_folder.is_dir()
    assert run_folder.is_absolute()
    assert run_folder.is_relative_to(folder / "outputs")
    assert before - 1 < run.spec.started <= time.time()


def test_the_folder_of_config_dir_is_searched_for_targets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    (folder / "conf" / "mine.py").write_text("def build(inputs, outputs, width):\n    pass\n")
    monkeypatch.setattr(launch, "launch_run", lambda run: plans.append(run.spec.plan) or Outcome())
    monkeypatch.setattr(sys, "argv", ["scaleflow"])
    assert main(["--config-dir", "conf", "model=mine", "+model.width=3"]) == 0
    assert plans[0].model.target.path == "mine.build"
    assert plans[0].model.target.arguments == {"width": 3}
    assert str(folder / "conf") in [str(Path(place).absolute()) for place in plans[0].search]


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "precision=float32,mixed", "training.epochs=2"),
        ("training.epochs=2", "-m", "precision=float32,mixed"),
        ("training.epochs=2", "precision=float32,mixed", "--multirun"),
    ],
)
def test_options_and_keys_are_swept_together_wherever_the_flag_stands(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]
) -> None:
    fake = FakeLaunch()
    monkeypatch.setattr(runner, "launch_run", fake)
    monkeypatch.setattr(sys, "argv", ["scaleflow"])
    monkeypatch.setenv(SERVER_ENV, "nobody forks here")
    assert main((*words, "tracking=none")) == 0
    assert [(plan.precision.name, plan.training.epochs) for plan in fake.plans] == [("float32", 2), ("mixed", 2)]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["a=1", "-m", "b=2"], ["-m", "a=1", "b=2"]),
        (["a=1", "--config-dir", "conf", "b=2"], ["--config-dir", "conf", "a=1", "b=2"]),
        (["a=1", "--config-dir=conf"], ["--config-dir=conf", "a=1"]),
        (["a=1", "--cfg"], ["--cfg", "a=1"]),
        (["~a"], ["~a"]),
    ],
)
def test_flags_come_first_with_their_values(words: list[str], wanted: list[str]) -> None:
    flags, overrides = split_flags(words)
    assert [*flags, *overrides] == wanted


@pytest.mark.parametrize(
    ("words", "split"),
    [
        ([], []),
        (["a=1", "-m"], ["a=1", "-m"]),
        (["--overrides", "a=1 b=2"], ["a=1", "b=2"]),
        (["--overrides", ""], []),
        (["--overrides", "name='two words' b=2"], ["name=two words", "b=2"]),
        (["x=0", "--overrides", "a=1", "y=2"], ["x=0", "a=1", "y=2"]),
        (["a=1", "--overrides"], ["a=1", "--overrides"]),
    ],
)
def test_single_word_of_mlflow_is_split(words: list[str], split: list[str]) -> None:
    assert split_overrides(words) == split


# ---------------------------------------------------------------------------------------------
# The real command
# ---------------------------------------------------------------------------------------------

HEAVY = {"tensorflow", "keras", "mlflow", "sklearn", "pandas", "jax", "torch"}

NOTHING_HEAVY = f"""
import sys
from scaleflow.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as leaving:
    code = leaving.code
heavy = {HEAVY!r} & set(sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else code)
"""


QUICK: Mapping[tuple[str, ...], tuple[int, str]] = {
    ("--help",): (0, ""),
    ("--cfg", "job"): (0, ""),
    ("--cfg", "job", "model=cnn", "experiment=digits_mirrored"): (0, ""),
    ("strategy=miror",): (2, "strategy=miror"),
    ("strategy=tpu",): (2, "strategy=tpu"),
    ("training.epoch=3",): (2, "training.epoch"),
    ("+foo=1",): (2, "foo"),
    ("training.epochs=abc",): (2, "training.epochs=abc"),
    ("hardware=cpu", "hardware.memory_limit_mb=100"): (2, "hardware.memory_limit_mb=100"),
    ("tracking.uri=http://me:sesame@127.0.0.1:{port}",): (2, "tracking.uri=http://****@127.0.0.1:{port}"),
    ("hydra.run.dir=plain/x",): (2, "hydra.run.dir=plain/x"),
    ("training.epochs=[1",): (2, "training.epochs=[1"),
    ("training.epochs=1,2",): (2, "training.epochs=1,2"),
    ("--config-dir", "nowhere"): (2, "nowhere"),
    ("-m", "strategy=mirrored,miror"): (2, "miror"),
    ("--frobnicate",): (2, "--frobnicate"),
    ("evalute",): (2, "did you mean evaluate?"),
}


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_an_answer_imports_nothing_heavy(command: Command, words: tuple[str, ...]) -> None:
    (command.folder / "plain").write_text("")
    port = free_port()
    code, message = QUICK[words]
    arguments = [word.format(port=port) for word in words]
    done = command.python("-c", NOTHING_HEAVY, *arguments)
    assert done.returncode == code, done.stderr
    assert message.format(port=port) in done.stderr
    assert "Traceback" not in done.stderr
    assert "sesame" not in done.stderr + done.stdout
    assert left_in(command.folder) == []


@pytest.mark.parametrize(
    ("words", "unbuffered"), [("scaleflow --help", ""), ("scaleflow --help", "1"), ("scaleflow sync --help", "")]
)
def test_a_closed_standard_output_ends_an_answer_quietly(command: Command, words: str, unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {**command.environment, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [sys.executable, "-m", *words.split()], env=environment, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [("--cfg", "job"), ("--help",), ("training.epochs=abc",)], ids=" ".join)
def test_python_m_imports_nothing_heavy_either(command: Command, words: tuple[str, ...]) -> None:
    done = command.python("-X", "importtime", "-m", "scaleflow", *words)
    assert done.returncode == (2 if words == ("training.epochs=abc",) else 0)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "hydra" in imported
    assert not imported & HEAVY


@pytest.mark.parametrize(
    ("words", "trains"),
    [
        ((), True),
        (("model=cnn", "training.epochs=3", "hydra/launcher=isolated", "-m"), True),
        (("--cfg", "job"), False),
        (("--help",), False),
        (("evaluate", "--json"), False),
        (("--config-dir", "own", "model=mine"), False),
        (("cluster=slurm", "cluster.submit=print"), False),
        (("experiment=mine",), False),
        (("+experiment=mine",), False),
    ],
)
def test_a_command_that_may_print_something_else_has_its_first_line_later(words: Sequence[str], trains: bool) -> None:
    assert surely_trains(words) is trains


def heed_sigint() -> None:
    """A shell's background job ignores SIGINT, and so would all processes that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("until", ["scaleflow ", "importing TensorFlow"])
def test_ctrl_c_during_the_imports_ends_the_command_in_a_line(command: Command, until: str) -> None:
    environment = {key: value for key, value in command.environment.items() if key != SERVER_ENV}
    words = [*command.arguments("tracking=none", "training.epochs=100000")]
    with subprocess.Popen(
        words, cwd=command.folder, env=environment, stdout=PIPE, stderr=PIPE, text=True, preexec_fn=heed_sigint
    ) as process:
        try:
            assert process.stdout is not None
            while until not in (line := process.stdout.readline()):
                assert line
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=240)
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, "scaleflow: stopped by SIGINT\n")
    assert left_in(command.folder) == []


def test_an_unreachable_server_costs_seconds(command: Command) -> None:
    done = command(f"tracking.uri=http://127.0.0.1:{free_port()}", timeout=150)  # MLflow's retries take minutes
    assert done.returncode == 2
    assert left_in(command.folder) == []


#: Refused by the worker or by the store, before there is a run.
REFUSED_LATER: Mapping[tuple[str, ...], str] = {
    (
        "+model.width=3",
    ): "model.width=3: scaleflow.model.mlp.build has no such argument; it accepts units, dropout, batch_norm",
    ("tracking.uri=ftp://me:sesame@host/x",): "tracking.uri=ftp://****@host/x: ",
}


@pytest.mark.parametrize("words", REFUSED_LATER, ids=" ".join)
def test_late_refusals_look_like_early_ones(command: Command, words: tuple[str, ...]) -> None:
    done = command(*words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"scaleflow: {REFUSED_LATER[words]}")
    assert len(done.stderr.splitlines()) <= 2
    assert "sesame" not in done.stderr + done.stdout
    assert not list(command.folder.glob("outputs/*/*"))


@pytest.mark.slow
def test_a_refusal_leaves_a_store_that_the_next_command_can_use(command: Command) -> None:
    assert command("+model.width=3").returncode == 2
    done = command("training.epochs=1", "training.max_steps=2", "dataset.limit=64")
    assert done.returncode == 0, done.stderr
