import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scaleflow.cluster.network import free_ports
from scaleflow.config.parse import unknown_option_error
from scaleflow.config.plan import check_pipeline_batch, find_batch_multiple, make_batching
from scaleflow.errors import ConfigError
from scaleflow.interfaces import EarlyStopping, Plan, Strategy, Target, Training
from scaleflow.launcher.prepare import make_plan

Make = Callable[..., Plan]
Compose = Callable[..., dict[str, Any]]
EARLY = "training.early_stopping="


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


AT_LEAST_1 = "expected an integer, at least 1"

WRONG_VALUES = {
    "training.epochs=abc": AT_LEAST_1,
    "training.epochs=true": AT_LEAST_1,
    "training.epochs=1.5": AT_LEAST_1,
    "training.epochs=null": AT_LEAST_1,
    "training.epochs=0": AT_LEAST_1,
    "training.epochs=-1": AT_LEAST_1,
    "training.epochs=[1]": AT_LEAST_1,
    "training.epochs={a: 1}": AT_LEAST_1,
    "training.batch_size=0": f"{AT_LEAST_1} or auto",
    "training.batch_size=2147483648": "expected an integer, at most 2147483647",
    "hardware.devices=[99999999999]": "expected an integer, at most 2147483647",
    "training.accumulate=-2": AT_LEAST_1,
    "training.global_batch_size=0": f"{AT_LEAST_1}, or null",
    "training.steps_per_epoch=0": f"{AT_LEAST_1}, or null",
    "training.max_steps=-5": f"{AT_LEAST_1}, or null",
    "training.steps_per_loop=0": "expected an integer, at least 1 or auto",
    "training.steps_per_loop=many": "expected an integer, at least 1 or auto",
    "training.clip_norm=0": "expected a number, above 0.0, or null",
    "training.clip_norm=-1.0": "expected a number, above 0.0, or null",
    "training.clip_norm=.inf": "expected a number, above 0.0, or null",
    "training.engine=keras": "expected one of loop, fit",
    "training.step=3": "expected {_target_: the dotted name of a class or function, and its arguments}, or null",
    "training.step=my_code.step": "expected {_target_: the dotted name",
    "objective.loss=3": "expected {_target_: the dotted name of a class or function, and its arguments} or a short "
    "name or {NAME: ",
    "objective.loss_weights={age: heavy}": "expected {NAME: a number, at least 0.0}, or null",
    "objective.metrics={_target_: keras.metrics.AUC}": "expected a list such as [auc, {_target_: ",
    "objective.class_weight=balancd": "expected balanced or {NAME: a number, at least 0.0} or {NAME: balanced or {",
    "objective.class_weight={0: -1}": "expected balanced or {NAME: a number, at least 0.0}",
    "objective.label_smoothing=1.5": "expected a number, at least 0.0, at most 1.0",
    "training.early_stopping=3": "expected {monitor, patience, mode}, or null",
    "training.early_stopping.patience=0": AT_LEAST_1,
    "training.early_stopping.mode=up": "expected one of auto, min, max",
    "hardware.logical_devices=0": AT_LEAST_1,
    "hardware.logical_devices=two": AT_LEAST_1,
    "hardware.memory_growth=1": "expected true or false",
    "hardware.deterministic=yes": "expected true or false",
    "hardware.xla=1": "expected true or false or auto",
    "hardware.remat=auto": "expected true or false or a list such as [a, b]",
    "hardware.remat=[1]": "expected true or false or a list such as [a, b]",
    "hardware.remat=[]": "the list names no layers; name layers, such as hardware.remat=[block*]",
    "hardware.intra_op_threads=0": f"{AT_LEAST_1}, or null",
    "hardware.inter_op_threads=-1": f"{AT_LEAST_1}, or null",
    "hardware.devices=0": "expected a list such as [0, 1], or null",
    "hardware.devices=[a]": "expected a list such as [0, 1], or null",
    "hardware.devices=[true]": "expected a list such as [0, 1], or null",
    "hardware.devices=[]": "give at least one index, or null for all devices",
    "hardware.devices=[-1]": "give different indices, counted from 0",
    "hardware.devices=[0, 0]": "give different indices, counted from 0",
    "dataset.limit=0": f"{AT_LEAST_1}, or null",
    "dataset.limit=some": f"{AT_LEAST_1}, or null",
    "dataset.validation=true": "expected a number or text, or null",
    "dataset.validation=1": "give a fraction from 0 to less than 1",
    "dataset.validation=-0.1": "give a fraction from 0 to less than 1",
    "optimizer.learning_rate=0": "expected a number, above 0.0",
    "optimizer.learning_rate=-0.1": "expected a number, above 0.0",
    "optimizer.learning_rate=.nan": "expected a number, above 0.0",
    "optimizer.learning_rate=fast": "expected a number, above 0.0",
    "optimizer.schedule=linear": "expected one of constant, cosine, step",
    "optimizer.final_rate=2": "expected a number, at least 0.0, at most 1.0",
    "optimizer.warmup_steps=-1": "expected an integer, at least 0",
    "optimizer.scale=square": "expected one of none, linear, sqrt",
    "optimizer.base_batch_size=0": AT_LEAST_1,
    "tracking.experiment=null": "expected text",
    "tracking.tags=3": "expected keys and values",
    "tracking.flush_seconds=-1": "expected a number, at least 0.0",
    "+strategy.stages=1": "expected an integer, at least 2",
    "+strategy.micro_batches=0": AT_LEAST_1,
    "+strategy.cuts=dense": "expected a list such as [a, b], or null",
    "+strategy.cuts=[1]": "expected a list such as [a, b], or null",
    "strategy.name=miror": "expected one of auto, one_device, mirrored",
    "precision.name=float64": "expected one of float32, mixed, mixed_float16, mixed_bfloat16",
    "model._target_=null": "expected the dotted name of a class or function",
    "model._target_=3": "expected the dotted name of a class or function",
    "seed=-1": "expected an integer, at least 0",
    "seed=2147483648": "at most 2147483647",
    "seed=1.5": "expected an integer",
    "debug.inline=maybe": "expected true or false",
}


@pytest.mark.parametrize("override", WRONG_VALUES)
def test_a_wrong_value_is_refused_by_its_key_with_what_would_work(refused: Callable[..., str], override: str) -> None:
    key, _, value = override.removeprefix("+").partition("=")
    base = (EARLY + "{monitor: train/loss, patience: 1, mode: auto}",) if key.startswith("training.early_") else ()
    message = refused(*base, override)
    assert message.startswith(f"{key}=")
    assert WRONG_VALUES[override] in message
    if value.isalpha() and value not in ("null", "true"):
        assert message.startswith(f"{key}={value}: ")


def test_a_number_in_quotes_is_shown_as_the_text_that_it_is(refused: Callable[..., str]) -> None:
    assert refused("training.epochs='3'") == "training.epochs='3': expected an integer, at least 1"


def test_a_number_that_became_a_fraction_on_the_way_is_not_taken_for_an_integer(refused: Callable[..., str]) -> None:
    assert refused("training.epochs=1e2") == "training.epochs=100.0: expected an integer, at least 1"


def test_a_whole_number_is_good_where_a_fraction_is_expected(plan: Make) -> None:
    assert plan("optimizer.learning_rate=1").optimizer.learning_rate == 1.0
    assert isinstance(plan("tracking.flush_seconds=3").tracking.flush_seconds, float)


SERVED = "strategy=parameter_server"
SHARDS = "strategy.partitioner.max_shards"
PROCESSES = {
    (
        "strategy=mirrored",
        "cluster.workers=2",
    ): "cluster.workers=2 with strategy=mirrored: this strategy runs in one process",
    (
        "strategy=multi_worker",
        "cluster.servers=2",
    ): "cluster.servers=2 with strategy=multi_worker: this strategy has no",
    (
        "strategy=multi_worker",
        "cluster.workers=65",
    ): "cluster.workers=65 with cluster=local: one machine runs at most 64 workers; use cluster=ray",
    ("strategy=multi_worker", "cluster=ray", "cluster.workers=4097"): "expected an integer, at least 1, at most 4096",
    (SERVED, "hardware.logical_devices=2"): "each worker is one replica on one device; use more",
    (SERVED, "debug=inline"): f"debug.inline=true with {SERVED}: each worker needs its own process",
    (SERVED, "cluster.servers=0"): "cluster.servers=0: expected an integer, at least 1",
    (SERVED, f"{SHARDS}=0"): f"{SHARDS}=0: expected an integer, at least 1",
    ("strategy=mirrored", f"+{SHARDS}=2"): f"{SHARDS}=2 with strategy=mirrored: this strategy has no parameter servers",
    ("strategy=mirrored", "+strategy.communication=ring"): "this strategy has no workers that communicate",
    ("strategy=multi_worker", "strategy.communication=nccl", "hardware=cpu"): "NCCL works only between GPUs; use ring",
    (SERVED, "cluster=tf_config"): "TF_CONFIG is not set",
    (SERVED, "hardware.xla=true"): "an XLA program cannot read variables on another machine",
    (
        "strategy=pipeline",
        "training.step={_target_: a.b}",
    ): "training.step._target_=a.b with strategy=pipeline: a custom step calls",
    ("strategy=pipeline", "hardware.xla=true"): "XLA compiles a program for one device, and a pipeline uses several",
    ("hardware.remat=true", "hardware.xla=true"): "XLA would reuse what is to be computed again",
    ("hardware.remat=[dense]", "hardware.xla=true"): "hardware.remat=['dense'] with hardware.xla=true",
    ("hardware.remat=true", "strategy=tpu"): "a TPU runs XLA programs",
    ("strategy=mirrored", "+strategy.stages=3"): "this strategy does not divide the model; use strategy=pipeline",
}


@pytest.mark.parametrize("overrides", PROCESSES)
def test_keys_that_a_strategys_processes_cannot_follow_are_refused(
    refused: Callable[..., str], overrides: tuple[str, ...]
) -> None:
    assert PROCESSES[overrides] in refused(*overrides)


def test_a_cluster_may_have_thousands_of_workers(compose: Compose) -> None:
    words = (
        "tracking=none",
        "strategy=multi_worker",
        "cluster=ray",
        "cluster.workers=4096",
        "cluster.min_workers=4000",
    )
    made = make_plan(compose(*words), {"strategy": "multi_worker", "cluster": "ray"}, look_outside=False)
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


def test_a_step_needs_a_target(refused: Callable[..., str]) -> None:
    message = refused("training.step={smoothing: 0.1}")
    assert message == "training.step._target_=null: expected the dotted name of a class or function"


def test_a_step_is_read_into_its_target(plan: Make) -> None:
    made = plan("+training.step._target_=my_code.step", "+training.step.smoothing=0.1").training.step
    assert made == Target("training.step", "my_code.step", {"smoothing": 0.1})


UNKNOWN_KEYS = {
    "+foo=1": "foo: there is no such key",
    "+trainig.epochs=1": "trainig: there is no such key; did you mean training?",
    "+training.epoch=3": "training.epoch: there is no such key; did you mean training.epochs?",
    "+hardware.logical_device=3": "did you mean hardware.logical_devices?",
    "+precision.policy=mixed": "precision.policy: there is no such key",
    "+tracking.password=sesame": "tracking.password: there is no such key",
    EARLY + "{patiense: 3}": "training.early_stopping.patiense: there is no such key; did you mean "
    "training.early_stopping.patience?",
}


@pytest.mark.parametrize("override", UNKNOWN_KEYS)
def test_an_unknown_key_is_refused_with_the_nearest(refused: Callable[..., str], override: str) -> None:
    message = refused(override)
    assert UNKNOWN_KEYS[override] in message
    assert "sesame" not in message


@pytest.mark.parametrize("section", ["strategy", "hardware", "precision", "dataset", "model", "training", "tracking"])
@pytest.mark.parametrize("value", ["null", "3", "[1]"])
def test_a_section_that_holds_no_keys_is_refused(compose: Compose, section: str, value: str) -> None:
    config = {**compose("tracking=none"), section: {"null": None, "3": 3, "[1]": [1]}[value]}
    with pytest.raises(ConfigError, match=rf"^{section}=.*: expected keys under {section}"):
        make_plan(config, {})


def test_an_unknown_option_comes_with_the_nearest_and_all_there_are() -> None:
    message = str(unknown_option_error("strategy", "miror", ["auto", "mirrored", "one_device"]))
    assert message == "strategy=miror: there is no such option; did you mean mirrored? (auto, mirrored, one_device)"


def test_an_option_that_is_like_no_other_comes_with_all_there_are() -> None:
    assert str(unknown_option_error("model", "x", ["cnn", "mlp"])) == "model=x: there is no such option (cnn, mlp)"


FIT_WAY_OUT = "use training.engine=loop"

CANNOT_WORK = {
    "hardware=cpu strategy=mirrored hardware.logical_devices=3 training.global_batch_size=32": (
        "training.global_batch_size=32: ",
        "3 replica(s)",
        "use 30 or 33",
    ),
    "hardware=cpu training.accumulate=5 training.global_batch_size=32": (
        "training.global_batch_size=32: ",
        "training.accumulate=5",
        "use 30 or 35",
    ),
    "hardware=cpu strategy=mirrored hardware.logical_devices=4 training.global_batch_size=3": (
        "training.global_batch_size=3: ",
        "use 4",
    ),
    "strategy=tpu hardware=cpu": ("strategy=tpu with hardware=cpu: ", "hardware=tpu", "strategy=mirrored"),
    "strategy=tpu hardware=gpu": ("strategy=tpu with hardware=gpu: ", "hardware=tpu", "strategy=mirrored"),
    "strategy=mirrored hardware=tpu": ("hardware=tpu with strategy=mirrored: ", "strategy=tpu", "hardware=auto"),
    "strategy=one_device hardware.tpu=local": ("hardware.tpu=local with strategy=one_device", "strategy=tpu"),
    "hardware=cpu hardware.tpu=local": ("hardware.tpu=local with strategy=auto", "strategy=tpu"),
    "strategy=tpu hardware.logical_devices=2": ("hardware.logical_devices=2 with hardware=tpu: ", "leave it 1"),
    "hardware=tpu hardware.devices=[0]": ("hardware.devices=[0] with hardware=tpu: ", "leave it null"),
    "strategy=tpu hardware.memory_growth=true": ("hardware.memory_growth=true", "with hardware=tpu: "),
    "strategy=tpu hardware.memory_limit_mb=100": ("hardware.memory_limit_mb=100", "with hardware=tpu: "),
    "strategy=tpu precision=mixed_float16": ("precision=mixed_float16 with hardware=tpu: ", "precision=mixed_bfloat16"),
    "strategy=tpu cluster.workers=2": ("cluster.workers=2 with strategy=tpu: ", "strategy=multi_worker"),
    "hardware.tpu=10.0.0.1:8470": ("hardware.tpu=10.0.0.1:8470: ", "grpc://10.0.0.1:8470"),
    "hardware=cpu hardware.memory_limit_mb=100": ("hardware.memory_limit_mb=100 with hardware=cpu: ", "hardware=gpu"),
    "strategy=pipeline hardware=cpu": (
        "strategy.stages=2 with strategy.replicas=1 with hardware.logical_devices=1: ",
        "exactly one device for each stage of each replica",
    ),
    "strategy=pipeline strategy.replicas=2 hardware=cpu hardware.logical_devices=2": (
        "strategy.stages=2 with strategy.replicas=2 with hardware.logical_devices=2: ",
        "set hardware.logical_devices to strategy.stages x strategy.replicas",
    ),
    "strategy=mirrored +strategy.replicas=2": ("strategy.replicas=2", "strategy=mirrored: ", "use strategy=pipeline"),
    "strategy=pipeline strategy.replicas=2 cluster.workers=2": ("cluster.workers=2 with strategy=pipeline: ",),
    "strategy=pipeline strategy.replicas=2 training.global_batch_size=36": (
        "training.global_batch_size=36: ",
        "strategy.micro_batches=4 x strategy.replicas=2; ",
        "use training.global_batch_size=32 or 40, ",
    ),
    "strategy=pipeline strategy.cuts=[a,b]": ("strategy.cuts=['a', 'b'] with strategy.stages=2: ", "one name fewer"),
    "strategy=pipeline strategy.stages=3 strategy.cuts=[]": (
        "strategy.cuts=[] with strategy.stages=3: ",
        "one name fewer",
    ),
    "strategy=pipeline training.batch_size=50": (
        "training.batch_size=50: ",
        "strategy.micro_batches=4",
        "use training.batch_size=48 or 52, ",
    ),
    "strategy=pipeline training.batch_size=3": ("use training.batch_size=4, or strategy.micro_batches=1",),
    "strategy=pipeline training.global_batch_size=30 training.accumulate=3": (
        "training.global_batch_size=30: ",
        "strategy.micro_batches=4 x training.accumulate=3",
        "use training.global_batch_size=24 or 36, ",
    ),
    "hardware=gpu hardware.memory_limit_mb=100": ("hardware.memory_growth=true", "hardware.memory_limit_mb=100"),
    "hardware=gpu hardware.logical_devices=2": ("hardware.logical_devices=2", "hardware.memory_limit_mb"),
    "training.engine=fit strategy=multi_worker": ("strategy=multi_worker: Keras 3's fit works only with", FIT_WAY_OUT),
    "training.engine=fit training.step={_target_:my.step}": ("training.step._target_=my.step", FIT_WAY_OUT),
    "training.engine=fit training.accumulate=2": ("training.accumulate=2: ", FIT_WAY_OUT),
    "training.engine=fit training.clip_norm=1.0": ("training.clip_norm=1.0: ", FIT_WAY_OUT),
    "training.engine=fit strategy=mirrored precision=mixed_float16": ("precision=mixed_float16", FIT_WAY_OUT),
    "training.engine=fit strategy=mirrored training.steps_per_loop=4": (
        "training.steps_per_loop=4 with",
        "or training.engine=loop",
    ),
    "optimizer.schedule=step": ("optimizer.schedule=step: ", "optimizer.step_every"),
    "training.early_stopping={monitor: val/loss} dataset.validation=null": (
        "training.early_stopping.monitor=val/loss",
        "dataset.validation=null",
        "dataset.validation=0.1",
        "train/loss",
    ),
    "training.early_stopping={monitor: val/loss} dataset.validation=0": ("dataset.validation=0",),
    "debug=nan dataset=csv dataset.data_dir=x.csv dataset.target=y": (
        "debug.nan=true",
        "table.Table: ",
        "remove debug=nan",
    ),
}


@pytest.mark.parametrize("command", CANNOT_WORK)
def test_conflicting_keys_are_refused_with_what_would_work(refused: Callable[..., str], command: str) -> None:
    words = command.replace(": ", ":").split()
    message = refused(*words)
    for part in CANNOT_WORK[command]:
        assert part in message


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
    made = plan("model.units=[8,4]", "+optimizer.amsgrad=true")
    assert made.model.target.path == "scaleflow.model.mlp.build"
    assert made.model.target.arguments == {"units": [8, 4], "dropout": 0.0, "batch_norm": False}
    assert made.optimizer.target.arguments == {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": True}
    assert made.optimizer.learning_rate == 0.001


def test_early_stopping_is_read_into_its_type(plan: Make) -> None:
    made = plan(EARLY + "{monitor: val/accuracy, mode: max}")
    assert made.training.early_stopping == EarlyStopping("val/accuracy", 3, "max")


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


@pytest.mark.parametrize("uri", ["runs", "./mlruns", "/tmp/mlruns", "file:///tmp/mlruns", "file:mlruns"])
def test_a_plain_folder_is_no_store(refused: Callable[..., str], uri: str) -> None:
    message = refused(f"tracking.uri='{uri}'")
    assert message.startswith(f"tracking.uri={uri}: ")
    assert "sqlite:///mlflow.db" in message


def test_a_store_file_in_a_folder_that_is_not_there(here: Path, refused: Callable[..., str]) -> None:
    message = refused("tracking.uri=sqlite:///deep/er/mlflow.db")
    assert message.startswith("tracking.uri=sqlite:///deep/er/mlflow.db: ")
    assert f"{here}/deep/er" in message


def test_a_store_file_that_is_a_folder(here: Path, refused: Callable[..., str]) -> None:
    assert f"{here}/mlflow.db" in refused(f"tracking.uri=sqlite:///{here}")


@pytest.mark.parametrize("uri", ["sqlite://", "sqlite:///:memory:"])
def test_a_store_in_memory_would_be_lost(refused: Callable[..., str], uri: str) -> None:
    message = refused(f"tracking.uri='{uri}'")
    assert message.startswith(f"tracking.uri={uri}: ")
    assert "sqlite:///mlflow.db" in message


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


@pytest.mark.parametrize("uri", ["http://", "http://127.0.0.1:99999", "http://127.0.0.1:port", "http://[::1"])
def test_an_address_that_is_none(refused: Callable[..., str], uri: str) -> None:
    assert refused(f"tracking.uri='{uri}'").startswith(f"tracking.uri={uri}: ")


def test_a_worker_leaves_the_store_to_its_launcher(compose: Compose, free_port: int) -> None:
    uri = f"http://127.0.0.1:{free_port}"
    assert make_plan(compose(f"tracking.uri={uri}"), {}, look_outside=False).tracking.uri == uri


def test_a_plan_that_a_worker_reads_again_is_the_same(plan: Make, compose: Compose) -> None:
    config = compose("model=cnn", "tracking=none", EARLY + "{monitor: train/loss}")
    first = make_plan(config, {"model": "cnn"}, ["/x"])
    assert make_plan(first.config, first.choices, first.search, look_outside=False) == first


@pytest.mark.parametrize("key", ["use_ema=true", "ema_momentum=0.9", "ema_overwrite_frequency=100"])
def test_a_moving_average_of_the_weights_is_refused(refused: Callable[..., str], key: str) -> None:
    assert refused(f"+optimizer.{key}") == (
        f"optimizer.{key}: Keras's moving average of the weights would be neither evaluated nor saved; leave it out, "
        "and use optimizer.ema=0.99"
    )


def test_an_optimizer_of_ones_own_may_have_other_arguments_of_these_names(plan: Make, refused: Any) -> None:
    mine = "optimizer._target_=mine.Averaged"
    assert plan(mine, "+optimizer.ema_momentum=0.9", "+optimizer.use_ema=false").optimizer.target.path in mine
    assert refused(mine, "+optimizer.use_ema=true").startswith("optimizer.use_ema=true: ")


def test_a_resumed_pipeline_keeps_its_batch() -> None:
    strategy = Strategy("pipeline", replicas=3)
    message = "x strategy.replicas=3; the run was started with .* another strategy.replicas and strategy.micro_batches$"
    with pytest.raises(ConfigError, match=message):
        check_pipeline_batch(Training(global_batch_size=32), strategy, is_resumed=True)


@pytest.mark.parametrize(
    ("words", "multiple"),
    [
        (("strategy=multi_worker", "cluster.workers=6", "dataset.shards=6"), 1),
        (("strategy=multi_worker", "cluster.workers=2", "dataset.shards=8", "training.accumulate=2"), 2),
        (("strategy=multi_worker", "cluster.workers=3", "dataset.shards=4"), 4),
        (("strategy=pipeline", "strategy.micro_batches=6", "dataset.shards=4"), 12),
        (("strategy=pipeline", "strategy.micro_batches=6", "strategy.replicas=2", "dataset.shards=4"), 6),
    ],
)
def test_the_batch_sizes_of_a_search_are_divided_by_shards_and_micro_batches(
    plan: Make, words: tuple[str, ...], multiple: int
) -> None:
    table = "dataset=table", "dataset.data_dir=a.csv", "dataset.target=b", "training.batch_size=auto"
    assert find_batch_multiple(plan(*table, *words)) == multiple
