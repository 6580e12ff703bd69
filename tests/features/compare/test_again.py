"""`rerun --exact`, `--checkout` and `diff` on runs that were really trained, in a repository with planted secrets."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tests.processes import call
from tests.runs.test_provenance import commit_all, git, write

NETS = """
import keras

from parts import units


def build(inputs, outputs):
    given = {name: keras.Input(each.shape, name=name) for name, each in inputs.items()}
    hidden = keras.layers.Dense(units.UNITS, activation="relu")(keras.layers.Concatenate()(list(given.values())))
    return keras.Model(given, keras.layers.Dense(1)(hidden))
"""

FILES = {
    "exp/nets.py": NETS,
    "exp/parts/__init__.py": "",
    "exp/parts/units.py": "UNITS = 4\n",
    "exp/own/model/mine.yaml": "_target_: nets.build\n_partial_: true\n",
    "readme.md": "a\n",
    "old.py": "",
}

#: Changes that are not committed, with secrets.
CHANGES = {
    "exp/parts/units.py": 'UNITS = 5\nAPI_KEY = "planted-in-a-module"\n',
    "notes.yaml": "password: planted-in-a-new-file\n",
    "readme.md": "a\nplanted-in-the-environment\n",
    ".env": "TOKEN=planted-in-an-env-file\n",
}

DATA = ("dataset=table", "dataset.data_dir=data/house.csv", "dataset.target=price", "dataset.kind=regression")

WORDS = ("model=mine", *DATA, "training.epochs=2", "evaluation.importance=0", "hardware=cpu", "debug=inline")


def write_table(path: Path, first: int = 1000) -> None:
    rows = [(20 + n % 50, first if n == 0 else 1000 + 7 * n, n % 90) for n in range(200)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("age,income,price\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))


@contextlib.contextmanager
def fresh_modules() -> Iterator[None]:
    """As in a new process: the user's modules are imported anew, and nothing is left in the path."""
    path = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.partition(".")[0] in ("nets", "parts")]:
            del sys.modules[name]


def run_and_repeat(folder: str) -> dict[str, Any]:
    """What the commands say about a run before and after its code, packages and data change."""
    import scaleflow
    from scaleflow.features.compare import diff, rerun

    root, told = Path(folder, "repository"), dict[str, Any]()
    root.mkdir()
    os.environ |= {"GIT_CEILING_DIRECTORIES": folder, "MY_API_TOKEN": "planted-in-the-environment"}
    os.environ["TF_MY_PASSWORD"] = "planted-for-tensorflow"
    git(root, "init")
    write(root, FILES)
    commit_all(root)
    write(root, CHANGES)
    (root / "old.py").unlink()
    write_table(root / "exp/data/house.csv")
    os.chdir(root / "exp")

    def say(name: str, command: Callable[[list[str]], int], *words: str) -> None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), fresh_modules():
            code = command([*words])
        told[name] = code, printed.getvalue()

    with contextlib.redirect_stdout(io.StringIO()), fresh_modules():
        first = scaleflow.run(*WORDS, config_dir="own", folder="first")
    run_id = first.run_id or ""
    exact = ("--exact", "--trust", "nets", "--config-dir", "own")
    say("same", rerun.main, run_id, *exact, "hydra.run.dir=same", "--json")
    git(root, "add", "exp/parts", "notes.yaml", "readme.md")
    git(root, "commit", "-m", "second")
    write(root, {"exp/parts/units.py": "UNITS = 6\n", "readme.md": "b\n"})
    say("code", rerun.main, run_id, *exact)
    say("untrusted", rerun.main, run_id, "--exact", "--checkout", "../../copy")
    trusted = ("--exact", "--trust", "nets", "--checkout")
    say("checkout", rerun.main, run_id, *trusted, "../../copy", "hydra.run.dir=copied")
    say("despite", rerun.main, run_id, *exact, "--despite", "code", "hydra.run.dir=despite")
    say("diff", diff.main, "first", "despite")
    say("json", diff.main, run_id, "despite", "--json")
    shutil.rmtree("despite/provenance")
    say("no record", diff.main, "first", "despite")
    write_table(Path("data/house.csv"), first=1001)
    say("data", rerun.main, run_id, *exact)
    write_table(Path("moved/house.csv"))
    say("other config", rerun.main, run_id, *exact, "training.epochs=3")
    say("wrong category", rerun.main, run_id, *exact, "--despite", "codes")
    say("not exact", rerun.main, run_id, "--despite", "code")
    package = Path(folder, "site", "planted_tool.dist-info")
    write(package, {"METADATA": "Metadata-Version: 2.1\nName: planted-tool\nVersion: 1.0\n"})
    sys.path.append(str(package.parent))
    say("package", rerun.main, run_id, *exact)
    shutil.rmtree("first")  # what the store has is enough
    shutil.move(root / ".git", root / "git")
    moved = ("--despite", "packages", "dataset.data_dir=moved/house.csv", "hydra.run.dir=stored")
    say("store", rerun.main, run_id, *trusted, "../../kept", *moved)
    told["comparison"] = scaleflow.compare_runs("copied", run_id).code
    told["planted"] = list(find_planted(Path.cwd(), Path(folder, "copy"), Path(folder, "kept")))
    told["record"] = json.loads(Path("copied/provenance/record.json").read_text())["states"]
    return told


def find_planted(*folders: Path) -> Iterator[str]:
    """Yields the files of runs, of the store and of checkouts that have a planted secret."""
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        is_source = path.parent.name in ("exp", "parts") and "provenance" not in path.parts and "copy" not in path.parts
        if b"planted-" in path.read_bytes().replace(b"planted-tool", b"") and not is_source:
            yield str(path)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = call(run_and_repeat, str(tmp_path_factory.mktemp("again")))
    return found


def test_the_same_run_again_has_equal_bits(told: dict[str, Any]) -> None:
    code, text = told["same"]
    assert code == 0, text
    lines = text.splitlines()
    assert {"code: the same", "packages: the same", "data: the same", "machine: the same"} <= set(lines)
    result = json.loads(lines[-1])["reproduces"]
    assert (result["text"], result["is_equal"], result["weights"]) == ("equal bits", True, "equal")
    assert result["points"] > 10


def test_changed_code_data_and_packages_are_refused_by_name(told: dict[str, Any]) -> None:
    code, text = told["code"]
    assert code == 2
    assert "code: parts/units.py changed; without effect: readme.md changed\n" in text
    assert "scaleflow: --exact: what the run was made of is not what is here: code: parts/units.py changed\n" in text
    assert "add --despite code to run all the same, or --checkout DIR for the code of the run" in text
    code, text = told["data"]
    assert (code, "data: house.csv changed" in text) == (2, True)
    code, text = told["package"]
    assert (code, "packages: planted-tool is new" in text) == (2, True)
    assert "--exact repeats a run with its own config" in told["other config"][1]
    assert "--despite codes: expected code, packages, data, machine; did you mean code?" in told["wrong category"][1]
    assert "--despite: works with --exact only; add --exact" in told["not exact"][1]


def test_code_that_differs_gives_the_first_step_that_differs(told: dict[str, Any]) -> None:
    code, text = told["despite"]
    assert code == 1, text
    assert "reproduces  differs from step 1 on: train/" in text
    assert "weights: differ" in text


def test_the_code_of_a_run_is_checked_out_and_gives_equal_bits(told: dict[str, Any]) -> None:
    code, text = told["untrusted"]
    assert (code, "this code is not trusted" in text) == (2, True)
    code, text = told["checkout"]
    assert code == 0, text
    assert "note: secrets are masked in parts/units.py" in text
    assert "reproduces  equal bits" in text
    code, text = told["store"]
    assert code == 0, text
    assert "is not here; the copies of the modules are used" in text
    assert "data: the same" in text.splitlines(), "it was moved to another folder"
    assert "reproduces  equal bits" in text


def test_diff_shows_the_edited_lines_and_what_came_of_them(told: dict[str, Any]) -> None:
    code, text = told["diff"]
    assert code == 0, text
    assert "\n-UNITS = 5\n" in text
    assert "\n+UNITS = 6\n" in text
    assert "\npackages: the same\n" in text
    assert "40 test examples, paired" in text
    result = json.loads(told["json"][1].splitlines()[-1])
    assert [each["name"] for each in result["code"]] == ["parts/units.py", "commit"]
    assert result["config"]["resolved.parameters"] == ["21", "25"]
    loss = next(each for each in result["results"] if each["name"] == "test/mae")
    assert loss["difference"] == pytest.approx(loss["now"] - loss["before"])
    code, text = told["no record"]
    assert code == 0
    assert "code: not known; the second run has no record of it" in text
    assert "data: the same" in text
    assert [each.name for each in told["comparison"]] == ["parts/units.py", "commit"]


def test_no_secret_is_in_a_folder_or_in_the_store(told: dict[str, Any]) -> None:
    assert told["planted"] == []
    (state,) = told["record"]
    assert state["variables"]["TF_MY_PASSWORD"] == "****"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("strategy=mirrored", "hardware.logical_devices=2"),
        ("strategy=multi_worker", "cluster.workers=2"),
        ("strategy=pipeline", "hardware.logical_devices=2"),
        ("strategy=one_device", "training.engine=fit", "precision=mixed"),
    ],
    ids=" ".join,
)
def test_every_synchronous_strategy_gives_equal_bits(words: tuple[str, ...], command: Command) -> None:
    ended = command("hardware=cpu", "training.epochs=2", "hydra.run.dir=first", *words)
    assert ended.returncode == 0, ended.stderr
    again = command.python("-m", "scaleflow", "rerun", "first", "--exact")
    assert again.returncode == 0, again.stderr
    assert "reproduces  equal bits" in again.stdout
    assert "weights: equal" in again.stdout


@pytest.mark.slow  # comparison/test_exact.py has the rule
def test_an_asynchronous_run_is_refused_with_the_reason(command: Command) -> None:
    words = ("strategy=parameter_server", "cluster.workers=1", "training.max_steps=3")
    ended = command("hardware=cpu", "hydra.run.dir=first", *words)
    assert ended.returncode == 0, ended.stderr
    again = command.python("-m", "scaleflow", "rerun", "first", "--exact")
    assert again.returncode == 2
    assert "no run repeats one with strategy=parameter_server exactly: its workers update the weights" in again.stderr
