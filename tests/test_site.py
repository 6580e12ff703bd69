"""The site of `make docs`: its navigation, its API page, its tutorial, and the site itself."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import scaleflow
from tests.conftest import Command
from tests.processes import ROOT

BUILD = runpy.run_path(str(ROOT / "docs" / "build_site.py"))
NOTEBOOK = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]

#: What `make docs` reads.
SOURCES = ("docs", "scaleflow", "mkdocs.yml", *BUILD["PAGES"])


def pages(nav: Any) -> Iterator[str]:
    """The files of a navigation, which is a file, or a list or a mapping of navigations."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(entry)


def test_the_navigation_has_every_page_once() -> None:
    found = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*") if path.suffix in (".md", ".ipynb")]
    expected = [BUILD["to_site_path"](path) for path in [*found, *BUILD["PAGES"]]]
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages(navigation)) == sorted(expected)


def test_a_link_from_the_readme_leads_to_a_page() -> None:
    text = (
        "[a](docs/data.md#which) ![b](docs/pictures/runs.png) [c](CONTRIBUTING.md) [d](https://example.com/docs/a.md)"
    )
    assert BUILD["rewrite_links"](text, Path("README.md")) == (
        "[a](data.md#which) ![b](pictures/runs.png) [c](contributing.md) [d](https://example.com/docs/a.md)"
    )
    link = "[data.py](../scaleflow/interfaces/data.py)"
    assert BUILD["rewrite_links"](link, Path("docs/extend.md")) == "[data.py](api.md#datasets)"
    with pytest.raises(ValueError, match="LICENSE"):
        BUILD["rewrite_links"]("[a](LICENSE)", Path("README.md"))


def test_the_api_page_has_the_public_names_and_no_others() -> None:
    shown = re.findall(r"^::: (scaleflow\.\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    own = {f"scaleflow.{name}" for name in scaleflow.__all__ if name != "__version__"}
    assert own <= set(shown)
    for name in shown:
        parent, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(parent), last) or importlib.util.find_spec(name), name


def test_the_stored_outputs_of_the_tutorial_are_those_of_one_whole_run() -> None:
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    texts = ["".join(output.get("text") or output["data"]["text/plain"]) for output in outputs]
    assert not re.search(r"(^|\s)/\w+/", "\n".join(texts))  # no path of a machine
    assert "are right; MLflow has" in texts[-1]


@pytest.mark.slow  # a run, a sweep of three jobs and a model that is loaded: half a minute
def test_the_tutorial_runs(command: Command) -> None:
    code = "\n\n".join("".join(cell["source"]) for cell in CODE)
    (command.folder / "tutorial.py").write_text(code)
    ended = command.python("-m", "tutorial", timeout=480)
    assert ended.returncode == 0, ended.stderr
    right, recorded = re.findall(r"^(\S+) of the test images are right; MLflow has (\S+)$", ended.stdout, re.M)[0]
    assert right == recorded
    assert float(right) > 0.9


def test_the_pages_link_to_nothing_that_the_site_lacks(tmp_path: Path) -> None:
    build = [sys.executable, "docs/build_site.py", str(tmp_path / "pages")]
    ended = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "pages" / "data.md").exists()


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("zensical"), reason="the extra `docs` is not installed")
def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    subprocess.run([sys.executable, "docs/build_site.py", "build/pages"], cwd=tmp_path, check=True, timeout=240)
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    ended = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    api = (tmp_path / "site" / "api.html").read_text()
    assert all(f'id="scaleflow.{name}"' in api for name in scaleflow.__all__ if name != "__version__")
    sources = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]*)"', api)
    assert not sources  # the site can be read without a network
