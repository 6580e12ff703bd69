"""Tables in object stores, against moto's S3 server: the same rows as from a disk, and refusals without a wait."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dataset.files import holds, refused
from tests.dataset.test_table import arrays, make, table, write_table

SECRET = "not-to-be-printed"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables of a server on this machine that is empty."""
    pytest.importorskip("moto.server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("w") as output:
        line = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(line, stdout=output, stderr=output)
        try:
            address = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 60
            while not answers(address):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield {
                "AWS_ENDPOINT_URL": address,
                "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        finally:
            process.terminate()
            process.wait(30)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/moto-api/data.json", timeout=5):
            return True
    except OSError:
        return False


def upload(folder: Path, bucket: str) -> None:
    from pyarrow import fs

    system = fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"], allow_bucket_creation=True)
    system.create_dir(bucket)
    fs.copy_files(str(folder), bucket, destination_filesystem=system)


def read(base: Path, environment: Mapping[str, str]) -> Any:
    os.environ.update(environment)
    frame = table()
    for n in range(3):
        part = frame.iloc[n * 20 : n * 20 + 20]
        write_table(base / f"data/splits/{'train' if n < 2 else 'test'}/{n}.parquet", part)
        write_table(base / f"data/csv/{n}.csv", part)
        write_table(base / f"data/lines/{n}.jsonl", part)
    write_table(base / "data/one.feather", frame)
    (base / "data/other").mkdir()
    (base / "data/other/notes.txt").write_text("no table")
    upload(base / "data", "tables")
    found = {}
    for name in ("splits", "csv", "lines", "csv/*.csv", "one.feather"):
        both = [make(f"{place}/{name}") for place in (base / "data", "s3://tables")]
        found[name] = [{split: arrays(each, split).inputs["Size (m²)"] for split in each.splits} for each in both]
    label = make("s3://tables/csv").load("train").rows.name(25)

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
    return found, label, refusals


def test_a_store_gives_the_rows_of_the_disk(
    isolated: Callable[..., Any], tmp_path: Path, store: dict[str, str]
) -> None:
    found, label, refusals = isolated(read, tmp_path, store)
    for name, (local, remote) in found.items():
        assert list(local) == list(remote) == ["train", "test"] or name == "splits"
        for split, values in local.items():
            np.testing.assert_array_equal(remote[split], values, err_msg=name)
    assert label == "s3://tables/csv/1.csv, row 6"
    holds(
        refusals,
        [
            ["dataset.data_dir=s3://nowhere/x: there is no such bucket", "AWS_ACCESS_KEY_ID"],
            ["dataset.data_dir=s3://tables/nothing: there is no such bucket or prefix"],
            ["dataset.data_dir=s3://tables/other: there is no file with .csv"],
            ["dataset.data_dir=s3://tables/no*: there is no such file"],
            ["dataset.data_dir=s3://*/x: expected the name of a bucket"],
            ["dataset.data_dir=ftp://a/b: expected a path, or an address with s3, gs, abfs://"],
            ["an address must not contain credentials"],
        ],
    )
    assert not any(SECRET in each for each in refusals)


def read_denied(environment: Mapping[str, str]) -> list[str]:
    os.environ.update(environment)
    return refused([lambda: make("s3://tables/csv")])


def allow_requests(store: Mapping[str, str], count: bytes) -> None:
    """Lets the server accept so many requests before it checks credentials."""
    address = f"{store['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
    request = urllib.request.Request(address, data=count, headers={"Content-Type": "text/plain"}, method="POST")
    urllib.request.urlopen(request, timeout=10).close()


def test_no_credentials_and_no_answer_are_refused(
    isolated: Callable[..., Any], tmp_path: Path, store: dict[str, str]
) -> None:
    anonymous = {key: value for key, value in store.items() if not key.endswith(("_ID", "_ACCESS_KEY"))}
    allow_requests(store, b"0")
    try:
        (denied,), (unknown,) = (isolated(read_denied, each) for each in (store, anonymous))
    finally:
        allow_requests(store, b"inf")
    assert "dataset.data_dir=s3://tables/csv: the store refused the request (access denied)" in denied
    with socket.socket() as bound:  # nothing listens on it
        bound.bind(("127.0.0.1", 0))
        closed = {**store, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{bound.getsockname()[1]}"}
        (silent,) = isolated(read_denied, closed)
    for message in (unknown, silent):
        assert "dataset.data_dir=s3://tables/csv: " in message
        assert "set AWS_ACCESS_KEY_ID" in message
    assert SECRET not in denied + unknown + silent


@pytest.mark.slow
def test_a_command_trains_from_a_store(
    command: Any, isolated: Callable[..., Any], tmp_path: Path, store: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    write_table(tmp_path / "data/table.parquet", table())
    upload(tmp_path / "data", "trained")
    words = ("dataset=table", "dataset.data_dir=s3://trained/table.parquet", "dataset.target=price", "hardware=cpu")
    ended = command(*words, "training.max_steps=3", "dataset.cache=none", "hydra.run.dir=out", **store)
    assert ended.returncode == 0, ended.stderr
    written = [path.read_bytes() for path in (command.folder / "out").rglob("*") if path.is_file()]
    assert SECRET not in ended.stdout + ended.stderr
    assert not any(SECRET.encode() in each for each in written)
