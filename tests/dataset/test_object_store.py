"""Tables in object stores, against moto's S3 server and emulators: the rows of a disk, and refusals without a wait."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.dataset.reading.files import identify_in_store, read_etags
from scaleflow.features.predict.inputs import open_table
from tests.dataset.files import holds, refused
from tests.dataset.test_table import arrays, make, table, write_table
from tests.emulators import serve_azure, serve_google
from tests.object_store import SECRET, allow_requests, upload


def write_parts(base: Path) -> Any:
    """Writes a table in three parts, as splits and in folders of two formats; returns it."""
    frame = table()
    for n in range(3):
        part = frame.iloc[n * 20 : n * 20 + 20]
        write_table(base / f"splits/{'train' if n < 2 else 'test'}/{n}.parquet", part)
        write_table(base / f"csv/{n}.csv", part)
        write_table(base / f"lines/{n}.jsonl", part)
    return frame


def read_both(name: str, *places: object) -> list[dict[str, Any]]:
    """A column of each split of a table, as read from each place."""
    found = [make(f"{place}/{name}") for place in places]
    return [{split: arrays(each, split).inputs["Size (m²)"] for split in each.splits} for each in found]


def read_to_predict(path: str) -> list[dict[str, Any]]:
    """The rows that `scaleflow predict` reads."""
    source = open_table(path)
    return [row for rows in source.read(source.schema.names, 7) for row in rows.table.to_pylist()]


def read(base: Path, environment: Mapping[str, str]) -> Any:
    os.environ.update(environment)
    frame = write_parts(base / "data")
    write_table(base / "data/one.feather", frame)
    (base / "data/other").mkdir()
    (base / "data/other/notes.txt").write_text("no table")
    upload(base / "data", "tables")
    names = ("splits", "csv", "lines", "csv/*.csv", "one.feather")
    found = {name: read_both(name, base / "data", "s3://tables") for name in names}
    predicted = {
        name: [read_to_predict(f"{place}/{name}") for place in (base / "data", "s3://tables")] for name in names
    }
    states = identify_in_store("s3://tables/csv")
    tags = read_etags(list(states))
    assert states["s3://tables/csv/1.csv"][0] == (base / "data/csv/1.csv").stat().st_size
    label = make("s3://tables/csv").load("train").rows.name(25)
    known = [make(f"s3://tables/{name}").learned_cache.notes for name in ("csv", "csv/*.csv", "one.feather")]
    write_table(base / "changed/csv/0.csv", frame.iloc[:19])
    upload(base / "changed", "tables")
    known.append(make("s3://tables/csv").learned_cache.notes)
    later = read_etags(list(states))
    assert [path for path in states if later[path] != tags[path]] == ["s3://tables/csv/0.csv"]

    def of(address: str) -> Callable[[], Any]:
        return lambda: make(address)

    addresses = (
        "s3://nowhere/x",
        "s3://tables/nothing",
        "s3://tables/other",
        "s3://tables/no*",
        "s3://*/x",
        "ftp://a/b",
    )
    refusals = refused([*map(of, addresses), of(f"s3://user:{SECRET}@tables/csv")])
    refusals += refused([lambda: open_table("s3://tables/nothing"), lambda: open_table("s3://tables/other")])
    return found, label, known, refusals, predicted


def test_a_store_gives_the_rows_of_the_disk(
    isolated: Callable[..., Any], tmp_path: Path, object_store: dict[str, str]
) -> None:
    found, label, (*known, changed), refusals, predicted = isolated(read, tmp_path, object_store)
    for name, (local, remote) in predicted.items():
        assert len(local) == 60, name
        assert remote == local, name
    for name, (local, remote) in found.items():
        assert list(local) == list(remote) == ["train", "test"] or name == "splits"
        for split, values in local.items():
            np.testing.assert_array_equal(remote[split], values, err_msg=name)
    assert label == "s3://tables/csv/1.csv, row 6"
    holds([note for (note,) in known], [["columns, rows and types of s3://tables/", " from the cache"]] * 3)
    assert changed == []
    holds(
        refusals,
        [
            ["dataset.data_dir=s3://nowhere/x: there is no such bucket", "AWS_ACCESS_KEY_ID"],
            ["dataset.data_dir=s3://tables/nothing: there is no such bucket or prefix"],
            ["dataset.data_dir=s3://tables/other: there is no file that ends in .csv"],
            ["dataset.data_dir=s3://tables/no*: there is no such file"],
            ["dataset.data_dir=s3://*/x: expected the name of a bucket"],
            ["dataset.data_dir=ftp://a/b: expected a path, or an address with s3, gs, abfs://"],
            ["an address must not contain credentials"],
            ["--input=s3://tables/nothing: there is no such bucket or prefix"],
            ["--input: s3://tables/other/notes.txt does not end in .csv"],
        ],
    )
    assert not any(SECRET in each for each in refusals)


def read_elsewhere(base: Path, environment: Mapping[str, str], scheme: str) -> Any:
    from pyarrow import fs

    from scaleflow.files.object_store import connect

    os.environ.update(environment)
    frame = write_parts(base)

    def send(name: str) -> None:
        fs.copy_files(str(base / name), f"tables/{name}", destination_filesystem=connect(scheme))

    send("splits")
    send("csv")
    found = {name: read_both(name, base, f"{scheme}://tables") for name in ("splits", "csv", "csv/*.csv")}
    known = [make(f"{scheme}://tables/csv").learned_cache.notes]
    write_table(base / "csv/0.csv", frame.iloc[:19])
    send("csv")
    known.append(make(f"{scheme}://tables/csv").learned_cache.notes)
    return found, known, refused([lambda: make(f"{scheme}://nowhere/x"), lambda: make(f"{scheme}://tables/nothing")])


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "serve"), [("gs", serve_google), ("abfs", serve_azure)])
def test_the_stores_of_google_and_azure_give_the_rows_of_the_disk(
    isolated: Callable[..., Any], tmp_path: Path, scheme: str, serve: Callable[..., Any]
) -> None:
    with serve(tmp_path, "tables") as environment:
        found, ((note,), changed), refusals = isolated(read_elsewhere, tmp_path, environment, scheme)
    for name, (local, remote) in found.items():
        assert list(local) == list(remote)
        for split, values in local.items():
            np.testing.assert_array_equal(remote[split], values, err_msg=name)
    assert "from the cache" in note
    assert changed == []
    assert f"dataset.data_dir={scheme}://nowhere/x: there is no such" in refusals[0]
    assert f"dataset.data_dir={scheme}://tables/nothing: there is no such" in refusals[1]


def read_denied(environment: Mapping[str, str]) -> list[str]:
    os.environ.update(environment)
    return refused([lambda: make("s3://tables/csv")])


@pytest.mark.slow
def test_no_credentials_and_no_answer_are_refused(
    isolated: Callable[..., Any], tmp_path: Path, object_store: dict[str, str]
) -> None:
    anonymous = {key: value for key, value in object_store.items() if not key.endswith(("_ID", "_ACCESS_KEY"))}
    allow_requests(object_store, b"0")
    try:
        (denied,), (unknown,) = (isolated(read_denied, each) for each in (object_store, anonymous))
    finally:
        allow_requests(object_store, b"inf")
    assert "dataset.data_dir=s3://tables/csv: the store refused the request (access denied)" in denied
    with socket.socket() as bound:  # nothing listens on it
        bound.bind(("127.0.0.1", 0))
        closed = {**object_store, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{bound.getsockname()[1]}"}
        (silent,) = isolated(read_denied, closed)
    for message in (unknown, silent):
        assert "dataset.data_dir=s3://tables/csv: " in message
        assert "set AWS_ACCESS_KEY_ID" in message
    assert SECRET not in denied + unknown + silent


@pytest.mark.slow
def test_a_command_trains_from_a_store(
    command: Any,
    isolated: Callable[..., Any],
    tmp_path: Path,
    object_store: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in object_store.items():
        monkeypatch.setenv(name, value)
    write_table(tmp_path / "data/table.parquet", table())
    upload(tmp_path / "data", "trained")
    words = ("dataset=table", "dataset.data_dir=s3://trained/table.parquet", "dataset.target=price", "hardware=cpu")
    ended = command(*words, "training.max_steps=3", "dataset.cache=none", "hydra.run.dir=out", **object_store)
    assert ended.returncode == 0, ended.stderr
    predict = ("-m", "scaleflow", "predict", "out", "--input", "s3://trained/table.parquet", "--output")
    for more in (("p.csv",), ("shards/", "--shard-rows", "25"), ("shards/", "--shard-rows", "25", "--resume")):
        ended = command.python(*predict, *more, **object_store)
        assert ended.returncode == 0, ended.stderr
    assert len((command.folder / "p.csv").read_text().splitlines()) == 61
    written = [path.read_bytes() for path in (command.folder / "out").rglob("*") if path.is_file()]
    assert SECRET not in ended.stdout + ended.stderr
    assert not any(SECRET.encode() in each for each in written)
