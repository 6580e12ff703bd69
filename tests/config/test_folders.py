from __future__ import annotations

from pathlib import Path

from scaleflow.config.folders import create_folder, remove_created


def test_created_folders_are_removed_up_to_an_earlier_one(tmp_path: Path) -> None:
    create_folder(tmp_path / "data" / "exp" / "a")
    remove_created(tmp_path / "data" / "exp" / "a")
    assert list(tmp_path.iterdir()) == []


def test_earlier_folders_stay_even_if_empty(tmp_path: Path) -> None:
    (tmp_path / "data" / "exp").mkdir(parents=True)
    create_folder(tmp_path / "data" / "exp" / "a")
    remove_created(tmp_path / "data" / "exp" / "a")
    assert list((tmp_path / "data").iterdir()) == [tmp_path / "data" / "exp"]
    remove_created(tmp_path / "data" / "exp")
    assert (tmp_path / "data" / "exp").is_dir()


def test_folders_with_files_stay(tmp_path: Path) -> None:
    create_folder(tmp_path / "exp" / "a")
    (tmp_path / "exp" / "a" / "note").touch()
    remove_created(tmp_path / "exp" / "a")
    assert (tmp_path / "exp" / "a" / "note").exists()


def test_a_folder_is_the_same_however_its_path_is_written(tmp_path: Path) -> None:
    create_folder(tmp_path / "here" / ".." / "data" / "a")
    remove_created(tmp_path / "data" / "a")
    assert not (tmp_path / "data").exists()
