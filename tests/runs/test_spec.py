import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scaleflow.config.plan import parse_sections
from scaleflow.interfaces import Plan, secret_masking
from scaleflow.interfaces.secret_masking import mask_secrets, remember_secrets
from scaleflow.runs import RunSpec
from scaleflow.worker.evaluate import EvaluateModel
from scaleflow.worker.tasks import TrainModel


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The secrets that this process knows; none at first."""
    secrets: set[str] = set()
    monkeypatch.setattr(secret_masking, "_known", secrets)
    secret_masking._compile_known.cache_clear()
    yield secrets
    secret_masking._compile_known.cache_clear()


def test_the_whole_spec_survives(plan: Callable[..., Plan], tmp_path: Path, known: set[str]) -> None:
    words = ("model=cnn", "strategy=mirrored", "training.early_stopping={monitor: val/loss}", "hardware.devices=[0,1]")
    task = EvaluateModel("/x/model.keras", "models:/net/1", "test", precision=True)
    spec = RunSpec(plan(*words), tmp_path, 1.5, task, 2, 3, "/sweep", "units=3")
    line = spec.to_line()
    assert RunSpec.from_line(line) == spec
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")


def test_keys_that_only_the_launcher_needs_are_not_sent(
    plan: Callable[..., Plan], tmp_path: Path, known: set[str]
) -> None:
    spec = RunSpec(
        plan(), tmp_path, 0.0, TrainModel(), environment={"A": "of-a-job"}, server="/socket", tags={"team": "vision"}
    )
    received = RunSpec.from_line(spec.to_line({"A": "of-a-job"}))
    assert received == RunSpec(spec.plan, tmp_path, 0.0, TrainModel())


def test_a_process_is_sent_only_the_secrets_of_its_config_and_environment(
    plan: Callable[..., Plan], tmp_path: Path, known: set[str]
) -> None:
    remember_secrets(["of-the-launcher", "of-the-config", "of-the-environment", "of-the-store"])
    uri = "tracking.uri=http://me:of-the-store@host"
    spec = RunSpec(plan("+optimizer.api_key=of-the-config", uri, "tracking.offline=true"), tmp_path, 0.0, TrainModel())
    line = spec.to_line({"HUB": "of-the-environment"})
    sent = base64.b64decode(line)
    assert b"of-the-config" in sent
    assert b"of-the-environment" in sent
    assert b"of-the-store" not in sent
    assert b"of-the-launcher" not in sent
    known.clear()
    secret_masking._compile_known.cache_clear()
    received = RunSpec.from_line(line)
    assert known == {"of-the-config", "of-the-environment"}
    assert mask_secrets("it is of-the-environment") == "it is ****"
    assert received.plan.tracking.uri == "http://****@host"
    assert received.plan.config["tracking"]["uri"] == "http://****@host"
    assert parse_sections(received.plan.config, ["tracking"]) == {"tracking": received.plan.tracking}
    assert received.plan.config["optimizer"]["api_key"] == "of-the-config"
    assert spec.plan.tracking.uri == "http://me:of-the-store@host"  # the launcher still has it


def test_a_password_of_the_store_that_is_also_a_word_of_the_config_masks_no_other_key(
    plan: Callable[..., Plan], tmp_path: Path, known: set[str]
) -> None:
    remember_secrets(["mlflow"])
    spec = RunSpec(plan("tracking.uri=http://mlflow:mlflow@host", "tracking.offline=true"), tmp_path, 0.0, TrainModel())
    received = RunSpec.from_line(spec.to_line()).plan.tracking
    assert (received.name, received.uri) == ("mlflow", "http://****@host")
