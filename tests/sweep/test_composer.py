"""The configs of a sweep's jobs: they are those that Hydra composes, without its reading all files for each job."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from scaleflow.cli import main
from scaleflow.config.compose import resolve_config
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.sweep import runner
from scaleflow.sweep.composer import JobComposer, JobRequest, drop_hydra, use_hydra_config
from tests.sweep.fake_runs import FakeLaunch


class CountingLoader:
    """Hydra's loader, which counts how often it composes."""

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(GlobalHydra.instance().config_loader(), name)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        self.count += 1
        loader: Any = GlobalHydra.instance().config_loader()
        config: DictConfig = loader.load_sweep_config(master_config, sweep_overrides)
        return config


@pytest.fixture
def sweep() -> Iterator[DictConfig]:
    with initialize_config_module("scaleflow.conf", version_base="1.3"):
        yield compose("config", overrides=["hydra.sweep.dir=/s"], return_hydra_config=True)
        HydraConfig.instance().cfg = None


@pytest.fixture
def loader() -> CountingLoader:
    return CountingLoader()


@pytest.fixture
def composer(sweep: DictConfig, loader: CountingLoader) -> JobComposer:
    return JobComposer(HydraContext(loader, None), sweep)  # type: ignore[arg-type]


def test_a_job_runs_with_the_values_that_identify_it(composer: JobComposer, tmp_path: Path) -> None:
    """A resolver with another value at each call is called once for a job."""
    numbers = itertools.count(1)
    OmegaConf.register_new_resolver("count", lambda: next(numbers))
    try:
        request = composer.read_request(["seed='${count:}'", "tracking=none"], 0)
        prepared = [composer.prepare(request, tmp_path / "0", is_resumed=False) for _ in range(2)]
    finally:
        OmegaConf.clear_resolver("count")
    assert [each.spec.plan.seed for each in prepared] == [request.config["seed"]] * 2


def compose_with_hydra(sweep: DictConfig, words: Sequence[str], number: int) -> dict[str, Any]:
    """What Hydra makes of a job: the config, the words of the app, the environment, the folder."""
    config = GlobalHydra.instance().config_loader().load_sweep_config(sweep, list(words))
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.id = config.hydra.job.num = number
    with use_hydra_config(config):
        folder = f"{config.hydra.sweep.dir}/{config.hydra.sweep.subdir}"
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.runtime.output_dir = folder
        return {
            "config": resolve_config(drop_hydra(config)),
            "overrides": OmegaConf.to_container(config.hydra.overrides.task),
            "environment": OmegaConf.to_container(config.hydra.job.env_set),
            "folder": folder,
        }


def read(composer: JobComposer, words: Sequence[str], number: int) -> dict[str, Any]:
    request = composer.read_request(words, number)
    return {
        "config": request.config,
        "overrides": request.overrides,
        "environment": request.environment,
        "folder": str(composer.name_folder(request, number)),
    }


@pytest.mark.parametrize(
    "words",
    [
        ("seed=3",),
        ("model.units=[8,4]", "optimizer=sgd", "optimizer.momentum=0.5"),
        ("optimizer.momentum=0.5", "optimizer=sgd"),
        ("model=cnn", "tracking.tags={a: 1}", "tracking.tags.a=2"),
        ("+model.extra=1", "model.extra=2"),
        ("seed=3", "seed=4"),
        ("~debug.fast", "seed=3"),
        ("seed=${hydra:job.num}", "tracking.run_name=run-${seed}"),
        ("tracking.run_name='${hydra:runtime.output_dir}'", "seed=5"),
        ("+hydra.job.env_set.MINE=1", "seed=5"),
        ("hydra.sweep.subdir='${hydra.job.override_dirname}'", "seed=5"),
        ("hydra.sweep.subdir='units-${model.units}-${hydra.job.num}'", "model.units=[5]"),
        ("model.units=5", "training.max_steps=null", "optimizer.learning_rate='0.1'"),
    ],
)
def test_a_job_has_the_config_that_hydra_composes(
    composer: JobComposer, sweep: DictConfig, words: Sequence[str]
) -> None:
    for asked in (("seed=1",), words, ("seed=1",)):  # a job leaves nothing to the next one
        assert read(composer, asked, 7) == compose_with_hydra(sweep, asked, 7)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("model.unitz=3", "model.unitz: there is no such key; did you mean model.units=3?"),
        ("seed.deep=3", "seed.deep: there is no such key"),
        ("optimizer=magic", "optimizer=magic: there is no such option"),
        ("+seed=3", "Could not append to config. An item is already at 'seed'"),
    ],
)
def test_a_job_that_hydra_refuses_is_refused_as_a_single_run_is(
    composer: JobComposer, sweep: DictConfig, word: str, why: str
) -> None:
    with pytest.raises(HydraException):
        compose_with_hydra(sweep, [word], 0)
    assert composer.read_request([word], 0).refusal.startswith(why)
    assert composer.read_request(["seed=1"], 0).config == compose_with_hydra(sweep, ["seed=1"], 0)["config"]


@pytest.mark.slow
def test_hydra_composes_once_for_each_combination_of_options(composer: JobComposer, loader: CountingLoader) -> None:
    jobs = [(f"optimizer={name}", f"seed={seed}") for name in ("adam", "sgd") for seed in range(20)]
    requests = [composer.read_request(words, number) for number, words in enumerate(jobs)]
    assert [composer.name_folder(request, 3).name for request in requests] == ["3"] * 40
    assert loader.count == 2
    assert len({request.identity for request in requests}) == 40


def test_jobs_share_the_sections_in_which_they_agree(composer: JobComposer) -> None:
    first, second = (composer.read_request([f"model.units={units}"], 0) for units in (1, 2))
    assert first.config["model"] != second.config["model"]
    assert all(first.config[key] is second.config[key] for key in ("dataset", "optimizer", "training"))
    alike = [composer.read_request([f"optimizer.learning_rate={rate}"], 0) for rate in ("1", "1.0", "true")]
    assert len({request.identity for request in alike}) == 3


@pytest.mark.parametrize("launcher", ["isolated", "basic"])
def test_the_sweeper_checks_jobs_only_for_other_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["scaleflow"])
    monkeypatch.setenv(SERVER_ENV, "no server is needed")
    composed: list[list[str]] = []
    load = ConfigLoaderImpl.load_sweep_config

    def spy(loader: ConfigLoaderImpl, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        composed.append(sweep_overrides)
        return load(loader, master_config, sweep_overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", spy)
    words = ("seed=-1,-2", "tracking=none", "hydra.sweep.dir=s", f"hydra/launcher={launcher}")
    assert main(["-m", *words]) == (2 if launcher == "isolated" else 1)
    assert (len(composed) == 1) == (launcher == "isolated")


def test_a_debug_section_that_is_no_mapping_is_left_to_the_check() -> None:
    assert not JobRequest((), (), 0, {"debug": 5}, {}).is_inline


@pytest.mark.slow
def test_a_value_that_follows_from_another_key_is_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data of `synthetic` are made with `${seed}`. A sweeper may ask for one job at a time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["scaleflow"])
    monkeypatch.setenv(SERVER_ENV, "no server is needed")
    monkeypatch.setattr(runner, "launch_run", FakeLaunch())
    words = ("-m", "tracking=none", "hydra.sweep.dir=s", "dataset=synthetic", "hydra.sweeper.max_batch_size=1")
    assert main([*words, "seed=1"]) == 0
    assert main([*words, "seed=2,3"]) == 0
    assert main([*words, "seed=2,3", "dataset.outputs=5"]) == 2
