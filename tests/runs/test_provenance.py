"""Where a run comes from, as its tags say it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scaleflow.runs import RunFolder, provenance
from scaleflow.runs.provenance import collect_git_tags, command_line, find_script, read_provenance, write_provenance


def git(folder: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "init.defaultBranch=trunk"]
    done = subprocess.run(["git", *own, *words], cwd=folder, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def test_git_tells_of_the_commit_the_branch_the_origin_and_what_was_changed(repository: Path) -> None:
    assert collect_git_tags() == {}
    git(repository, "init")
    assert collect_git_tags() == {}, "no commit yet"
    (repository / "code.py").write_text("x = 1\n")
    git(repository, "add", "code.py")
    git(repository, "commit", "-m", "first")
    git(repository, "remote", "add", "origin", "https://me:hunter2@example.com/a.git")
    commit = git(repository, "rev-parse", "HEAD")
    clean = {
        "mlflow.source.git.commit": commit,
        "mlflow.source.git.branch": "trunk",
        "mlflow.source.git.repoURL": "https://****@example.com/a.git",
        "mlflow.source.git.dirty": "false",
    }
    (repository / "outputs").mkdir()
    (repository / "outputs" / "a.log").write_text("")  # what git does not know of is no change
    assert collect_git_tags() == clean
    (repository / "code.py").write_text("x = 2\n")
    assert collect_git_tags() == {**clean, "mlflow.source.git.dirty": "true"}


def test_without_git_or_with_a_slow_one_there_is_silence(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = repository / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 20\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:/usr/bin:/bin")
    monkeypatch.setattr(provenance, "GIT_SECONDS", 0.05)
    assert collect_git_tags() == {}
    monkeypatch.setenv("PATH", str(repository))
    assert collect_git_tags() == {}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/usr/bin/python", "-m", "scaleflow", "seed=1"], "python -m scaleflow seed=1"),
        (["python", "-m", "scaleflow", "model.api_key=hunter2"], "python -m scaleflow 'model.api_key=****'"),
        (["python", "-m", "scaleflow", "--overrides", "seed=1 model.token=hunter2"], "model.token=****"),
        (["python", "-m", "scaleflow", "tracking.uri=http://me:hunter2@host"], "tracking.uri=http://****@host"),
        (["python", "-m", "scaleflow.sync", "http://me:hunter2@host/x"], "http://****@host/x"),
        (["python", "-c", "run('model.api_key=hunter2')"], "python -c ..."),
    ],
)
def test_the_command_is_shown_without_its_secrets(words: list[str], shown: str) -> None:
    line = command_line(words)
    assert shown in line
    assert "hunter2" not in line


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["python", "train.py", "a.py"], "train.py"),
        (["python", "-u", "train.py"], "train.py"),
        (["python", "-m", "scaleflow", "x.py"], None),
        (["python", "-c", "1"], None),
        (["python"], None),
    ],
)
def test_a_script_is_the_source(words: list[str], script: str | None) -> None:
    assert find_script(words) == script


def test_it_is_kept_once_with_what_is_added(repository: Path) -> None:
    assert read_provenance(repository) == {}
    write_provenance(repository, {"scaleflow.rerun_of": "abc"})
    kept = read_provenance(repository)
    assert kept["scaleflow.rerun_of"] == "abc"
    assert kept["scaleflow.version.python"] == sys.version.split()[0]
    assert {f"scaleflow.version.{name}" for name in ("scaleflow", "tensorflow", "keras", "mlflow")} <= set(kept)
    assert {"scaleflow.host", "scaleflow.command"} <= set(kept)
    write_provenance(repository, {"scaleflow.rerun_of": "another"})
    assert read_provenance(repository) == kept
    RunFolder(repository).provenance.write_text("{half")
    assert read_provenance(repository) == {}
    RunFolder(repository).provenance.write_text(json.dumps([1]))
    assert read_provenance(repository) == {}
