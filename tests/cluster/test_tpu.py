"""Where the TPU is: told from the config, the environment and device files alone."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scaleflow.cluster import tpu
from scaleflow.cluster.tpu import (
    VARIABLES,
    TpuAddress,
    explain_no_tpu,
    explain_unreachable,
    find_tpu,
    is_sure,
)
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`devices("accel0")`: a machine with these files in /dev, and no others."""
    monkeypatch.setattr(tpu, "ROOT", tmp_path)

    def make(*names: str) -> None:
        for name in names:
            path = tmp_path / "dev" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    make()
    return make


FROM_ENVIRONMENT = [
    ({"TPU_NAME": "mine"}, TpuAddress("mine", "TPU_NAME")),
    ({"TPU_NAME": "local"}, TpuAddress("local", "TPU_NAME")),
    ({"TPU_NAME": "grpc://10.0.0.2:8470"}, TpuAddress("grpc://10.0.0.2:8470", "TPU_NAME")),
    (
        {"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://a:8470,grpc://b:8470", "TPU_NAME": "mine"},
        TpuAddress("grpc://a:8470,grpc://b:8470", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"),
    ),
    ({"COLAB_TPU_ADDR": "10.0.0.2:8470"}, TpuAddress("grpc://10.0.0.2:8470", "COLAB_TPU_ADDR")),
    ({"TPU_WORKER_HOSTNAMES": "localhost"}, TpuAddress("local", "TPU_WORKER_HOSTNAMES")),
    ({"TPU_NAME": " "}, None),
    ({}, None),
]


@pytest.mark.parametrize(("environment", "found"), FROM_ENVIRONMENT, ids=str)
def test_the_environment_names_the_tpu(
    devices: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    found: TpuAddress | None,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_tpu(None) == found
    assert find_tpu("grpc://other:1") == TpuAddress("grpc://other:1", "hardware.tpu")


def of_tensorflow(environment: dict[str, str]) -> str:
    """The name that TensorFlow's own client reads out of the environment."""
    import os

    from tensorflow.python.tpu.client import client

    os.environ.update(environment)
    return str(client._get_tpu_name(None))


def test_the_order_of_variables_is_tensorflow_s_own(
    isolated: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"TPU_NAME": "grpc://a:1", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://b:1"}
    for name, value in both.items():
        monkeypatch.setenv(name, value)
    found = find_tpu(None)
    assert found is not None
    assert found.address == isolated(of_tensorflow, both) == "grpc://b:1"


def test_several_hosts_without_an_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t1v-0,t1v-1")
    with pytest.raises(
        ConfigError, match=r"TPU_WORKER_HOSTNAMES=t1v-0,t1v-1: names 2 hosts .*hardware\.tpu=grpc://HOST"
    ):
        find_tpu(None)


@pytest.mark.parametrize("file", ["accel0", "vfio/0"])
def test_a_device_file_is_a_tpu_of_this_machine(devices: Callable[..., None], file: str) -> None:
    devices(file)
    found = find_tpu(None)
    assert found is not None
    assert found.address == "local"
    assert found.origin.endswith(f"dev/{file}")
    assert explain_unreachable(found) is None


def test_the_container_of_vfio_devices_is_none_itself(devices: Callable[..., None]) -> None:
    devices("vfio/vfio", "accel")
    assert find_tpu(None) is None


def test_device_files_are_taken_unasked_where_tpu_s_library_is_there(
    devices: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices("vfio/0")
    found = find_tpu(None)
    assert found is not None
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    assert not is_sure(found)
    (tmp_path / "libtpu.so").write_text("")
    assert is_sure(found)


WRONG = {
    "10.0.0.1:8470": "write grpc://10.0.0.1:8470",
    "grpc://": "expected grpc://HOST:8470, local, a name, or null",
    "": "expected grpc://HOST:8470, local, a name, or null",
}


@pytest.mark.parametrize("address", WRONG)
def test_an_address_that_would_be_taken_for_something_else(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_tpu(address)
    assert str(caught.value).startswith(f"hardware.tpu={address}: ")
    assert WRONG[address] in str(caught.value)


def test_where_nothing_is_found_it_is_said_where_was_looked(devices: Callable[..., None]) -> None:
    for place in ("hardware.tpu", *VARIABLES, "/dev/accel*", "/dev/vfio/*", "strategy=mirrored"):
        assert place in explain_no_tpu()
    assert "/dev/accel* and no /dev/vfio/*" in str(explain_unreachable(TpuAddress("local", "TPU_NAME")))


def test_every_endpoint_has_to_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        up, down = (f"grpc://127.0.0.1:{s.getsockname()[1]}" for s in (listener, closed))
        assert explain_unreachable(TpuAddress(up, "hardware.tpu")) is None
        assert f"nothing answers at {down} (Connection refused)" in str(
            explain_unreachable(TpuAddress(f"{up},{down}", "x"))
        )


def test_an_address_that_swallows_is_given_up_after_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(address: tuple[str, int], timeout: float) -> socket.socket:
        assert address == ("example.org", 8470)
        assert timeout <= 3
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", hang)
    assert "grpc://example.org (timed out)" in str(
        explain_unreachable(TpuAddress("grpc://example.org", "hardware.tpu"))
    )


def test_a_name_needs_google_s_metadata_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    before = time.monotonic()
    reason = str(explain_unreachable(TpuAddress("mine", "TPU_NAME")))
    assert time.monotonic() - before < 60
    assert "127.0.0.1:1" in reason
    assert "hardware.tpu=grpc://HOST:8470" in reason


# ---------------------------------------------------------------------------------------------
# What the plan makes of it
# ---------------------------------------------------------------------------------------------


def test_auto_takes_the_tpu_that_is_there(
    plan: Callable[..., Plan], devices: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert plan().strategy.name == "auto"
    devices("accel0")
    assert plan().strategy.name == "auto"  # other hardware may be called that
    monkeypatch.setenv("TPU_NAME", "local")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path))
    made = plan("precision=mixed")
    assert (made.strategy.name, made.hardware.name, made.hardware.tpu) == ("tpu", "tpu", "local")
    for word in ("strategy=one_device", "strategy=mirrored", "strategy=multi_worker", "hardware=cpu", "hardware=gpu"):
        assert plan(word).hardware.name != "tpu", word


@pytest.mark.parametrize("word", ["strategy=tpu", "hardware=tpu", "hardware.tpu=local"])
def test_one_word_asks_for_the_tpu(plan: Callable[..., Plan], devices: Callable[..., None], word: str) -> None:
    devices("accel0")
    made = plan(word)
    assert (made.strategy.name, made.hardware.name, made.hardware.tpu) == ("tpu", "tpu", "local")


@pytest.mark.parametrize("word", ["strategy=tpu", "hardware=tpu"])
def test_without_one_it_is_refused(plan: Callable[..., Plan], devices: Callable[..., None], word: str) -> None:
    with pytest.raises(ConfigError, match=r"=tpu: there is no TPU: looked for hardware\.tpu, "):
        plan(word)


def test_a_tpu_goes_before_tf_config(plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    workers = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", workers)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("TPU_NAME", f"grpc://127.0.0.1:{listener.getsockname()[1]}")
        assert plan().strategy.name == "tpu"
    monkeypatch.delenv("TPU_NAME")
    assert plan().strategy.name == "multi_worker"
