"""Connects to object stores, `s3://`, `gs://` and `abfs://`, with pyarrow's file systems, and explains their errors.

Endpoints and credentials come from the environment, and from the files and services that each store's own tools use.
pyarrow is imported inside the functions, because most runs use only local paths.
"""

import os
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

from scaleflow.errors import ConfigError

#: Scheme of an address -> variables to set if the store refuses a request.
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), and AWS_ENDPOINT_URL for a store of your own",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or STORAGE_EMULATOR_HOST for an emulator",
    "abfs": "AZURE_STORAGE_ACCOUNT, and AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, and AZURE_STORAGE_ENDPOINT for a "
    "store of your own",
}

#: Time limits in seconds: for a connection, a request, and an answer with all retries.
CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 20.0
ANSWER_SECONDS = 60.0

#: Attempts before a request fails.
ATTEMPTS = 3

#: The name and the password of a user in an address.
USER = re.compile(r"^\w+://[^/]*:[^/]*@")

T = TypeVar("T")


def is_store_address(value: Any) -> bool:
    """Returns whether a config value is an address rather than a path."""
    return isinstance(value, str) and "://" in value


def split_address(key: str, address: str) -> tuple[str, str]:
    """Returns the scheme of an address, and its path without trailing slashes.

    Raises ConfigError if the address has another scheme or contains credentials. `key` starts the message.
    """
    if USER.match(address):
        raise ConfigError(f"{key}: an address must not contain credentials; set them in the environment")
    scheme, _, path = address.partition("://")
    if scheme not in CREDENTIALS:
        raise ConfigError(f"{key}={address}: expected a path, or an address with {', '.join(CREDENTIALS)}://")
    return scheme, path.rstrip("/")


def call_store(key: str, address: str, call: Callable[[], T], seconds: float = ANSWER_SECONDS) -> T:
    """Runs `call`, which sends requests to a store, and returns its result.

    Raises ConfigError if the call fails or takes more than `seconds`. The message contains `key` and `address`.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    reason = explain_store_error(errors[0]) if errors else f"the store did not answer within {seconds:.0f} s"
    credentials = CREDENTIALS[address.partition("://")[0]]
    raise ConfigError(f"{key}={address}: {reason}; check the address, and set {credentials}")


def explain_store_error(error: Exception) -> str:
    """Explains a store's error in a few words, without credentials."""
    text = " ".join(str(error).split())
    denied = r"ACCESS_DENIED|HTTP status 403|INVALID_ACCESS_KEY|SIGNATURE|Forbidden|[Cc]redential"
    if re.search(rf"{denied}|Status\((PERMISSION_DENIED|UNAUTHENTICATED)", text):
        return "the store refused the request (access denied)"
    if re.search(r"NO_SUCH_BUCKET|RESOURCE_NOT_FOUND|does not exist|No such file|Status\(NOT_FOUND", text, re.I):
        return "there is no such bucket or prefix"
    if re.search(r"NETWORK_CONNECTION|REQUEST_TIMEOUT|curlCode|Status\(UNAVAILABLE|Could not connect", text):
        return "the store does not answer there"
    text = re.sub(r"^When .*? AWS Error (\w+) during (\w+) operation: |\(Request ID: .*?\)", r"\1 ", text).strip()
    reason = re.sub(r"(?i)(key|token|signature|secret)(=|: )\S+", r"\1\2...", text)
    return reason if len(reason) <= 200 else f"{reason[:197]}..."


def split_endpoint(address: str | None) -> tuple[str, str] | None:
    """Splits an endpoint such as http://127.0.0.1:9023 into scheme and HOST:PORT; None if there is no endpoint."""
    if not address:
        return None
    scheme, _, host = address.rpartition("://")
    return scheme or "http", host.rstrip("/")


@lru_cache
def connect(scheme: str) -> Any:
    """Returns pyarrow's file system of a store. Raises ConfigError if this pyarrow was built without it."""
    from pyarrow import fs

    environment = os.environ
    try:
        if scheme == "s3":
            return fs.S3FileSystem(
                region=environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or None,
                endpoint_override=environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or None,
                connect_timeout=CONNECT_SECONDS,
                request_timeout=REQUEST_SECONDS,
                retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
                background_writes=False,  # background writes fill the memory if writing is faster than sending
            )
        if scheme == "gs":
            endpoint = split_endpoint(environment.get("STORAGE_EMULATOR_HOST"))  # the variable of Google's tools
            options = dict(zip(("scheme", "endpoint_override"), endpoint, strict=True)) if endpoint else {}
            limit = timedelta(seconds=REQUEST_SECONDS)
            return fs.GcsFileSystem(anonymous=bool(endpoint), retry_time_limit=limit, **options)
        endpoint = split_endpoint(environment.get("AZURE_STORAGE_ENDPOINT"))
        names = ("blob_storage_scheme", "blob_storage_authority"), ("dfs_storage_scheme", "dfs_storage_authority")
        options = {}
        if endpoint:
            for scheme_name, authority_name in names:
                options[scheme_name], options[authority_name] = endpoint
        return fs.AzureFileSystem(
            account_name=environment.get("AZURE_STORAGE_ACCOUNT", ""),
            account_key=environment.get("AZURE_STORAGE_KEY"),
            sas_token=environment.get("AZURE_STORAGE_SAS_TOKEN"),
            **options,
        )
    except (AttributeError, ImportError) as error:
        raise ConfigError(f"this pyarrow has no file system for {scheme}://") from error
