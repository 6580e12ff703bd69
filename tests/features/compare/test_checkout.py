"""The code of a run is built in a folder, and nothing of it leads out of that folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.features.compare.checkout import check_out, is_inside
from scaleflow.runs import RunFolder
from scaleflow.runs.code_digest import CodeFile
from scaleflow.runs.data_digest import new_digest
from scaleflow.runs.provenance.collect import collect_changes, describe_module, keep_modules
from scaleflow.runs.provenance.git import read_git
from scaleflow.runs.provenance.record import CodeRecord, Provenance
from scaleflow.runs.run import Run
from tests.features.compare import fake_run
from tests.runs.test_provenance import commit_all, git, write


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    return folder


def keep(folder: Path, root: Path, *names: str, **more: Any) -> Run:
    """A run whose modules are in `root`, recorded as they are now."""
    files, state = RunFolder(folder), read_git(root)
    folder.mkdir(exist_ok=True)
    code = {name: CodeFile(name, root / name, root) for name in names}
    left_out = keep_modules(code, files.kept_code(0))
    changes = None if state is None else collect_changes(state)
    if changes is not None:
        files.changes(0).write_text(changes.patch)
    record = CodeRecord(
        is_kept=True,
        version="1",
        modules={name: describe_module(file, state) for name, file in code.items()},
        commit=state.commit if state else "",
        changed=changes.digests if changes else {},
        submodules=state.submodules if state else {},
        left_out={**left_out, **(changes.left_out if changes else {})},
    )
    values = {"code": record, **more}
    return fake_run(folder, run_id="b" * 32, states=[Provenance(**values)])


def test_without_git_the_copies_of_the_modules_are_used(here: Path, tmp_path: Path) -> None:
    write(here, {"nets.py": "x = 1\n", "lib/help.py": "y = 1\n"})
    run = keep(tmp_path / "run", here, "nets.py", "lib/help.py")
    write(here, {"nets.py": "x = 2\n"})
    built = check_out(run, tmp_path / "out")
    assert built.folders == [f"{tmp_path}/out/"]
    assert (tmp_path / "out/nets.py").read_text() == "x = 1\n"
    assert (tmp_path / "out/lib/help.py").read_text() == "y = 1\n"
    assert built.masked == built.notes == []
    write(tmp_path / "out", {"nets.py": "x = 3\n"})
    assert check_out(run, tmp_path / "out").folders == built.folders, "an earlier checkout is used as it is"
    assert (tmp_path / "out/nets.py").read_text() == "x = 3\n"
    with pytest.raises(ConfigError, match=r"--checkout .*run: it exists, and is no checkout of this run"):
        check_out(run, tmp_path / "run")


def test_a_worktree_has_the_commit_with_the_changes(here: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    git(inner, "init")
    write(inner, {"part.py": "z = 1\n"})
    commit_all(inner)
    git(here, "init")
    git(here, "submodule", "add", str(inner), "libs/inner")
    write(here, {"sub/nets.py": "x = 1\n", "data.txt": "a\n", "old.py": "", "plain.py": ""})
    commit_all(here)
    write(here, {"sub/nets.py": 'x = 2\nAPI_KEY = "planted-key"\n', "new.md": "b\n", "libs/inner/part.py": "z = 2\n"})
    (here / "old.py").unlink()
    (here / ".env").write_text("A=1\n")
    run = keep(tmp_path / "run", here / "sub", "nets.py")
    write(here, {"sub/nets.py": "x = 3\n", "data.txt": "c\n"})
    commit_all(here, "second")
    out = tmp_path / "out"
    built = check_out(run, out)
    assert built.folders == [f"{out}/sub/"]
    assert (out / "sub/nets.py").read_text() == 'x = 2\nAPI_KEY = "****"\n'
    assert built.masked == ["nets.py"]
    assert (out / "data.txt").read_text() == "a\n"
    assert (out / "new.md").read_text() == "b\n"
    assert (out / "libs/inner/part.py").read_text() == "z = 2\n"
    assert not (out / "old.py").exists()
    assert "not restored: .env (it looks like a secret)" in built.notes
    shutil.rmtree(here / ".git")
    alone = check_out(run, tmp_path / "alone")
    assert "is not here; the copies of the modules are used" in alone.notes[0]
    assert (tmp_path / "alone/nets.py").read_text() == 'x = 2\nAPI_KEY = "****"\n'


def test_a_record_that_leads_out_of_the_folder_is_refused(here: Path, tmp_path: Path) -> None:
    write(here, {"nets.py": "x = 1\n"})
    for path in ("../evil.py", "/tmp/evil.py", ".git/hooks/post-checkout", "a/../../evil.py", ""):
        assert not is_inside(tmp_path / "out", path)
        run = keep(tmp_path / "run", here, "nets.py")
        digest = new_digest(b"x").hexdigest()
        modules = {path: ["c", digest, ""]}
        code = CodeRecord(is_kept=True, version="1", modules=modules, commit="--upload-pack=touch evil")
        run = fake_run(run.files.path, states=[Provenance(code=code)])
        with pytest.raises(ConfigError, match="which is not in a folder"):
            check_out(run, tmp_path / "out")
        shutil.rmtree(tmp_path / "out")
    out = tmp_path / "linked"
    out.mkdir()
    (out / "lib").symlink_to(tmp_path)
    assert not is_inside(out, "lib/evil.py")


def test_a_run_that_kept_no_code_cannot_be_checked_out(here: Path, tmp_path: Path) -> None:
    for code, why in ((CodeRecord(), "kept no code"), (CodeRecord(is_kept=True, version="1"), "used no code of yours")):
        run = fake_run(tmp_path, states=[Provenance(code=code)])
        with pytest.raises(ConfigError, match=f"the run {why}; leave it out"):
            check_out(run, tmp_path / "out")
