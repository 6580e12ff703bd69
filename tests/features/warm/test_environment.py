"""What an interpreter takes in when it starts decides which commands share a server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaleflow.launcher.processes.fork_server import forget_hidden_modules
from scaleflow.launcher.processes.handover import digest_interpreter, find_sockets_folder
from tests.conftest import clean_environment
from tests.processes import call


def test_a_variable_that_counts_at_import_asks_for_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest_interpreter(())
    monkeypatch.setenv("TF_CONFIG", "{}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere.db")
    assert digest_interpreter(()) == first
    assert digest_interpreter(["-O"]) != first
    for name in ("TF_ENABLE_ONEDNN_OPTS", "OMP_NUM_THREADS", "PYTHONPATH"):
        with monkeypatch.context() as each:
            each.setenv(name, "1")
            assert digest_interpreter(()) != first


def test_the_path_of_a_socket_is_short_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes 107 bytes."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    for length in range(40, 120):
        monkeypatch.setenv("TMPDIR", "/" + "x" * length)
        assert len(str(find_sockets_folder().with_name("scaleflow-4294967294") / f"{'0' * 16}.socket")) <= 107


def test_a_module_beside_the_command_hides_a_package(tmp_path: Path) -> None:
    assert call(import_yaml, tmp_path) == (str(tmp_path / "yaml.py"), True)


def import_yaml(folder: Path) -> tuple[str, bool]:
    """Returns the file of the module `yaml` after one was written to the first place to look, and more."""
    (folder / "yaml.py").write_text("")
    (folder / "json.py").write_text("")  # Python's own module stays
    (folder / "keras").mkdir()  # no package hides the other
    sys.path.insert(0, str(folder))
    forget_hidden_modules([str(folder)])
    import json

    import yaml

    assert "keras" in sys.modules
    return str(yaml.__file__), hasattr(json, "dumps")


#: Names that what is imported reads without an effect on a run. `tqdm` reads all variables for those of its own.
HARMLESS = """
    TEMP TEST_ TMP PATH b'PATH' PSUTIL_DEBUG PYPARSING PY_SAX_PARSER SOURCE_DATE_EPOCH MLFLOW_WEBHOOK _MLFLOW _PYTHON
    ENABLE_RUNTIME_UPTIME_TELEMETRY MPLBACKEND XDG_RUNTIME_DIR
"""

#: Imports what the server imports, and prints the other variables that are read meanwhile, with the reader.
SPY = f"""
import os, sys
variables = type(os.environ)
read = variables.__getitem__
readers = {{}}

def spy(self, name):
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith("<frozen") or frame.f_code.co_name in ("get", "getenv", "__contains__"):
        frame = frame.f_back
    readers.setdefault(str(name), frame.f_code.co_filename)
    return read(self, name)

variables.__getitem__ = spy
from scaleflow.features.warm import server
server.import_all()
from scaleflow.launcher.processes.handover import IMPORT_PREFIXES
known = (*IMPORT_PREFIXES, *{HARMLESS.split()!r})
for name, reader in sorted(readers.items()):
    is_harmless = any(each in reader for each in ("/mlflow/telemetry/", "/mlflow/agent/", "/tqdm/"))
    if not name.startswith(known) and not is_harmless:
        print(name, reader)
"""


@pytest.mark.slow
def test_all_variables_that_are_read_at_the_import_count(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPY],
        cwd=tmp_path,
        env={**clean_environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
