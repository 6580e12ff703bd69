"""Finds and opens files in object stores: `s3://`, `gs://` and `abfs://`, with pyarrow's file systems.

Endpoints and credentials come from the environment, and from the files and services that each store's own tools use.
pyarrow is imported inside the functions, because only tables in object stores need it.
"""

from __future__ import annotations

import fnmatch
import os
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

from scaleflow.dataset.files import ALL, divide_files, has_suffix
from scaleflow.errors import ConfigError

#: Scheme of an address -> what to set if the store refuses a request.
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), and AWS_ENDPOINT_URL for a store of your own",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "abfs": "AZURE_STORAGE_ACCOUNT, and AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
}

#: Time limits: of a connection, of a request, and of the list of the files with all repetitions. In seconds.
CONNECT_SECONDS, REQUEST_SECONDS, LIST_SECONDS = 5.0, 20.0, 60.0

#: How often a request is made until it fails.
ATTEMPTS = 3

#: The name and the password of a user in an address.
USER = re.compile(r"^\w+://[^/]*:[^/]*@")


def is_address(data_dir: Any) -> bool:
    return isinstance(data_dir, str) and "://" in data_dir


def find_in_store(address: str, suffixes: Sequence[str]) -> dict[str, list[str]]:
    """Returns the addresses of the files of each split, or all of them as `all`, as `find_files` does for a folder.

    Args:
        address: `s3://BUCKET/PATH` and the like: a file, a glob, or a prefix.
        suffixes: what names below a prefix must end with.

    Raises ConfigError if there is no such file, or if the store does not answer or refuses the request.
    """
    if USER.match(address):
        raise ConfigError("dataset.data_dir: an address must not contain credentials; set them in the environment")
    scheme, _, path = address.partition("://")
    if scheme not in CREDENTIALS:
        raise ConfigError(
            f"dataset.data_dir={address}: expected a path, or an address with {', '.join(CREDENTIALS)}://"
        )
    path = path.rstrip("/")
    base = re.split(r"[*?\[]", path, maxsplit=1)[0]
    is_glob = base != path
    root = base.rpartition("/")[0] if is_glob else path
    if not root:
        raise ConfigError(f"dataset.data_dir={address}: expected the name of a bucket without * and ?")
    names = call_store(address, lambda: list_files(scheme, root))
    if is_glob:
        names = [name for name in names if fnmatch.fnmatchcase(name, path)]
    if is_glob or names == [root]:
        by_split = {ALL: names}
    else:
        found = [name for name in names if has_suffix(name, suffixes)]
        relative = [(name, PurePosixPath(name).relative_to(root)) for name in found if "/." not in name]
        by_split = divide_files(address, relative, suffixes)
    if not names:
        raise ConfigError(f"dataset.data_dir={address}: there is no such file or prefix")
    return {split: [f"{scheme}://{name}" for name in each] for split, each in by_split.items()}


def list_files(scheme: str, root: str) -> list[str]:
    """Returns the sorted names of the files that are below a prefix, or the prefix if it is a file."""
    from pyarrow import fs

    system = connect(scheme)
    if system.get_file_info(root).type == fs.FileType.File:
        return [root]
    infos = system.get_file_info(fs.FileSelector(root, recursive=True))
    return sorted(info.path for info in infos if info.type == fs.FileType.File)


def open_in_store(address: str) -> Any:
    """Opens a file for reading at any position."""
    scheme, _, path = address.partition("://")
    return connect(scheme).open_input_file(path)


def call_store(address: str, call: Callable[[], list[str]]) -> list[str]:
    """Returns the result of requests to a store; raises ConfigError if they fail, or take more than `LIST_SECONDS`."""
    results: list[list[str]] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    scheme = address.partition("://")[0]
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIST_SECONDS)
    if results:
        return results[0]
    reason = explain_store_error(errors[0]) if errors else f"the store did not answer within {LIST_SECONDS:.0f} s"
    raise ConfigError(f"dataset.data_dir={address}: {reason}; check the address, and set {CREDENTIALS[scheme]}")


def explain_store_error(error: Exception) -> str:
    """Returns the reason of a store's error, without credentials."""
    text = " ".join(str(error).split())
    if "NO_SUCH_BUCKET" in text or "does not exist" in text.lower() or "Path does not exist" in text:
        return "there is no such bucket or prefix"
    if re.search(r"ACCESS_DENIED|HTTP status 403|INVALID_ACCESS_KEY|SIGNATURE|Forbidden|[Cc]redential", text):
        return "the store refused the request (access denied)"
    reason = re.sub(r"(?i)(key|token|signature|secret)(=|: )\S+", r"\1\2...", text)
    return reason if len(reason) <= 200 else f"{reason[:197]}..."


@lru_cache
def connect(scheme: str) -> Any:
    """Returns pyarrow's file system of a store. Raises ConfigError if this pyarrow was built without it."""
    from pyarrow import fs

    environment = os.environ
    if scheme == "s3":
        return fs.S3FileSystem(
            region=environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or None,
            endpoint_override=environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or None,
            connect_timeout=CONNECT_SECONDS,
            request_timeout=REQUEST_SECONDS,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        )
    try:
        if scheme == "gs":
            return fs.GcsFileSystem(retry_time_limit=timedelta(seconds=REQUEST_SECONDS))
        return fs.AzureFileSystem(
            account_name=environment.get("AZURE_STORAGE_ACCOUNT", ""),
            account_key=environment.get("AZURE_STORAGE_KEY"),
            sas_token=environment.get("AZURE_STORAGE_SAS_TOKEN"),
        )
    except (AttributeError, ImportError) as error:
        raise ConfigError(f"dataset.data_dir={scheme}://...: this pyarrow has no file system for it") from error
