import ast
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import scaleflow
from scaleflow.cluster.network import free_ports
from scaleflow.config.compose import ComposedConfig
from scaleflow.config.plan import (
    check_micro_batches,
    make_batching,
    parse_sections,
    set_values,
)
from scaleflow.config.policies import LOOK
from scaleflow.config.unknown_keys import unknown_option_error
from scaleflow.errors import ConfigError
from scaleflow.interfaces import EarlyStopping, Plan, Strategy, Target, Training
from scaleflow.launcher.prepare import make_plan

Make = Callable[..., Plan]
Compose = Callable[..., dict[str, Any]]
EARLY = "training.early_stopping="
TARGET = {"_target_": "a.b"}


@pytest.fixture(autouse=True)
def no_store_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def refused(plan: Make) -> Callable[..., str]:
    """`refused("training.epochs=0")`: the one line that the user reads."""

    def run(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            plan(*overrides)
        message = str(caught.value)
        assert len(message.splitlines()) == 1
        return message

    return run


def test_a_number_in_quotes_is_shown_as_the_text_that_it_is(refused: Callable[..., str]) -> None:
    assert refused("training.epochs='3'") == "training.epochs='3': expected an integer, at least 1 or by_size"


def test_a_number_that_became_a_fraction_on_the_way_is_not_taken_for_an_integer(refused: Callable[..., str]) -> None:
    assert refused("training.epochs=1e2") == "training.epochs=100.0: expected an integer, at least 1 or by_size"


def test_a_whole_number_is_good_where_a_fraction_is_expected(plan: Make) -> None:
    assert plan("optimizer.learning_rate=1").optimizer.learning_rate == 1.0
    assert isinstance(plan("tracking.flush_seconds=3").tracking.flush_seconds, float)


def test_a_cluster_may_have_thousands_of_workers(compose: Compose) -> None:
    words = (
        "tracking=none",
        "strategy=multi_worker",
        "cluster=ray",
        "cluster.workers=4096",
        "cluster.min_workers=4000",
    )
    made = make_plan(ComposedConfig(compose(*words), {"strategy": "multi_worker", "cluster": "ray"}), LOOK)
    assert (made.cluster.workers, made.cluster.min_workers) == (4096, 4000)


@pytest.mark.parametrize(
    ("cluster", "strategy", "words"),
    [
        ({"worker": ["a:1", "b:2"]}, "parameter_server", "TF_CONFIG names no parameter servers"),
        ({"chief": ["a:1"], "worker": ["b:2"], "ps": ["c:3"]}, "multi_worker", "TF_CONFIG names ps"),
    ],
)
def test_tf_config_has_to_have_the_strategys_roles(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, cluster: Any, strategy: str, words: str
) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    assert words in refused(f"strategy={strategy}", "cluster=tf_config")


@pytest.mark.parametrize(
    ("cluster", "strategy"),
    [
        ({"worker": ["a:1", "127.0.0.1:2"]}, "multi_worker"),
        ({"chief": ["a:1"], "worker": ["b:2", "127.0.0.1:2"], "ps": ["c:3"]}, "parameter_server"),
    ],
)
def test_auto_follows_tf_config(plan: Make, monkeypatch: pytest.MonkeyPatch, cluster: Any, strategy: str) -> None:
    port = free_ports(1)[0]
    cluster["worker"][1] = f"127.0.0.1:{port}"
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))
    found = plan()
    assert (found.strategy.name, found.cluster.name) == (strategy, "tf_config")


def test_what_is_typed_stays_if_tf_config_chooses_the_strategy(plan: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports(1)[0]
    workers = {"worker": ["a:1", f"127.0.0.1:{port}"]}
    typed = {"cluster.stall_seconds": 77.0, "cluster.max_restarts": 3, "cluster.start_seconds": 50.0}
    words = [*(f"{key}={value}" for key, value in typed.items()), "+strategy.communication=ring"]
    task = {"cluster": workers, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    words.append("checkpoint.folder=/shared/checkpoints")
    made = plan(*words)
    cluster = made.cluster
    assert (made.strategy.name, made.strategy.communication) == ("multi_worker", "ring")
    assert (cluster.stall_seconds, cluster.max_restarts, cluster.start_seconds) == (77.0, 3, 50.0)


def test_the_number_of_workers_is_tf_config_s(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["a:1", "b:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))
    assert refused("cluster.workers=3").startswith("cluster.workers=3")


def test_a_step_needs_a_target(refused: Callable[..., str]) -> None:
    message = refused("training.step={smoothing: 0.1}")
    assert message == "training.step._target_=null: expected the dotted name of a class or function"


def test_a_step_is_read_into_its_target(plan: Make) -> None:
    made = plan("+training.step._target_=my_code.step", "+training.step.smoothing=0.1").training.step
    assert made == Target("training.step", "my_code.step", {"smoothing": 0.1})


@pytest.mark.parametrize("section", ["strategy", "hardware", "precision", "dataset", "model", "training", "tracking"])
@pytest.mark.parametrize("value", ["null", "3", "[1]"])
def test_a_section_that_holds_no_keys_is_refused(compose: Compose, section: str, value: str) -> None:
    config = {**compose("tracking=none"), section: {"null": None, "3": 3, "[1]": [1]}[value]}
    with pytest.raises(ConfigError, match=rf"^{section}=.*: expected keys under {section}"):
        make_plan(ComposedConfig(config))


def test_an_unknown_option_comes_with_the_nearest_and_all_there_are() -> None:
    message = str(unknown_option_error("strategy", "miror", ["auto", "mirrored", "one_device"]))
    assert message == "strategy=miror: there is no such option; did you mean mirrored? (auto, mirrored, one_device)"


def test_an_option_that_is_like_no_other_comes_with_all_there_are() -> None:
    assert str(unknown_option_error("model", "x", ["cnn", "mlp"])) == "model=x: there is no such option (cnn, mlp)"


def test_a_pipeline_stays_on_one_machine(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')
    message = refused("strategy=pipeline", "cluster=tf_config", "tracking=none")
    assert message.startswith("cluster=tf_config with strategy=pipeline: ")
    assert "cluster=local" in message


CAN_WORK = [
    "strategy=pipeline hardware=cpu hardware.logical_devices=2",
    "strategy=pipeline strategy.replicas=3 hardware=cpu hardware.logical_devices=6 training.global_batch_size=24",
    "strategy=pipeline strategy.stages=3 strategy.cuts=[a,b] strategy.micro_batches=8",
    "strategy=pipeline training.batch_size=50 strategy.micro_batches=1",
    "strategy=pipeline hardware=cpu hardware.logical_devices=2 training.global_batch_size=24 training.accumulate=3",
    "hardware=cpu strategy=mirrored hardware.logical_devices=4 training.global_batch_size=32",
    "hardware=cpu strategy=one_device hardware.logical_devices=3 training.global_batch_size=32",
    "hardware=cpu strategy=multi_worker hardware.logical_devices=3 training.global_batch_size=32",
    "hardware=cpu training.accumulate=4 training.global_batch_size=32",
    "strategy=mirrored hardware.logical_devices=3 training.global_batch_size=32",  # GPUs may be there
    "hardware=gpu hardware.memory_growth=false hardware.logical_devices=2 hardware.memory_limit_mb=1000",
    "optimizer.schedule=step optimizer.step_every=10",
    "training.early_stopping={monitor:train/loss} dataset.validation=null",
    "hardware.devices=[1,0]",
    "dataset.validation=test",
    "+dataset.anything=1 +model.anything=2 +optimizer.anything=3",
    "training.steps_per_loop=7",
    "training.engine=fit strategy=mirrored precision=mixed_bfloat16",
    "training.engine=fit strategy=one_device precision=mixed_float16 training.steps_per_loop=4",
]


@pytest.mark.parametrize("command", CAN_WORK)
def test_valid_command_lines_are_not_refused(plan: Make, command: str) -> None:
    plan(*command.split())


def test_unknown_keys_are_arguments_of_the_target(plan: Make) -> None:
    made = plan("model.units=[8,4]", "optimizer=lazy_adam", "+optimizer.amsgrad=true")
    assert made.model.target.path == "scaleflow.model.mlp.build"
    assert made.model.target.arguments == {"units": [8, 4], "dropout": 0.0, "batch_norm": False}
    assert made.optimizer.target.arguments == {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": True}
    assert made.optimizer.learning_rate == 0.001


def test_early_stopping_is_read_into_its_type(plan: Make) -> None:
    made = plan(EARLY + "{monitor: val/accuracy, mode: max}")
    assert made.training.early_stopping == EarlyStopping("val/accuracy", 3, "max")
    assert plan("model=tabular").training.early_stopping == EarlyStopping("auto", 20)
    typed = plan("model=tabular", EARLY + "{metric: val/auc, patience: 5}").training.early_stopping
    assert typed == EarlyStopping("val/auc", 5)
    assert plan("model=tabular", EARLY + "null").training.early_stopping is None


def test_tags_become_text(plan: Make) -> None:
    assert plan("tracking=none", "tracking.tags={team: vision, ticket: 7}").tracking.tags == {
        "team": "vision",
        "ticket": "7",
    }


@pytest.mark.parametrize(
    ("training", "replicas", "share"),
    [
        (Training(batch_size=8), 2, (8, 1, 16)),
        (Training(batch_size=8, accumulate=3), 2, (8, 3, 48)),
        (Training(global_batch_size=48, accumulate=3), 2, (8, 3, 48)),
        (Training(batch_size=99, global_batch_size=32), 4, (8, 1, 32)),
    ],
)
def test_a_global_batch_is_divided(training: Training, replicas: int, share: tuple[int, int, int]) -> None:
    made = make_batching(training, replicas)
    assert (made.batch_size, made.accumulate, made.global_size) == share


# ---------------------------------------------------------------------------------------------
# The store
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_the_store_is_a_file_in_the_current_folder_unless_told_otherwise(here: Path, plan: Make) -> None:
    assert plan("tracking=mlflow").tracking.uri == f"sqlite:///{here}/mlflow.db"
    assert not (here / "mlflow.db").exists()


def test_the_environment_names_the_store_and_the_command_overrules_it(
    here: Path, plan: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other.db")
    assert plan("tracking=mlflow").tracking.uri == f"sqlite:///{here}/other.db"
    assert plan("tracking.uri=sqlite:///mine.db").tracking.uri == f"sqlite:///{here}/mine.db"


def test_a_wrong_store_in_the_environment_is_refused_by_that_name(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    assert refused("tracking=mlflow").startswith("MLFLOW_TRACKING_URI=./mlruns: ")


def test_a_run_without_a_store_looks_at_none(plan: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    assert plan("tracking=none").tracking.uri is None


def test_a_store_file_in_a_folder_that_is_not_there(here: Path, refused: Callable[..., str]) -> None:
    message = refused("tracking.uri=sqlite:///deep/er/mlflow.db")
    assert message.startswith("tracking.uri=sqlite:///deep/er/mlflow.db: ")
    assert f"{here}/deep/er" in message


def test_a_store_file_that_is_a_folder(here: Path, refused: Callable[..., str]) -> None:
    assert f"{here}/mlflow.db" in refused(f"tracking.uri=sqlite:///{here}")


def test_a_server_that_answers_is_accepted(plan: Make, server: str) -> None:
    assert plan(f"tracking.uri=http://{server}/mlflow").tracking.uri == f"http://{server}/mlflow"


@pytest.mark.parametrize("credentials", ["", "me:sesame@", "sesame@", "me:p@sesame@", "sesame:@"])
def test_a_server_that_does_not_answer_costs_seconds_and_shows_no_password(
    refused: Callable[..., str], free_port: int, credentials: str
) -> None:
    before = time.monotonic()
    message = refused(f"tracking.uri='http://{credentials}127.0.0.1:{free_port}'")
    assert time.monotonic() - before < 60
    shown = "****@" if credentials else ""
    assert message.startswith(f"tracking.uri=http://{shown}127.0.0.1:{free_port}: ")
    assert "mlflow server" in message
    assert "sesame" not in message


def test_a_server_that_takes_and_never_answers_is_waited_for_three_seconds(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(address: tuple[str, int], timeout: float) -> socket.socket:
        assert address == ("example.org", 443)
        assert timeout <= 3
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", hang)
    assert "timed out" in refused("tracking.uri=https://example.org")


def test_a_worker_leaves_the_store_to_its_launcher(compose: Compose, free_port: int) -> None:
    uri = f"http://127.0.0.1:{free_port}"
    assert make_plan(ComposedConfig(compose(f"tracking.uri={uri}")), LOOK).tracking.uri == uri


def test_a_plan_that_a_worker_reads_again_is_the_same(plan: Make, compose: Compose) -> None:
    config = compose("model=cnn", "tracking=none", EARLY + "{monitor: train/loss}")
    first = make_plan(ComposedConfig(config, {"model": "cnn"}, ["/x"]))
    assert make_plan(ComposedConfig(first.config, first.choices, first.search), LOOK) == first


def test_an_optimizer_of_ones_own_may_have_other_arguments_of_these_names(plan: Make, refused: Any) -> None:
    mine = "optimizer._target_=mine.Averaged"
    assert plan(mine, "+optimizer.ema_momentum=0.9", "+optimizer.use_ema=false").optimizer.target.path in mine
    assert refused(mine, "+optimizer.use_ema=true").startswith("optimizer.use_ema=true: ")


def test_a_resumed_pipeline_keeps_its_batch() -> None:
    strategy = Strategy("pipeline", replicas=3)
    message = "x strategy.replicas=3; the run was started with .* another strategy.replicas and strategy.micro_batches$"
    with pytest.raises(ConfigError, match=message):
        check_micro_batches(Training(global_batch_size=32), strategy, is_resumed=True)


def test_a_target_is_no_group_and_a_column_goes_without_a_pattern(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n", encoding="utf-8")
    table = ["dataset=table", f"dataset.data_dir={tmp_path}/a.csv", "dataset.target=y"]
    for by in ("group", "hash", "column"):
        assert "the column is the target; name another" in refused(*table, f"dataset.split={{by: {by}, column: y}}")
    both = "dataset.split={by: group, column: g, pattern: p1}"
    message = refused("dataset=image_folder", f"dataset.data_dir={tmp_path}", both)
    assert "this kind of split does not use one of" in message


TWO = {"chief": ["a:1"], "worker": ["b:2"]}


@pytest.mark.parametrize(
    ("words", "role", "found"),
    [
        ((), None, {}),
        (("debug=fast", "training.epochs=9"), None, {"training.epochs": 1, "training.max_steps": 1}),
        ((f"{EARLY}{{patience: 2, restore_best: true}}",), None, {"checkpoint.export": "best"}),
        (("cluster=ray", "cluster.workers=4"), None, {"strategy.name": "multi_worker"}),
        (("cluster.stall_seconds=60",), "chief", {"cluster.stall_seconds": 60.0, "cluster.name": "tf_config"}),
        (("hardware.tpu=grpc://host:8470",), None, {"strategy.name": "tpu", "hardware.name": "tpu"}),
    ],
)
def test_what_the_plan_resolves_is_in_its_config_too(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, words: Any, role: str | None, found: dict[str, Any]
) -> None:
    if role is not None:
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": TWO, "task": {"type": role, "index": 0}}))
    made = make_plan(ComposedConfig(compose(*words), {"optimizer": "tabular"}), LOOK)
    changed = set_values(made, {"training.batch_size": 48, "optimizer.schedule": "constant", "optimizer.plateau": None})
    for each in (made, changed):
        for name, section in parse_sections(each.config).items():
            assert section == getattr(each, name), name
        for key, value in found.items():
            group, name = key.split(".")
            assert each.config[group][name] == getattr(getattr(each, group), name) == value, key
    assert changed.config["training"]["batch_size"] == 48


def test_only_one_function_changes_a_section_of_a_plan() -> None:
    """The address of the store is an exception: it is a place of this machine, which its launcher reads."""
    sections = {*parse_sections({"dataset": TARGET, "model": TARGET, "optimizer": TARGET}), "config"}
    found = set()
    for path in (Path(scaleflow.__file__).parent).rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and call.args and ast.unparse(call.func).endswith("replace")):
                continue
            if ast.unparse(call.args[0]).endswith("plan"):
                found |= {(path.stem, str(each.arg)) for each in call.keywords if each.arg in sections}
    assert found == {("prepare", "tracking"), ("plan", "config")}
