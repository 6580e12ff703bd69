"""PostgreSQL on loopback, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.test_supervisor import wait_for
from tests.tracking.servers import free_port

#: It refuses to run as root, and is then run as the first of these users that there is.
USERS = ("postgres", "nobody")

#: What a crash of the machine would do to the database is of no interest here.
SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "listen_addresses": "127.0.0.1"}


def find_programs() -> Path:
    """The folder of PostgreSQL's programs; skips the test where there is none. Debian has it outside of the PATH."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    if folders := sorted(Path("/usr/lib/postgresql").glob("*/bin")):
        return folders[-1]
    pytest.skip("PostgreSQL is not installed: apt-get install postgresql")


@contextlib.contextmanager
def serve_postgres() -> Iterator[str]:
    """Serves an empty database; yields its address, with a password."""
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed: pip install psycopg2-binary")
    programs = find_programs()
    with tempfile.TemporaryDirectory(prefix="postgres-", dir="/tmp") as name:  # pytest's folders are closed to others
        folder, port, password = Path(name), free_port(), secrets.token_hex(16)
        (folder / "password").write_text(password)
        user = choose_user()
        for path in (folder, folder / "password"):
            os.chown(path, user.get("user", -1), user.get("group", -1))
        line = [programs / "initdb", "-D", folder / "data", "-U", "tests", "-A", "scram-sha-256"]
        line += [f"--pwfile={folder / 'password'}", "-E", "UTF8", "--locale=C", "--no-sync"]
        made = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=240, check=False, **user)
        assert made.returncode == 0, made.stdout + made.stderr
        options = [word for key, value in SETTINGS.items() for word in ("-c", f"{key}={value}")]
        line = [programs / "postgres", "-D", folder / "data", "-p", str(port), "-k", folder, *options]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(line, cwd=folder, stdout=log, stderr=log, **user)
        try:
            uri = f"postgresql://tests:{password}@127.0.0.1:{port}/postgres"
            wait_for(lambda: answers(process, uri, folder / "log"))
            yield uri
        finally:
            stop(process)


def choose_user() -> dict[str, Any]:
    """Arguments of `subprocess` for a user other than root."""
    if os.geteuid() != 0:
        return {}
    for name in USERS:
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    pytest.skip(f"PostgreSQL does not run as root, and there is no user {' or '.join(USERS)}")


def answers(process: subprocess.Popen[bytes], uri: str, log: Path) -> bool:
    import psycopg2

    assert process.poll() is None, log.read_text()
    try:
        psycopg2.connect(uri, connect_timeout=5).close()
    except psycopg2.OperationalError:
        return False
    return True


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends it at once, with connections open: PostgreSQL's immediate shutdown."""
    process.send_signal(signal.SIGQUIT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)
