"""The lock that keeps two processes from migrating a store at once."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from scaleflow.tracking.connection import is_unreachable, migration_lock

SECRETS = ("ada", "sesame")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def lock_of(uri: str) -> Path:
    with migration_lock(uri) as lock:
        return Path(lock.lock_file)


@pytest.mark.parametrize(
    "uri",
    [
        "https://ada:sesame@host/mlflow",
        "postgresql://ada:sesame@host:5432/runs",
        "mysql+pymysql://host/runs?user=ada&password=sesame",
        "https://ada:sesame@host/" + "x" * 300,
    ],
)
def test_a_file_name_holds_no_credentials_and_only_its_user_opens_it(uri: str, temporary: Path) -> None:
    path = lock_of(uri)
    assert path.parent == temporary
    assert not any(secret in path.name for secret in SECRETS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_store_has_one_lock_whoever_opens_it_by_whatever_password() -> None:
    one, other = (lock_of(f"postgresql://{user}@host/runs") for user in ("ada:sesame", "bob:open"))
    assert one == other
    assert lock_of("postgresql://host/others") != one


def test_two_users_of_the_machine_do_not_share_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = lock_of("https://host")
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    assert lock_of("https://host") != mine


def test_users_who_share_an_sqlite_file_share_its_lock(tmp_path: Path) -> None:
    path = lock_of(f"sqlite:///{tmp_path}/mlflow.db")
    assert path == tmp_path / "mlflow.db.lock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666


@pytest.mark.parametrize("unwritable", ["mlflow.db.lock", ""])
def test_a_lock_that_cannot_be_written_beside_the_file_is_the_users_own(
    unwritable: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / unwritable).touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / unwritable)
    assert lock_of(f"sqlite:///{tmp_path}/mlflow.db").parent == temporary


def test_a_server_that_does_not_answer_is_told_from_other_errors() -> None:
    from mlflow.exceptions import MlflowException

    def raise_from(cause: Exception) -> MlflowException:
        try:
            try:
                raise cause
            except type(cause):
                raise MlflowException("no answer")  # noqa: B904  (as MLflow does it)
        except MlflowException as error:
            return error

    assert is_unreachable(raise_from(ConnectionRefusedError()))
    assert not is_unreachable(raise_from(KeyError()))
    assert not is_unreachable(MlflowException("wrong"))
    assert not is_unreachable(ConnectionRefusedError())
