"""What a run is made of: git's part, the tags, the packages and the record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.runs import RunFolder, RunSpec
from scaleflow.runs.identity import Difference, compare, compare_known, list_unknown
from scaleflow.runs.provenance import collect
from scaleflow.runs.provenance import git as git_reader
from scaleflow.runs.provenance.collect import LaunchFacts, collect_changes, record_provenance
from scaleflow.runs.provenance.git import find_patched_path, make_patch, read_git, split_patch
from scaleflow.runs.provenance.machine import describe_origin, list_packages, list_relevant_variables, read_package
from scaleflow.runs.provenance.record import (
    CodeRecord,
    Provenance,
    read_states,
    write_data_state,
    write_launch_state,
)
from scaleflow.runs.provenance.tags import (
    command_line,
    find_script,
    make_git_tags,
    make_run_tags,
    read_run_tags,
    write_run_tags,
)
from scaleflow.worker.tasks import TrainModel

OWN = (
    *("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "init.defaultBranch=trunk"),
    *("-c", "protocol.file.allow=always"),
)


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *OWN, *words], cwd=folder, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def commit_all(folder: Path, message: str = "first") -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def test_git_tells_of_the_commit_the_branch_the_origin_and_what_was_changed(repository: Path) -> None:
    assert read_git(repository) is None
    assert make_git_tags(None) == {}
    git(repository, "init")
    assert read_git(repository) is None, "no commit yet"
    write(repository, {"code.py": "x = 1\n"})
    commit = commit_all(repository)
    git(repository, "remote", "add", "origin", "https://me:hunter2@example.com/a.git")
    clean = {
        "mlflow.source.git.commit": commit,
        "mlflow.source.git.branch": "trunk",
        "mlflow.source.git.repoURL": "https://****@example.com/a.git",
        "mlflow.source.git.dirty": "false",
    }
    write(repository, {"new.txt": ""})  # tags tell of tracked files only
    assert make_git_tags(read_git(repository)) == clean
    write(repository, {"code.py": "x = 2\n"})
    assert make_git_tags(read_git(repository)) == {**clean, "mlflow.source.git.dirty": "true"}
    git(repository, "checkout", "--detach")
    state = read_git(repository)
    assert state is not None
    assert (state.branch, state.commit) == ("HEAD", commit)


def test_a_patch_restores_changed_and_new_files_and_names_what_it_lacks(repository: Path) -> None:
    git(repository, "init")
    files = {"sub/code.py": "x = 1\n", "old.py": "gone\n", "tool.sh": "run\n", ".gitignore": "*.log\nignored/\n"}
    write(repository, files)
    commit = commit_all(repository)
    changed = {
        "sub/code.py": 'x = 2\nAPI_KEY = "planted-secret"\n',
        "sub/my file é.py": "y = 1\n",
        "fresh/deep/new.py": "z = 1",  # no line break at the end
        "fresh/a.log": "ignored\n",
        "fresh/empty.txt": "",
        "secrets/.env": "TOKEN=planted-secret\n",
        "secrets/deploy.pem": "planted-secret\n",
        "mlflow.db": "store",
        "mlartifacts/1/x": "",
        "runs/a/events.jsonl": "{}",
        "runs/a/worker-0.log": "",
        "venv/pyvenv.cfg": "",
        "venv/lib.py": "",
        "other/.git/HEAD": "",
        "other/x.py": "",
    }
    write(repository, changed)
    (repository / "old.py").unlink()
    (repository / "tool.sh").chmod(0o755)
    (repository / "image.bin").write_bytes(bytes(range(256)))
    (repository / "large.txt").write_text("a line\n" * 200_000)
    state = read_git(repository / "sub")
    assert state is not None
    assert state.root == repository
    names = {"sub/code.py", "sub/my file é.py", "fresh/deep/new.py", "fresh/empty.txt", "tool.sh"}
    left_out = {
        "secrets/.env": "it looks like a secret",
        "secrets/deploy.pem": "it looks like a secret",
        "image.bin": "binary",
        "large.txt": "too large",
    }
    assert set(state.changed) == {*names, *left_out, "old.py"}
    assert state.changed["old.py"] == "gone"
    changes = collect_changes(state)
    assert changes.left_out == left_out
    assert {find_patched_path(section) for section in split_patch(changes.patch)} == names
    assert "planted" not in changes.patch
    assert set(changes.digests) == set(state.changed) - {"secrets/.env", "secrets/deploy.pem"}
    assert changes.digests["old.py"] == "gone"

    git(repository, "worktree", "add", "--detach", str(repository / "ignored/copy"), commit)
    copy = repository / "ignored/copy"
    subprocess.run(["git", "apply"], cwd=copy, input=os.fsencode(changes.patch), check=True, timeout=120)
    assert (copy / "sub/code.py").read_text() == 'x = 2\nAPI_KEY = "****"\n'
    assert (copy / "sub/my file é.py").read_text() == "y = 1\n"
    assert (copy / "fresh/deep/new.py").read_text() == "z = 1"
    assert (copy / "fresh/empty.txt").read_text() == ""
    assert os.access(copy / "tool.sh", os.X_OK)
    assert git(repository, "status", "--porcelain", "--", "fresh") == "?? fresh/", "the index is as it was"


def test_git_follows_submodules_and_ignores_configured_programs(repository: Path, tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for folder in (inner, outer):
        folder.mkdir()
        git(folder, "init")
        write(folder, {"code.py": "x = 1\n"})
        commit_all(folder)
    git(outer, "submodule", "add", str(inner), "libs/inner")
    commit_all(outer)
    clean = read_git(outer)
    assert clean is not None
    assert not clean.changed
    write(outer, {"libs/inner/code.py": "x = 2\n", "libs/inner/new.py": "", ".git/hooks/post-index-change": "exit 1"})
    for key, value in (("diff.external", "false"), ("diff.noprefix", "true"), ("core.fsmonitor", "touch spy")):
        git(outer, "config", key, value)
    state = read_git(outer)
    assert state is not None
    assert state.changed == {"libs/inner/code.py": "changed", "libs/inner/new.py": "new"}
    assert state.submodules == {"libs/inner": git(inner, "rev-parse", "HEAD")}
    patch, _ = make_patch(state)
    assert "+++ b/libs/inner/code.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n" in patch
    assert not (outer / "spy").exists()


def test_a_large_patch_is_cut_by_whole_files(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(repository, "init")
    write(repository, {"a": ""})
    commit_all(repository)
    write(repository, {f"file{n:04}.txt": f"{n}\n" * (20 + n) for n in range(1200)})
    monkeypatch.setattr(git_reader, "PATCH_BYTES", 50_000)
    state = read_git(repository)
    assert state is not None
    changes = collect_changes(state)
    assert 40_000 < len(changes.patch) <= 50_000
    assert len(changes.digests) == 1001
    assert len([name for name in changes.digests if name.startswith("200 more files of ")]) == 1
    reasons = set(changes.left_out.values())
    assert reasons == {"the changes are too large", "the patch is too large"}
    assert changes.left_out["500 more files"] == "the changes are too large"


def test_without_git_or_with_a_slow_one_there_is_silence(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = repository / "bin" / "git"
    write(repository, {"bin/git": "#!/bin/sh\nexec sleep 20\n"})
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:/usr/bin:/bin")
    monkeypatch.setattr(git_reader, "GIT_SECONDS", 0.05)
    assert read_git(repository) is None
    write(repository, {"bin/git": "#!/bin/sh\necho fatal: detected dubious ownership >&2\nexit 128\n"})
    monkeypatch.setattr(git_reader, "GIT_SECONDS", 5.0)
    assert read_git(repository) is None
    monkeypatch.setenv("PATH", str(repository))
    assert LaunchFacts().read_git() is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/usr/bin/python", "-m", "scaleflow", "seed=1"], "python -m scaleflow seed=1"),
        (["python", "-m", "scaleflow", "model.api_key=hunter2"], "python -m scaleflow 'model.api_key=****'"),
        (["python", "-m", "scaleflow", "--overrides", "seed=1 model.token=hunter2"], "model.token=****"),
        (["python", "-m", "scaleflow", "tracking.uri=http://me:hunter2@host"], "tracking.uri=http://****@host"),
        (["python", "-m", "scaleflow", "sync", "http://me:hunter2@host/x"], "http://****@host/x"),
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


def test_tags_are_kept_once_with_what_is_added(repository: Path) -> None:
    facts = LaunchFacts()
    assert read_run_tags(repository) == {}
    write_run_tags(repository, make_run_tags(facts.read_git(), facts.packages) | {"scaleflow.rerun_of": "abc"})
    kept = read_run_tags(repository)
    assert kept["scaleflow.rerun_of"] == "abc"
    assert kept["scaleflow.version.python"] == sys.version.split()[0]
    assert {f"scaleflow.version.{name}" for name in ("scaleflow", "tensorflow", "keras", "mlflow")} <= set(kept)
    assert {"scaleflow.host", "scaleflow.command"} <= set(kept)
    write_run_tags(repository, {"scaleflow.rerun_of": "another"})
    assert read_run_tags(repository) == kept
    RunFolder(repository).provenance.write_text("{half")
    assert read_run_tags(repository) == {}
    RunFolder(repository).provenance.write_text(json.dumps([1]))
    assert read_run_tags(repository) == {}


def test_packages_have_the_versions_of_their_metadata_and_lines_that_pip_reads(tmp_path: Path) -> None:
    found = list_packages()
    assert {dist.name: dist.version for dist in distributions()}.items() <= {
        name: each.version for name, each in found.items()
    }.items()
    lines = [each.requirement for each in found.values()]
    for line in lines:
        assert line.startswith("# ") or Requirement(line).name
    info = tmp_path / "tool.dist-info"
    write(tmp_path, {"tool.dist-info/METADATA": "Metadata-Version: 2.1\nName: my-tool\nVersion: 1.2+local\n\nName: x"})
    assert (plain := read_package(info)) is not None
    assert (plain.requirement, plain.identity) == ("my-tool==1.2+local", "1.2+local")
    origin = {"url": "https://me:hunter2@host/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    write(tmp_path, {"tool.dist-info/direct_url.json": json.dumps(origin)})
    assert (pinned := read_package(info)) is not None
    assert pinned.requirement == "my-tool @ git+https://****@host/r.git@abc"
    assert pinned.identity == "1.2+local (abc)"
    assert read_package(tmp_path) is None


def test_a_package_that_is_installed_for_editing_has_its_commit(repository: Path) -> None:
    origin = {"url": repository.as_uri(), "dir_info": {"editable": True}}
    assert describe_origin(origin) == ("", str(repository))
    git(repository, "init")
    write(repository, {"code.py": ""})
    commit = commit_all(repository)
    assert describe_origin(origin) == (commit, str(repository))
    git(repository, "remote", "add", "origin", "git@example.com:me/a.git")
    assert describe_origin(origin) == (f"git+ssh://git@example.com/me/a.git@{commit}", str(repository))


def test_variables_are_those_that_can_change_results() -> None:
    given = {
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "XLA_FLAGS": "--x",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_VAR_x": "1",
        "HOME": "/",
    }
    given |= {"PYTHONHASHSEED": "1", "PYTHONPATH": "x", "TF_API_KEY": "hunter2-planted"}
    assert list_relevant_variables(given) == {
        "PYTHONHASHSEED": "1",
        "TF_API_KEY": "****",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "XLA_FLAGS": "--x",
    }


CODE = CodeRecord(True, "1", {"nets.py": ["c1", "t1", "nets.py"], "a.py": ["c2", "t2", ""]}, "aaa", "trunk", "", {})
FIRST = Provenance(0, CODE, {"numpy": "2.1", "own": "1 (abc)"}, {"own": "/own"}, {"CPU": "x"}, {"XLA_FLAGS": "--x"})


def test_a_record_keeps_its_first_state_and_adds_others(tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    assert read_states(files) == []
    write_launch_state(files, FIRST)
    assert read_states(files) == [FIRST]
    write_data_state(files, 0, {"files": {"a.csv": ["all:1", 10, 1.5]}})
    first = replace(FIRST, data={"files": {"a.csv": ["all:1", 10, 1.5]}})
    assert read_states(files) == [first]
    write_data_state(files, 2, {"files": {}})
    write_launch_state(files, replace(FIRST, resume=3, packages={"numpy": "2.2"}))
    second = replace(FIRST, resume=2, data={"files": {}})
    assert read_states(files) == [first, second, replace(second, resume=3, packages={"numpy": "2.2"})]
    write_launch_state(files, replace(FIRST, resume=3))  # a command that died, and is repeated
    assert read_states(files)[2] == replace(second, resume=3)
    files.provenance_record.write_text('{"format": 2, "states": []}')
    with pytest.raises(ConfigError, match="it has the format 2, and this version reads up to 1"):
        read_states(files)
    files.provenance_record.write_text('{"format": 1, "states": [{"resume": 0}]}')
    with pytest.raises(ConfigError, match="this record of a run cannot be read"):
        read_states(files)


def test_where_the_repository_lies_and_whether_it_is_dirty_are_not_recorded(tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    write_launch_state(files, of_code(root=tmp_path, is_dirty=True))
    assert [each.code for each in read_states(files)] == [CODE]
    assert not {"root", "is_dirty"} & json.loads(files.provenance_record.read_text())["states"][0]["code"].keys()


def of_code(**values: Any) -> Provenance:
    return replace(FIRST, code=replace(CODE, **values))


@pytest.mark.parametrize(
    ("now", "found"),
    [
        (FIRST, {}),
        (of_code(modules={**CODE.modules, "a.py": ["c3", "t3", ""]}), {"a.py changed": True}),
        (of_code(modules={**CODE.modules, "a.py": ["c2", "t3", ""]}), {"a.py changed": False}),
        (of_code(modules={**CODE.modules, "a.py": ["c2", "t3", ""]}, version="2"), {"a.py changed": True}),
        (of_code(modules={"nets.py": CODE.modules["nets.py"]}), {"a.py is gone": True}),
        (of_code(commit="bbb"), {"commit aaa -> bbb": False}),
        (of_code(changed={"nets.py": "all:1", "x.md": "all:2"}), {"x.md changed": False}),
        (replace(FIRST, packages={**FIRST.packages, "numpy": "2.2"}), {"numpy 2.1 -> 2.2": True}),
        (replace(FIRST, packages={**FIRST.packages, "own": "1 (def)"}), {"own 1 (abc) -> 1 (def)": False}),
        (replace(FIRST, packages={**FIRST.packages, "own": "2 (abc)"}), {"own 1 (abc) -> 2 (abc)": True}),
        (replace(FIRST, packages={**FIRST.packages, "b": "1"}), {"b is new": True}),
        (replace(FIRST, machine={"CPU": "y"}, variables={}), {"CPU x -> y": True, "XLA_FLAGS --x -> none": True}),
        (replace(FIRST, packages={}, machine={}, code=CodeRecord()), {}),
    ],
)
def test_two_states_differ_in_named_things(now: Provenance, found: dict[str, bool]) -> None:
    assert {str(each): each.matters for each in compare_known(FIRST, now)} == found


def test_a_state_says_what_it_does_not_know() -> None:
    assert list_unknown(FIRST) == ["data"]
    assert list_unknown(Provenance()) == ["code", "packages", "data", "machine"]


def compare_data(before: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
    return compare(Provenance(data=before), Provenance(data=now), ("data",))


def test_data_is_compared_whatever_its_folder() -> None:
    before = {"files": {"data/a.csv": ["all:1", 3, 0], "data/b.csv": ["all:2", 3, 0]}}
    assert compare_data(before, {"files": {"/x/a.csv": ["all:1", 3, 9], "/x/b.csv": ["all:2", 3, 9]}}) == []
    now = {"files": {"a.csv": ["all:5", 3, 0], "c.csv": ["all:2", 3, 0]}}
    assert list(map(str, compare_data(before, now))) == ["a.csv changed", "b.csv is gone", "c.csv is new"]
    split = {"examples": 3, "digest": "a", "covers": "all", "version": 2}
    changes = compare_data({"splits": {"train": split}}, {"splits": {"train": {**split, "examples": 4}}})
    assert list(map(str, changes)) == ["train had 3 examples and has 4"]


MODEL = "import keras\nimport helper\n\ndef build(inputs, outputs):\n    return None\n"


@pytest.fixture
def record_run(plan: Callable[..., Plan], repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunSpec]:
    """Records what a run with the model `nets.build` is made of, which begins in a folder, or resumes."""
    write(repository, {"nets.py": MODEL, "helper.py": "API_KEY = 'planted'\n", "notes.txt": "a\n"})

    def record(folder: str, facts: LaunchFacts | None = None, resume: int = 0, **changes: Any) -> RunSpec:
        made = plan("tracking=none", *(["tracking.code=false"] if changes.pop("without_code", False) else []))
        config = {**made.config, "model": {"_target_": "nets.build"}}
        made = replace(made, config=config, search=[str(repository)], resume=folder if resume else None)
        spec = RunSpec(made, repository / folder, 0.0, TrainModel(), **changes)
        spec.folder.mkdir(exist_ok=True)
        (spec.folder / "record.lock").touch()
        for number in range(1, resume + 1):
            spec.files.resume_overrides(number).touch()
        record_provenance(spec, facts or LaunchFacts())
        return spec

    return record


def test_a_run_that_begins_leaves_code_packages_and_machine(record_run: Any, repository: Path) -> None:
    git(repository, "init")
    commit_all(repository)
    write(repository, {"helper.py": "API_KEY = 'planted-2'\n"})
    files = record_run("a", environment={"TF_NUM_INTRAOP_THREADS": "1"}).files
    (state,) = read_states(files)
    assert state.code.modules.keys() == {"nets.py", "helper.py"}
    assert state.code.changed.keys() == {"helper.py"}, "the run's own folder is no change"
    assert "+API_KEY = '****'" in files.changes(0).read_text()
    assert (files.kept_code(0) / "nets.py").read_text() == MODEL
    assert (files.kept_code(0) / "helper.py").read_text() == "API_KEY = '****'\n"
    assert f"numpy=={state.packages['numpy']}\n" in files.requirements.read_text()
    assert f"numpy=={state.packages['numpy']}\n" in files.environment.read_text()
    assert state.variables["TF_NUM_INTRAOP_THREADS"] == "1"
    assert (state.folder, state.seed) == (str(repository), 0)
    assert {"python", "CPU", "CPU features", "CPU cores"} <= state.machine.keys()
    assert read_run_tags(files.path)["mlflow.source.git.dirty"] == "true"
    logged = {(path.name, folder) for path, folder in files.list_logged_files()}
    assert {("record.json", "provenance"), ("nets.py", "provenance/code"), ("environment.txt", None)} <= logged


def test_code_is_not_kept_if_it_is_switched_off(record_run: Any, repository: Path) -> None:
    git(repository, "init")
    commit_all(repository)
    write(repository, {"helper.py": "x = 1\n"})
    files = record_run("a", without_code=True).files
    (state,) = read_states(files)
    assert not state.code.is_kept
    assert state.code.changed == {}
    assert len(state.code.modules["nets.py"][0]) == 32, "digests say whether code differs"
    assert {path.name for path in files.provenance_folder.iterdir()} == {"record.json", "requirements.txt"}


def test_a_resumed_run_adds_a_state_only_if_something_differs(record_run: Any, repository: Path) -> None:
    files = record_run("a").files
    record_run("a", resume=1)
    assert len(read_states(files)) == 1
    write(repository, {"helper.py": "x = 2\n"})
    record_run("a", resume=2)
    assert [state.resume for state in read_states(files)] == [0, 2]
    assert (files.kept_code(2) / "helper.py").read_text() == "x = 2\n"
    assert (files.kept_code(0) / "helper.py").read_text() == "API_KEY = '****'\n"


def test_the_jobs_of_a_sweep_look_into_git_once_for_each_state_of_the_code(
    record_run: Any, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repository, "init")
    commit_all(repository)
    looks = []
    monkeypatch.setattr(collect, "read_git", lambda folder: looks.append(folder) or read_git(folder))
    facts = LaunchFacts()
    for job in ("0", "1", "2"):
        record_run(job, facts)
    assert len(looks) == 1
    write(repository, {"helper.py": "x = 3\n"})
    assert read_states(record_run("3", facts).files)[0].code.changed.keys() == {"helper.py"}
    assert len(looks) == 2


def test_modules_that_are_too_large_are_named_and_not_kept(
    record_run: Any, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "CODE_BYTES", 50)
    files = record_run("a").files
    (state,) = read_states(files)
    assert state.code.left_out == {"nets.py": "the modules are too large"}
    assert [path.name for path in files.kept_code(0).iterdir()] == ["helper.py"]
