"""Checkpoints in an object store, against moto's S3 server."""

from __future__ import annotations

import os
import re
import shutil
import socket
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Best, Checkpoint, Snapshot
from scaleflow.interfaces.events import CheckpointSaved, Event, Note, RunReady, UploadAwaited
from scaleflow.runs import EventReader
from tests.checkpoint.test_resume import BASE, GLOBAL, course
from tests.checkpoint.test_store import same, snapshot
from tests.conftest import Command
from tests.emulators import serve_azure, serve_google
from tests.launcher.test_supervisor import RESTING, wait_for
from tests.object_store import SECRET, Relay, allow_requests, make_bucket

Store = dict[str, str]


class Recorder:
    """An `Emit` that keeps the texts of notes, the steps of checkpoints and the waits for uploads."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.saved: list[int] = []
        self.waits: list[float] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)
        elif isinstance(event, CheckpointSaved):
            self.saved.append(event.step)
        elif isinstance(event, UploadAwaited):
            self.waits.append(event.seconds)


def make_manager(address: str, folder: Path, emit: Any, **options: Any) -> Any:
    from scaleflow.checkpoint import CheckpointManager

    writes = options.pop("writes", True)
    has_readers = options.pop("has_readers", False)
    is_restart = options.pop("is_restart", False)
    return CheckpointManager(Checkpoint(folder=address, **options), str(folder), emit, writes, has_readers, is_restart)


def make_snapshot(step: int, best: int | None = None) -> Snapshot:
    made = snapshot(step)
    return Snapshot(step, made.tensors, {**made.host, "best": {"step": best, "value": None}})


def list_objects(address: str) -> list[str]:
    """The names of all objects at an address, without markers of folders."""
    from pyarrow import fs

    from scaleflow.files.object_store import connect

    scheme, _, root = address.partition("://")
    infos = connect(scheme).get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
    return sorted(info.path.removeprefix(f"{root}/") for info in infos if info.type == fs.FileType.File)


def save_some(environment: Mapping[str, str], folder: Path, scheme: str = "s3") -> dict[str, Any]:
    os.environ.update(environment)
    address, heard = f"{scheme}://kept/a/run", Recorder()
    manager = make_manager(address, folder / "local", heard, best=Best())
    manager.check_writable()
    manager.check_empty()
    for step in (1, 2, 3, 4, 5):
        manager.save(make_snapshot(step, best=None if step == 1 else 2), is_best=step == 2)
        manager.wait()
    manager.finish()
    found: dict[str, Any] = {"objects": list_objects(address), "saved": heard.saved}
    try:
        make_manager(address, folder / "other", heard).check_empty()
    except ConfigError as refusal:
        found["refusal"] = str(refusal)
    elsewhere = make_manager(address, folder / "elsewhere", heard, best=Best(), keep=1)
    found["same"] = same(elsewhere.load_newest(), make_snapshot(5, 2)), same(elsewhere.load_best(), make_snapshot(2, 2))
    elsewhere.save(make_snapshot(6, 2))
    elsewhere.wait()
    elsewhere.finish()
    found["later"] = list_objects(address)
    elsewhere.drop_from(6)
    elsewhere.save(make_snapshot(3, 2))
    elsewhere.wait()
    elsewhere.finish()
    found["dropped"] = list_objects(address)
    below = make_manager(f"{address}/below", folder / "below", heard)
    below.save(make_snapshot(9))
    below.wait()
    below.finish()
    found["notes"] = heard.notes
    reader = make_manager(address, folder / "reader" / "checkpoints", heard, writes=False)
    found["read"] = reader.load_newest().step, sorted(path.name for path in (folder / "reader").iterdir())
    return found


def files_of(*steps: int) -> list[str]:
    names = ("checkpoint.json", "tensors.data-00000-of-00001", "tensors.index")
    return [f"step-{step:08d}/{name}" for step in steps for name in names]


def test_the_store_has_what_is_kept(isolated: Callable[..., Any], tmp_path: Path, object_store: Store) -> None:
    make_bucket(object_store, "kept")
    assert_kept(isolated(save_some, object_store, tmp_path), "s3")


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "serve"), [("gs", serve_google), ("abfs", serve_azure)])
def test_the_stores_of_google_and_azure_have_it_too(
    isolated: Callable[..., Any], tmp_path: Path, scheme: str, serve: Callable[..., Any]
) -> None:
    with serve(tmp_path, "kept") as environment:
        assert_kept(isolated(save_some, environment, tmp_path, scheme), scheme)


def assert_kept(found: dict[str, Any], scheme: str) -> None:
    refusal = f"checkpoint.folder={scheme}://kept/a/run: contains checkpoints of another run, up to"
    assert found["objects"] == files_of(2, 4, 5)
    assert found["saved"] == [1, 2, 3, 4, 5, 6, 3, 9]
    assert found["refusal"].startswith(refusal)
    assert found["same"] == (True, True)
    assert found["later"] == files_of(2, 6)
    assert found["dropped"] == files_of(2, 3)
    assert found["read"] == (3, [])
    assert found["notes"] == []


def damage(address: str, name: str, change: Callable[[bytes], bytes] | None) -> None:
    """Changes an object; None deletes it."""
    from scaleflow.files.object_store import connect

    path = f"{address.partition('://')[2]}/{name}"
    system = connect("s3")
    if change is None:
        system.delete_file(path)
        return
    with system.open_input_stream(path) as file:
        content = file.read()
    with system.open_output_stream(path) as file:
        file.write(change(content))


def flip(content: bytes) -> bytes:
    return content[:10] + bytes([content[10] ^ 1]) + content[11:]


DAMAGES: list[tuple[str, Callable[[bytes], bytes] | None, int]] = [
    ("tensors.data-00000-of-00001", flip, 1),
    ("tensors.index", None, 1),
    ("checkpoint.json", lambda content: content[:40], 1),
    ("checkpoint.json", None, 0),  # as of an upload that was cut off
]


def load_damaged(environment: Mapping[str, str], folder: Path) -> list[Any]:
    os.environ.update(environment)
    found = []
    for number, (name, change, _) in enumerate(DAMAGES):
        address, heard = f"s3://damaged/{number}", Recorder()
        manager = make_manager(address, folder / f"{number}", heard)
        for step in (1, 2):
            manager.save(make_snapshot(step))
            manager.wait()
        manager.finish()
        damage(address, f"step-00000002/{name}", change)
        other = make_manager(address, folder / f"{number}-other", heard)
        newest = other.load_newest()
        other.save(make_snapshot(3))
        other.wait()
        other.finish()
        objects = list_objects(address)
        is_whole = {*files_of(1), *files_of(3)} <= set(objects)
        is_aside = "step-00000002/damaged.json" in objects or not any("step-00000002" in each for each in objects)
        local = make_manager(address, folder / f"{number}", heard).load_newest()  # another machine was further
        found.append((newest.step, heard.notes, is_whole, is_aside, local.step))
    return found


@pytest.mark.slow
def test_a_damaged_one_or_one_uploaded_in_part_is_passed_over(
    isolated: Callable[..., Any], tmp_path: Path, object_store: Store
) -> None:
    make_bucket(object_store, "damaged")
    found = isolated(load_damaged, object_store, tmp_path)
    for (*_, notes), (newest, heard, is_whole, is_aside, local) in zip(DAMAGES, found, strict=True):
        assert ["the checkpoint at step 2 is damaged" in note for note in heard] == [True] * notes, heard
        assert (newest, is_whole, is_aside, local) == (1, True, True, 3)


def repair_local(environment: Mapping[str, str], folder: Path) -> tuple[bool, list[str]]:
    """The local copy is damaged, and that in the store is not."""
    os.environ.update(environment)
    heard = Recorder()
    manager = make_manager("s3://repaired/run", folder / "local", heard)
    manager.save(make_snapshot(1))
    manager.wait()
    manager.finish()
    (data,) = (folder / "local" / "step-00000001").glob("tensors.data*")
    data.write_bytes(flip(data.read_bytes()))
    return same(make_manager("s3://repaired/run", folder / "local", heard).load_newest(), make_snapshot(1)), heard.notes


def test_a_damaged_local_copy_is_read_from_the_store(
    isolated: Callable[..., Any], tmp_path: Path, object_store: Store
) -> None:
    make_bucket(object_store, "repaired")
    assert isolated(repair_local, object_store, tmp_path) == (True, [])


def lose_the_store(environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
    relay, heard = Relay(environment), Recorder()
    os.environ.update(relay.environment)
    address = "s3://away/run"
    manager = make_manager(address, folder / "local", heard)
    manager.check_writable()
    manager.save(make_snapshot(1))
    manager.wait()
    manager.finish()
    relay.cut()
    for step in (2, 3, 4):
        manager.save(make_snapshot(step))
        manager.wait()  # the local folder has it
    wait_for(lambda: heard.notes)
    manager._options = Checkpoint(folder=address, write_seconds=3.0)
    manager.finish()
    make_manager(address, folder / "local", heard, write_seconds=7.0, writes=False).finish()
    found: dict[str, Any] = {"without": [*heard.notes], "waits": heard.waits[-3:]}
    restarted = make_manager(address, folder / "local", heard, is_restart=True)
    restarted._uploader = None  # two would delete each other's incomplete uploads
    found["restarted"] = restarted.load_newest().step
    try:
        make_manager(address, folder / "local", heard).load_newest()
    except ConfigError as refusal:
        found["refusal"] = str(refusal)
    relay.restore()
    heard.notes.clear()
    manager._options = Checkpoint(folder=address)
    manager.finish()
    found["objects"], found["with"] = list_objects(address), heard.notes
    return found


@pytest.mark.slow
def test_a_store_that_is_away_does_not_end_the_run_and_gets_the_rest_later(
    isolated: Callable[..., Any], tmp_path: Path, object_store: Store
) -> None:
    make_bucket(object_store, "away")
    found = isolated(lose_the_store, object_store, tmp_path)
    outage, end = found["without"]
    assert re.match(r"checkpoints cannot be uploaded to s3://away/run: .+; training continues, they stay in ", outage)
    assert end.startswith("s3://away/run does not have the checkpoint of steps 3, 4: ")
    assert end.endswith(f"; it stays in {tmp_path}/local, and a resumed run uploads it, if this one is not finished")
    assert found["waits"] == [3.0, 0.0, 7.0]  # a worker that only reads ends after the one that uploads
    assert found["restarted"] == 4
    assert found["refusal"].startswith("checkpoint.folder=s3://away/run: ")
    assert found["objects"] == files_of(3, 4)
    assert "s3://away/run has the checkpoints again" in found["with"]


def stop_before_the_upload(environment: Mapping[str, str], folder: Path) -> tuple[int, list[str], list[str]]:
    """A process that is killed leaves a checkpoint in its folder only, and a part of one in the store."""
    from scaleflow.checkpoint import CheckpointStore

    os.environ.update(environment)
    heard = Recorder()
    first = make_manager("s3://resumed/run", folder / "local", heard)
    first.save(make_snapshot(1))
    first.wait()
    first.finish()
    local = CheckpointStore(str(folder / "local"))
    local.write(make_snapshot(2))
    chief = make_manager("s3://resumed/run", folder / "local", heard, has_readers=True)
    other = make_manager("s3://resumed/run", folder / "other", heard, writes=False)
    chief.publish()
    return other.load_newest().step, list_objects("s3://resumed/run"), heard.notes


def test_pending_upload_of_the_last_command_is_done_before_other_workers_read(
    isolated: Callable[..., Any], tmp_path: Path, object_store: Store
) -> None:
    make_bucket(object_store, "resumed")
    assert isolated(stop_before_the_upload, object_store, tmp_path) == (2, files_of(1, 2), [])


def refuse(environment: Mapping[str, str], address: str, folder: Path) -> str:
    os.environ.update(environment)
    try:
        make_manager(address, folder / "local", Recorder()).check_writable()
    except ConfigError as refusal:
        return str(refusal)
    return ""


def test_a_store_that_cannot_be_written_is_refused(
    isolated: Callable[..., Any], tmp_path: Path, object_store: Store
) -> None:
    anonymous = {key: value for key, value in object_store.items() if not key.endswith(("_ID", "_ACCESS_KEY"))}
    unknown = isolated(refuse, object_store, "s3://no-such-bucket/run", tmp_path)
    make_bucket(object_store, "refused")
    allow_requests(object_store, b"0")
    try:
        denied = isolated(refuse, object_store, "s3://refused/run", tmp_path)
        nobody = isolated(refuse, anonymous, "s3://refused/run", tmp_path)
    finally:
        allow_requests(object_store, b"inf")
    with socket.socket() as bound:  # nothing listens on it
        bound.bind(("127.0.0.1", 0))
        closed = {**object_store, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{bound.getsockname()[1]}"}
        silent = isolated(refuse, closed, "s3://refused/run", tmp_path)
    assert unknown.startswith("checkpoint.folder=s3://no-such-bucket/run: there is no such bucket or prefix; check")
    assert denied.startswith("checkpoint.folder=s3://refused/run: the store refused the request (access denied); check")
    for message in (unknown, denied, nobody, silent):
        assert message.startswith("checkpoint.folder=s3://")
        assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in message
        assert SECRET not in message


def run_course(environment: Mapping[str, str], *arguments: Any, **options: Any) -> Any:
    os.environ.update(environment)
    return course(*arguments, **options)


def test_a_run_goes_on_from_the_store_with_the_same_bits(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, object_store: Store
) -> None:
    make_bucket(object_store, "bits")
    words = ("strategy=one_device", *BASE, GLOBAL, "model.dropout=0.5")
    whole = isolated(course, plan(*words), str(tmp_path / "whole"))
    remote = plan(*words, "checkpoint.folder=s3://bits/run")
    part = isolated(run_course, object_store, remote, str(tmp_path / "one"), stop_after=4)
    last = isolated(run_course, object_store, remote, str(tmp_path / "two"), goes_on=True)
    assert part.stopped
    assert part.points + last.points == whole.points
    assert set(last.state) == set(whole.state)
    for name, value in whole.state.items():
        assert last.state[name].tobytes() == value.tobytes(), name


WORDS = (
    *("hardware=cpu", "tracking=none", "evaluation=none", "dataset.limit=100", "model.units=8"),
    "training.global_batch_size=16",
)


@pytest.mark.slow
def test_a_command_goes_on_on_a_machine_that_has_only_the_folder_without_checkpoints(
    command: Command, object_store: Store
) -> None:
    make_bucket(object_store, "commands")
    words = (*WORDS, "checkpoint.folder=s3://commands/run", "hydra.run.dir=one")
    ended = command(*words, "training.max_steps=3", **object_store)
    assert ended.returncode == 0, ended.stderr
    shutil.copytree(command.folder / "one", command.folder / "two", ignore=shutil.ignore_patterns("checkpoints"))
    resumed = command("resume=two", "training.max_steps=5", **object_store)
    assert resumed.returncode == 0, resumed.stderr
    ready = [event for event in EventReader(command.folder / "two/events.jsonl").read() if isinstance(event, RunReady)]
    assert [event.resumed for event in ready] == [None, 3]
    assert sorted(path.name for path in (command.folder / "two/checkpoints").iterdir())[-1] == "step-00000005"
    refused = command(*words[:-1], "hydra.run.dir=three", "checkpoint.folder=s3://nowhere/run", **object_store)
    assert refused.returncode == 2
    assert refused.stderr.startswith("scaleflow: checkpoint.folder=s3://nowhere/run: there is no such bucket")
    assert not (command.folder / "three").exists()
    written = [path.read_bytes() for path in command.folder.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in each for each in written)
    assert not any(SECRET in text for each in (ended, resumed, refused) for text in (each.stdout, each.stderr))


def read_texts(folder: Path, kind: type[Event]) -> list[Any]:
    return [event for event in EventReader(folder / "events.jsonl").read() if isinstance(event, kind)]


@pytest.mark.slow
def test_a_stop_waits_for_the_upload_of_the_last_one(
    command: Command, isolated: Callable[..., Any], object_store: Store
) -> None:
    """The store is away when the signal comes, and comes back while the run waits."""
    make_bucket(object_store, "stopped")
    relay, folder = Relay(object_store), command.folder / "out"
    words = ("training.epochs=1000000", "checkpoint.folder=s3://stopped/run", RESTING)
    said = command.folder / "said"  # its lines would fill a pipe that nobody reads
    with (
        said.open("w") as file,
        command.start(
            *WORDS, *words, "hydra.run.dir=out", output=(file.fileno(), file.fileno()), **relay.environment
        ) as process,
    ):

        def wait_while_it_runs(condition: Callable[[], Any]) -> None:
            wait_for(lambda: condition() or process.poll() is not None)
            assert process.poll() is None, said.read_text()

        # The first object is not yet a checkpoint: the run checks first whether it can write, and is refused if not.
        wait_while_it_runs(lambda: has_object(object_store, "stopped", "checkpoint.json"))
        relay.cut()
        wait_while_it_runs(lambda: [note for note in read_texts(folder, Note) if "cannot be uploaded" in note.text])
        process.terminate()
        wait_while_it_runs(lambda: read_texts(folder, UploadAwaited))
        relay.restore()
        assert process.wait(timeout=240) == 143
    last = read_texts(folder, CheckpointSaved)[-1].step
    objects = isolated(list_in, object_store, "s3://stopped/run")
    assert {*files_of(last), f"step-{last:08d}/learned_state.json"} == {
        each for each in objects if f"{last:08d}" in each
    }
    assert "has the checkpoints again" in said.read_text()


def has_object(store: Mapping[str, str], bucket: str, name: str) -> bool:
    """Whether an object of a bucket has this name, after the last slash."""
    with urllib.request.urlopen(f"{store['AWS_ENDPOINT_URL']}/{bucket}?list-type=2", timeout=120) as answer:
        return f"/{name}</Key>".encode() in answer.read()


def list_in(environment: Mapping[str, str], address: str) -> list[str]:
    os.environ.update(environment)
    return list_objects(address)
