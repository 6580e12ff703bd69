"""Files with objects of a program are logged with the run, and found again after they are gone from their place."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from scaleflow.config.compose import CommandWords, compose_config
from scaleflow.config.policies import EVALUATE, TRAIN
from scaleflow.errors import ConfigError
from scaleflow.features.compare.diff import COMPARE
from scaleflow.launcher.objects import list_size_notes
from scaleflow.runs import RunFolder, folder
from scaleflow.runs.objects import list_object_keys
from scaleflow.runs.resume import load_saved_config
from scaleflow.runs.reuse import reuse_config
from scaleflow.runs.run import Run

DATA, MODEL = "data-0123456789abcdef.npz", "model-0123456789abcdef.keras"


def make_run(place: Path, data: str, model: str) -> Run:
    """Returns a run of a folder whose config names these files; its copies are in the folder."""
    place.mkdir()
    words = ("dataset=npz", f"dataset.data_dir={data}", "model=keras_file", f"model.path={model}")
    RunFolder(place).config.write_text(OmegaConf.to_yaml(compose_config(words).config))
    for name in (DATA, MODEL, "source_model.keras"):
        (place / name).write_text(name)
    run = Run(place)
    run.params = {"dataset": "npz", "model": "keras_file"}
    return run


def test_a_moved_folder_still_has_the_objects_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "moved", f"/gone/{DATA}", f"/gone/{MODEL}")
    assert [each.path for each in list_object_keys(run.config)] == ["dataset.data_dir", "model.path"]
    moved = {"dataset.data_dir": run.path / DATA, "model.path": run.path / MODEL}
    assert run.find_objects(CommandWords()) == moved
    assert run.find_objects(CommandWords(["dataset.data_dir=new.npz"])) == {"model.path": moved["model.path"]}
    assert run.find_objects(CommandWords(["model=mlp"])) == {"dataset.data_dir": moved["dataset.data_dir"]}
    assert run.find_objects(CommandWords(), EVALUATE) == {"dataset.data_dir": moved["dataset.data_dir"]}
    composed = run.reuse_config(CommandWords(), TRAIN).resolved
    assert (composed["dataset"]["data_dir"], composed["model"]["path"]) == (
        str(run.path / DATA),
        str(run.path / MODEL),
    )
    resumed = load_saved_config(run.files, {})
    assert resumed["dataset"]["data_dir"] == str(run.path / DATA)


def test_the_copy_of_a_keras_file_stands_in_for_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.npz").touch()
    (tmp_path / "net.keras").touch()
    run = make_run(tmp_path / "run", "rows.npz", "net.keras")
    assert run.find_objects(CommandWords()) == {}
    (tmp_path / "net.keras").unlink()
    assert run.find_objects(CommandWords()) == {"model.path": run.path / "source_model.keras"}
    assert load_saved_config(run.files, {})["model"]["path"] == str(run.path / "source_model.keras")


@pytest.mark.parametrize("policy", [EVALUATE, COMPARE])
def test_a_section_that_a_command_does_not_use_needs_no_values(policy: object, tmp_path: Path) -> None:
    config = {"dataset": {"_target_": "scaleflow.dataset.digits.Digits"}, "model": {"path": "/gone/net.keras"}}
    params = {"dataset": "digits", "model": "keras_file", "promotion": "champion"}
    composed = reuse_config(config, params, CommandWords(), sections=policy.sections)  # type: ignore[attr-defined]
    assert composed.resolved["model"]["_target_"] == "scaleflow.model.keras_file.build"
    with pytest.raises(ConfigError, match=r"model\.path: has no default"):
        _ = reuse_config(config, params, CommandWords(["model=keras_file"]), sections=EVALUATE.sections).resolved


def test_objects_are_logged_unless_they_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RunFolder(tmp_path)
    (tmp_path / DATA).write_text("1234")
    (tmp_path / "data-of-the-user.npz").write_text("1")
    (tmp_path / "source_model.h5").write_text("1")
    for text in ("tracking: {code: true}", "seed: 1"):
        files.config.write_text(text)
        assert [path.name for path, _ in files.list_logged_files()] == ["config.yaml", DATA, "source_model.h5"]
    for text in ("tracking: {code: false}", "tracking: {"):
        files.config.write_text(text)
        assert [path.name for path, _ in files.list_logged_files()] == ["config.yaml"]
    files.config.write_text("seed: 1")
    assert list_size_notes(files) == []
    monkeypatch.setattr(folder, "MAX_LOGGED_BYTES", 3)
    monkeypatch.setattr("scaleflow.launcher.objects.MAX_LOGGED_BYTES", 3)
    assert [path.name for path, _ in files.list_logged_files()] == ["config.yaml", "source_model.h5"]
    assert DATA in list_size_notes(files)[0]
    assert files.is_own(DATA)
    assert not files.is_own("data-of-the-user.npz")
