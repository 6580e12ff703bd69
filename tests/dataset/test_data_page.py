"""The page about data from files is true: its commands compose, its keys and defaults are those of the configs."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from scaleflow.cli import main
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "data.md").read_text()
COMMANDS = re.findall(r"^    (?:python -m )?scaleflow (.*)$", PAGE, re.M)
FOLDERS = ("image_folder", "segmentation_folder", "text_folder")
SOURCES = (*FOLDERS, "table", "csv", "tfrecord", "npz", "tokens", "huggingface")


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_composes(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(line), "--cfg", "job"]) == 0
    composed = yaml.safe_load(capsys.readouterr().out)["dataset"]
    assert "???" not in composed.values()


def test_every_source_is_on_the_page_with_a_command() -> None:
    assert {match[1] for line in COMMANDS if (match := re.search(r"dataset=(\w+)", line))} == set(SOURCES)


@pytest.mark.parametrize("source", SOURCES)
def test_every_key_is_on_the_page(source: str) -> None:
    options = yaml.safe_load((ROOT / "conf" / "dataset" / f"{source}.yaml").read_text())
    for key in set(options) - {"_target_", "defaults"}:
        assert re.search(rf"\b(dataset\.)?{key}\b", PAGE), key
