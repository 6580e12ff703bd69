"""The emulators of Google's and Azure's object stores, on this machine."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.object_store import find_port, run_server
from tests.processes import ROOT

#: The account of Azure's emulator, with the key that its documentation publishes.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

#: Google's emulator serves one connection at a time, and a client keeps several: here each has a thread.
THREADED = """
import http.server
import runpy
http.server.HTTPServer = http.server.ThreadingHTTPServer
runpy.run_module("gcp_storage_emulator", run_name="__main__")
"""


@contextlib.contextmanager
def serve_google(folder: Path, bucket: str) -> Iterator[dict[str, str]]:
    """Serves an empty bucket of Google's store; yields the variables of its clients."""
    pytest.importorskip("gcp_storage_emulator")
    port = find_port()
    words = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory", f"--default-bucket={bucket}"]
    with run_server([sys.executable, "-c", THREADED, *words], port, folder / "google.log"):
        yield {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}


@contextlib.contextmanager
def serve_azure(folder: Path, container: str) -> Iterator[dict[str, str]]:
    """Serves an empty container of Azure's store; yields the variables of its clients."""
    installed = ROOT / "build" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    program = shutil.which("azurite-blob") or (str(installed) if installed.exists() else None)
    if program is None:
        pytest.skip("Azurite is not installed: npm install --prefix build/azurite azurite")
    port = find_port()
    words = ["--silent", "--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    words += ["--disableTelemetry", "--skipApiVersionCheck"]
    with run_server([program, *words], port, folder / "azure.log"):
        variables = {"AZURE_STORAGE_ACCOUNT": ACCOUNT, "AZURE_STORAGE_KEY": KEY}
        variables["AZURE_STORAGE_ENDPOINT"] = f"http://127.0.0.1:{port}"
        make_container(container, port)
        yield variables


def make_container(name: str, port: int) -> None:
    from pyarrow import fs

    address = f"127.0.0.1:{port}"
    fs.AzureFileSystem(
        ACCOUNT,
        account_key=KEY,
        blob_storage_scheme="http",
        blob_storage_authority=address,
        dfs_storage_scheme="http",
        dfs_storage_authority=address,
    ).create_dir(name)
