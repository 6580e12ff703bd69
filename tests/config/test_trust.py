"""A config that comes from a store is followed as far as it is harmless, and no further."""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

import scaleflow
from scaleflow.config.compose import CommandWords, ComposedConfig, compose_config, resolve_config
from scaleflow.config.policies import LOOK
from scaleflow.config.trust import TEXT_KEYS, check_origins, check_trusted_targets, check_values
from scaleflow.errors import ConfigError
from scaleflow.interfaces.features import list_conf_folders
from scaleflow.launcher.prepare import make_plan
from scaleflow.runs.reuse import find_config_dirs, load_config, reuse_config

RUN = "0123456789abcdef0123456789abcdef"

CONF = Path(scaleflow.__file__).parent / "conf"


@functools.cache
def default_config() -> str:
    return yaml.safe_dump(resolve_config(compose_config(["tracking=none"]).config))


def tracked_config(**changes: Any) -> str:
    """config.yaml of a default run, with some keys as a stranger could have written them."""
    config: Any = yaml.safe_load(default_config())
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return yaml.safe_dump(config)


PARAMS = {"model": "mlp", "dataset": "digits", "tracking": "none"}


def made_again(text: str, *overrides: str, **more: Any) -> ComposedConfig:
    return reuse_config(load_config(text, RUN), PARAMS, CommandWords(overrides, run_id=RUN, **more))


#: What a tracked config says, and what the refusal has to name.
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a function of the system": (
        {"model___target_": "os.system", "model__command": "touch x"},
        ["model._target_=os.system", "--trust os"],
    ),
    "a builtin": ({"dataset": {"_target_": "builtins.eval"}}, ["dataset._target_=builtins.eval"]),
    "a file that Keras would fetch": (
        {"dataset": {"_target_": "keras.utils.get_file", "origin": "x"}},
        ["keras.utils.get_file"],
    ),
    "a file that TensorFlow would write": (
        {"model": {"_target_": "tensorflow.io.write_file"}},
        ["tensorflow.io.write_file"],
    ),
    "Python in a graph": ({"training__step": {"_target_": "tensorflow.py_function"}}, ["training.step", "py_function"]),
    "a pickle": ({"model": {"_target_": "keras.saving.load_model"}}, ["keras.saving.load_model"]),
    "unsafe loading": ({"optimizer": {"_target_": "keras.config.enable_unsafe_deserialization"}}, ["optimizer."]),
    "an optimizer's deserialisation": (
        {"optimizer": {"_target_": "keras.optimizers.deserialize", "config": {}}},
        ["keras.optimizers.deserialize"],
    ),
    "the way through a class": (
        {"optimizer": {"_target_": "keras.optimizers.Adam.__init__.__globals__"}},
        ["optimizer._target_=keras.optimizers.Adam.__init__"],
    ),
    "scaleflow's own, which is no factory": (
        {"model": {"_target_": "scaleflow.launcher.launch.discard_folder"}},
        ["model._target_=scaleflow.launcher.launch.discard_folder"],
    ),
    "what a module of scaleflow's has imported": (
        {"dataset": {"_target_": "scaleflow.dataset.tfds.os.system"}},
        ["scaleflow.dataset.tfds.os.system"],
    ),
    "a dataset where a model belongs": (
        {"model": {"_target_": "scaleflow.dataset.table.Table"}},
        ["model._target_=scaleflow.dataset.table.Table"],
    ),
    "a loss's deserialisation": (
        {"objective__loss": {"_target_": "keras.losses.deserialize"}},
        ["objective.loss._target_=keras.losses.deserialize", "losses and metrics of Keras"],
    ),
    "a metric that is none": (
        {"objective__metrics": {"age": [{"_target_": "os.system"}]}},
        ["objective.metrics.age.0._target_=os.system"],
    ),
    "code in an argument": (
        {"model__units": [{"_target_": "subprocess.run", "args": ["x"]}]},
        ["model.units.0._target_=subprocess.run"],
    ),
    "code in an argument of a list in a list": (
        {"optimizer__beta_1": [[{"_target_": "os.system"}]]},
        ["optimizer.beta_1.0.0._target_=os.system"],
    ),
    "code beside what is used": ({"tracking__tags": {"a": {"_target_": "os.system"}}}, ["tracking.tags.a._target_"]),
    "a lambda": (
        {"model__units": {"_target_": "keras.layers.Lambda", "function": "x"}},
        ["model.units._target_=keras.layers.Lambda"],
    ),
    "a layer that loads": ({"model__units": {"_target_": "keras.layers.TFSMLayer"}}, ["keras.layers.TFSMLayer"]),
    "a layer that reads a file": ({"model__units": {"_target_": "keras.layers.StringLookup"}}, ["StringLookup"]),
    "a target that is none": ({"model": {"_target_": ["os.system"]}}, ["model._target_=['os.system']"]),
    "a target that is put together": (
        {"model___target_": "${seed}${dataset.a}", "seed": "os.", "dataset__a": "system"},
        ["model._target_=os.system"],
    ),
    "a callback that writes": (
        {"training__callbacks": [{"_target_": "keras.callbacks.CSVLogger", "filename": "x"}]},
        ["training.callbacks.0._target_=keras.callbacks.CSVLogger"],
    ),
    "a callback that tells a server": (
        {"training__callbacks": [{"_target_": "keras.callbacks.RemoteMonitor"}]},
        ["RemoteMonitor"],
    ),
    "an object of Keras's by its config": (
        {"optimizer__weight_decay": {"class_name": "Lambda", "config": {}}},
        ["optimizer.weight_decay.class_name=Lambda"],
    ),
    "arguments by their place": ({"model__units": {"_args_": [1]}}, ["model.units._args_"]),
    "a secret of the environment": ({"tracking__tags": {"a": "${oc.env:HOME}"}}, ["tracking.tags.a=${oc.env:HOME}"]),
    "one in a number's place": ({"seed": "${oc.env:UID}"}, ["seed=${oc.env:UID}", "type the value"]),
    "one in an interpolation": ({"model__units": "${oc.decode:${seed}}"}, ["model.units=${oc.decode:"]),
    "one that is put together": (
        {"tracking__tags": {"a": "$", "b": "{oc.env:HOME}", "c": "${.a}${.b}"}},
        ["tracking.tags.c=${oc.env:HOME}"],
    ),
    "one behind an escape": ({"model__units": "\\${oc.env:HOME}"}, ["model.units="]),
    "one in a list": ({"model__units": [1, "${oc.env:HOME}"]}, ["model.units.1=${oc.env:HOME}"]),
    "another's file": ({"dataset__data_dir": "/etc/passwd"}, ["dataset.data_dir=/etc/passwd", "--trust /etc/passwd"]),
    "a home": ({"dataset__file": "~/.ssh/id_rsa"}, ["dataset.file=~/.ssh/id_rsa"]),
    "a way up": ({"dataset__file": "data/../../x"}, ["dataset.file=data/../../x"]),
    "weights from elsewhere": ({"model__init_from": "/tmp/weights.pkl"}, ["model.init_from=/tmp/weights.pkl"]),
    "weights from a bucket": ({"model__init_from": "gs://bucket/model.keras"}, ["model.init_from=gs://bucket"]),
    "a machine": ({"hardware__tpu": "grpc://10.0.0.1:8470"}, ["hardware.tpu=grpc://10.0.0.1:8470"]),
    "a machine by its name": ({"hardware__tpu": "theirs"}, ["hardware.tpu=theirs"]),
    "a command for a cluster": ({"cluster__submit": "sh x"}, ["cluster.submit=sh x"]),
    "a secret that was masked": (
        {"model__api_key": "****"},
        ["model.api_key: the tracked value is a masked secret", "type the value"],
    ),
    "an interpolation to a secret": (
        {"model__api_key": "****", "tracking__run_name": "${model.api_key}"},
        ["model.api_key: the tracked value is a masked secret"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_untrusted_values_are_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes, expected = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        made_again(tracked_config(**changes))
    assert [part for part in expected if part not in str(refused.value)] == [], refused.value
    assert "${HOME}" not in str(refused.value)
    assert str(Path.home()) not in str(refused.value)


@functools.cache
def list_text_keys() -> list[str]:
    """Every key of every option of every group, except those whose text is never a path."""
    options = [
        *(
            (f"{path.parent.name}.", yaml.safe_load(path.read_text()))
            for folder in list_conf_folders()
            for path in folder.glob("[!e]*/*.yaml")
        ),
        ("", {key: each for key, each in yaml.safe_load((CONF / "config.yaml").read_text()).items() if key != "hydra"}),
    ]
    keys = {
        prefix + key
        for prefix, option in options
        for key, value in flatten(option)
        if key.rpartition(".")[2] not in ("defaults", "name", "_target_", "_partial_")
    }
    return sorted({*keys, "dataset.name"} - {*TEXT_KEYS, "resume"})


def flatten(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(config, dict) and config:
        return [leaf for key, value in config.items() for leaf in flatten(value, f"{prefix}.{key}".lstrip("."))]
    return [(prefix, config)]


def nest(key: str, value: Any) -> Any:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


#: What leads out of the folder in which the test makes `link` to the root, `up` to the parent, and a folder `in`.
LEADS_OUT = [
    *("/", "/etc/passwd", " /etc/passwd", "\t/etc/passwd", "/etc/passwd\t ", "\n/etc/passwd", "\u00a0/etc/passwd"),
    *("\x1f/etc/passwd", "//etc/passwd", "/etc/pass*", " /e[t]c/passwd", "/./etc/passwd"),
    *("..", " ..", "../x", "\t../x", "in/../../x", "in/../x", "x\n/../../../x", "./..", "in/..\n", "x/*/../../*"),
    *("~", "~/.ssh/id_rsa", " ~/.ssh/id_rsa", "\n~/x", "~root/x", "~nobody-knows/x"),
    *("link/etc/passwd", " link/etc/passwd", "./link", "up/x", "in/../up", "l*/etc/passwd", "**/etc/passwd", "in/up"),
    *("file:/etc/passwd", "file:etc", "FILE:///etc/passwd", " file:///etc/passwd", "\tfile:/x", "s3:/bucket/x"),
    *("s3://bucket/x", " gs://bucket/x", "http://host/x", "a::file:///etc/passwd", "x\n://y", "dbfs:/x"),
    *("x\0", "${oc.env:HOME}/x", " ${oc.env:HOME}", "${seed}", "x/${oc.env:HOME}"),
    *(b"/etc/passwd", b" ../x", PurePosixPath("/etc/passwd"), PurePosixPath("../x"), ["in", {"a": " /etc/passwd"}]),
]


@pytest.mark.parametrize("spelling", LEADS_OUT, ids=repr)
def test_no_key_of_a_tracked_config_leads_out_in_any_spelling(
    spelling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_links(tmp_path, monkeypatch)
    keys = list_text_keys()
    assert {"dataset.data_dir", "model.init_from", "checkpoint.folder", "tracking.uri", "cluster.path"} <= set(keys)
    assert {"dataset.tokenizer", "dataset.cache_dir", "model.weights", "model.preset", "training.step"} <= set(keys)
    followed = []
    for key in keys:
        with contextlib.suppress(ConfigError):
            check_values(nest(key, spelling), (), ["modules"])
            followed.append(key)
    assert followed == []


def make_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "in").mkdir()
    for link, place in (("link", "/"), ("up", ".."), ("in/up", "../.."), ("near", "in")):
        (folder / link).symlink_to(place)
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    "text",
    [
        *("in", "in/x.csv", " in", "./in/*.csv", "near/x.csv", "*", "in/", "a..b", "...", "", "relu", "N/A", "a b/c"),
        *(f"runs:/{RUN}/model", "models:/digits/3", "models:/m-1", "glue/cola:1.0.0", "train[:50%]", "x:y"),
    ],
)
def test_paths_in_the_folder_or_the_store_are_trusted(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_links(tmp_path, monkeypatch)
    check_values({"dataset": {"data_dir": text, "list": [text]}, "model": {"init_from": text}}, (), ())
    check_values({"dataset": {"data_dir": f"{tmp_path}/{text}"}}, (), [] if ":/" in text else [f"{tmp_path}/"])
    for key in TEXT_KEYS:
        check_values(nest(key, "/"), (), ())


@pytest.mark.parametrize("spelling", ["~/x", " ~/x", " /etc/passwd", "file:/etc/passwd", "link/etc/passwd", "../x"])
def test_a_trusted_folder_lets_nothing_else_in(spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_links(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="points outside the current folder"):
        check_values({"dataset": {"data_dir": spelling}}, (), [f"{tmp_path}/", f"{tmp_path}/in"])


def test_a_path_of_yaml_is_checked_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = tracked_config() + 'dataset: {data_dir: !!python/object/apply:pathlib.Path ["/", etc]}\n'
    with pytest.raises(ConfigError, match=r"dataset\.data_dir=/etc: comes from a tracked run"):
        made_again(re.sub(r"(?ms)^dataset:\n( .*?\n)+", "", text, count=1))


@pytest.mark.parametrize(
    "text", ["[1, 2]", "a: [", "!!python/object/apply:os.system [x]", "1: 2", "just words", "a: *b", "? [a]\n: b"]
)
def test_a_config_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        make_plan(made_again(text, "tracking=none").set({"x": 1}), LOOK)


def test_a_tracked_run_does_not_say_what_is_trusted(tmp_path: Path) -> None:
    text = tracked_config(trusted_modules=["os"], model___target_="os.system")
    with pytest.raises(ConfigError, match=r"model\._target_=os\.system: this code is not trusted"):
        made_again(text)


def test_targets_of_scaleflow_and_keras_are_followed() -> None:
    text = tracked_config(
        optimizer___target_="tensorflow.keras.optimizers.Lion",
        training__step={"_target_": "scaleflow.training.examples.consistent"},
        training__callbacks=[{"_target_": "keras.callbacks.ReduceLROnPlateau", "monitor": "val_loss"}],
        objective__loss={"age": {"_target_": "keras.losses.Huber"}},
        objective__metrics=[{"_target_": "keras.metrics.AUC"}],
        model__kernel={"_target_": "keras.initializers.HeNormal"},
        model__init_from=f"runs:/{RUN}/model",
        dataset__data_dir="photos/here",
        dataset__pattern="*.png",
    )
    config = made_again(text).config
    assert config.trusted_modules == []
    assert config.optimizer._target_ == "tensorflow.keras.optimizers.Lion"


def test_trusted_targets_are_followed(tmp_path: Path) -> None:
    text = tracked_config(
        model___target_="my_models.nets.build", dataset__data_dir=f"{tmp_path}/photos", dataset__more=str(tmp_path)
    )
    config = made_again(text, trusted=["my_models", str(tmp_path)]).config
    assert list(config.trusted_modules) == ["my_models"]
    config = made_again(text, "trusted_modules=[my_models.nets]", trusted=[str(tmp_path)]).config
    assert list(config.trusted_modules) == ["my_models.nets"]
    with pytest.raises(ConfigError, match="my_models"):
        made_again(text, trusted=["my_model", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"dataset\.data_dir"):
        made_again(text, trusted=["my_models", str(tmp_path / "photo")])


def test_typed_words_replace_those_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_DATA", "/data")
    text = tracked_config(
        checkpoint__folder="gs://theirs/x",
        tracking__uri="http://theirs",
        dataset__data_dir="${oc.env:MY_DATA}",
        model__api_key="****",
        seed=7,
    )
    typed = ("dataset.data_dir=${oc.env:MY_DATA}", "model.api_key=hunter2", "training.epochs=3", "hydra.run.dir=here")
    made = made_again(text, *typed, "+model.units=[8]", "~dataset.threads")
    config = resolve_config(made.config)
    assert made.folder == Path("here")
    assert (config["checkpoint"]["folder"], config["tracking"]["uri"], config["seed"]) == (None, None, 7)
    assert (config["dataset"]["data_dir"], config["model"]["api_key"]) == ("/data", "hunter2")
    assert (config["model"]["units"], config["training"]["epochs"]) == ([8], 3)
    assert "threads" not in config["dataset"]


def test_a_typed_option_replaces_what_was_tracked(tmp_path: Path) -> None:
    text = tracked_config(model={"_target_": "os.system", "command": "x"}, training__epochs=7)
    made = made_again(text, "model=cnn", "model.dropout=0.5")
    config = resolve_config(made.config)
    assert config["model"]["_target_"] == "scaleflow.model.cnn.build"
    assert "command" not in config["model"]
    assert (config["model"]["dropout"], config["training"]["epochs"]) == (0.5, 7)
    assert made.choices["model"] == "cnn"
    assert made.choices["dataset"] == "digits"


def test_masked_secrets_come_from_this_machines_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        "_target_: my_models.build\n_partial_: true\napi_key: ${oc.env:MY_KEY}\nunits: 3\n"
    )
    monkeypatch.setenv("MY_KEY", "hunter2")
    text = tracked_config(model={"_target_": "my_models.build", "_partial_": True, "api_key": "****", "units": 5})
    words = CommandWords(config_dirs=[str(tmp_path)], run_id=RUN, trusted=["my_models"])
    made = reuse_config(load_config(text, RUN), {**PARAMS, "model": "mine"}, words)
    assert resolve_config(made.config)["model"]["api_key"] == "hunter2"
    assert resolve_config(made.config)["model"]["units"] == 5
    assert made.choices["model"] == "mine"
    assert str(tmp_path) in made.search


def test_one_refusal_names_all_modules_and_folders_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my conf").mkdir()
    Path("my conf/nets_of_test.py").write_text("def build(): ...")
    dirs = find_config_dirs("python -m scaleflow --config-dir 'my conf' -cd=b --config-dir=c model=mine model.units=8")
    assert dirs == ["my conf", "c"]
    assert find_config_dirs("python -m scaleflow 'cut") == []
    text = tracked_config(model___target_="nets_of_test.build", dataset___target_="data_of_test.sets.Mine")
    line = ["python", "-m", "scaleflow", "rerun", RUN, "seed=1"]
    more: dict[str, Any] = {"line": line, "tracked_dirs": dirs[:1]}
    whole = f"{shlex.join(line)} --config-dir 'my conf' --trust data_of_test.sets --trust nets_of_test"
    with pytest.raises(ConfigError) as refused:
        made_again(text, **more)
    assert "dataset._target_=data_of_test.sets.Mine: this code is not trusted" in str(refused.value)
    assert str(refused.value).splitlines()[1] == whole
    trusted = ["nets_of_test", "data_of_test.sets"]
    with pytest.raises(ConfigError, match="there is no module data_of_test here") as refused:
        made_again(text, trusted=trusted, **more)
    assert str(refused.value).splitlines()[1] == f"{shlex.join(line)} --config-dir 'my conf'"
    assert made_again(text, trusted=trusted, config_dirs=["my conf"], **more).config.trusted_modules == trusted


def test_interpolations_of_own_options_follow_typed_words() -> None:
    text = yaml.safe_dump(
        {
            **yaml.safe_load(default_config()),
            "dataset": {"_target_": "scaleflow.dataset.synthetic.Synthetic", "seed": "${..seed}"},
        }
    )
    made = reuse_config(
        load_config(text, RUN), {**PARAMS, "dataset": "synthetic"}, CommandWords(("seed=9",), run_id=RUN)
    )
    assert resolve_config(made.config)["dataset"]["seed"] == 9


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model=cnnn", "model=cnnn: there is no such option; did you mean cnn?"),
        ("training.epoch=3", "training.epoch: there is no such key; did you mean training.epochs?"),
        ("model.widht=3", "model.widht: there is no such key"),
        ("seed=1,2", "seed: several values make a sweep"),
        ("experiment=mnist_mlp", "experiment=mnist_mlp: a recipe cannot be applied"),
        ("resume=x", "use python -m scaleflow resume=RUN"),
        ("hydra.job.chdir=true", "hydra.job.chdir: of Hydra's own keys, only hydra.run.dir works here"),
        ("~model.widht", "model.widht: there is no such key"),
        ("~profiler", "~profiler: a config group cannot be removed; write profiler=OPTION (none"),
        ("a b", "a b: cannot be read as KEY=VALUE"),
    ],
)
def test_overrides_are_checked(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made_again(tracked_config(), override)
    assert expected in str(refused.value)


OWN = """
import os
from os import system
from os.path import join

def build(inputs, outputs):
    return None

class Net:
    @classmethod
    def make(cls):
        return None
"""


@pytest.mark.parametrize(
    ("path", "is_followed"),
    [
        ("trusted_by_test.build", True),
        ("trusted_by_test.Net", True),
        ("trusted_by_test.Net.make", True),
        ("trusted_by_test.system", False),
        ("trusted_by_test.os.system", False),
        ("trusted_by_test.join", False),
        ("trusted_by_test.build.__globals__", False),
        ("trusted_by_test.build.__class__", False),
        ("trusted_by_test.nothing", True),  # refused where it is loaded
    ],
)
def test_of_a_trusted_module_only_what_is_defined_there_is_followed(
    path: str, is_followed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trusted_by_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    config = {"model": {"_target_": path}}
    check_trusted_targets(config, ["trusted_by_test"])
    try:
        if is_followed:
            check_origins(config, ["trusted_by_test"])
        else:
            with pytest.raises(
                ConfigError, match=f"model._target_={path}: this code is not trusted, since it is defined in"
            ):
                check_origins(config, ["trusted_by_test"])
            check_origins(config, [path])
    finally:
        sys.modules.pop("trusted_by_test", None)


def test_a_plan_with_trusted_modules_is_checked(plan: Callable[..., Any]) -> None:
    assert plan().trusted_modules is None
    assert plan("trusted_modules=[]").trusted_modules == []
    assert plan("trusted_modules=[mine]", "model._target_=mine.build").trusted_modules == ["mine"]
    with pytest.raises(ConfigError, match=r"model\._target_=mine\.build: this code is not trusted"):
        plan("trusted_modules=[]", "model._target_=mine.build")


def test_an_options_name_is_a_name() -> None:
    params = {**PARAMS, "dataset": "\x1b[2Jdigits\n", "model": "theirs"}
    made = reuse_config(load_config(tracked_config(), RUN), params, CommandWords(run_id=RUN))
    assert made.choices["dataset"] == "digits"
    assert made.choices["model"] == "theirs"
