from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from scaleflow.errors import ConfigError
from scaleflow.runs import RunFolder
from scaleflow.runs import folder as folder_module
from scaleflow.runs.folder import FolderBusy


@pytest.fixture
def files(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def recording(files: RunFolder) -> AbstractContextManager[None]:
    return files.lock_recording(seconds=0.1)


@pytest.mark.parametrize(
    ("lock", "message"),
    [
        (recording, "{path}: another command is recording this run"),
        (RunFolder.lock_writing, "{path}: a worker of this run is still writing"),
        (RunFolder.lock_sweep, "hydra.sweep.dir={path}: another command runs the sweep in this folder; end it first"),
    ],
)
def test_a_second_holder_of_a_lock_is_refused_until_the_first_has_released_it(
    files: RunFolder, lock: type[AbstractContextManager[None]], message: str
) -> None:
    with lock(files), pytest.raises(FolderBusy) as refused, lock(RunFolder(files.path)):
        pass
    assert str(refused.value) == message.format(path=files.path)
    with lock(RunFolder(files.path)):
        pass


def test_the_three_locks_do_not_exclude_each_other(files: RunFolder) -> None:
    with files.lock_recording(seconds=0), files.lock_writing(), files.lock_sweep():
        pass


def test_the_process_that_writes_excludes_the_others(files: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "SECONDS_TO_WAIT", 0.1)
    lock = files.take_write_lock()
    with pytest.raises(FolderBusy, match="a worker of this run is still writing"), files.lock_writing():
        pass
    with pytest.raises(ConfigError, match="another process has been writing there for a minute"):
        files.take_write_lock()
    lock.release()
    with files.lock_writing(), pytest.raises(ConfigError, match="another process has been writing"):
        files.take_write_lock()


@pytest.mark.parametrize("is_vital", [False, True])
def test_the_recorders_file_is_replaced_in_one_step(files: RunFolder, is_vital: bool) -> None:
    assert files.read_record() == {}
    files.write_record({"id": "1", "offset": 10}, is_vital)
    files.write_record({"id": "1"}, is_vital)
    assert files.read_record() == {"id": "1"}
    assert [path.name for path in files.path.iterdir()] == ["record.json"]


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00"])
def test_a_recorders_file_that_cannot_be_read_is_an_empty_one(files: RunFolder, content: str) -> None:
    files.record.write_text(content)
    assert files.read_record() == {}


def test_the_files_of_a_process_have_its_name(files: RunFolder) -> None:
    assert files.log("worker 1") == files.path / "worker-1.log"
    assert files.process_events("worker 1") == files.path / "events-worker-1.jsonl"
    files.events.touch()
    for name in ("worker 2", "server 0", "worker 1"):
        files.process_events(name).touch()
    names = [path.name for path in files.list_process_events()]
    assert names == ["events-server-0.jsonl", "events-worker-1.jsonl", "events-worker-2.jsonl"]
