"""The README and the pages of docs/ are true: commands work, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from scaleflow.cli import main
from scaleflow.commands.table import find_command, list_commands
from tests.conftest import Command
from tests.processes import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS_PAGE = (ROOT / "docs/commands.md").read_text()

PATHS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

#: The pages, each long command in one line.
PAGES = [re.sub(r"\\\n +", "", path.read_text()) for path in PATHS]

PROGRAM = r"(?:srun -N4 )?(?:python -m )?scaleflow(?! \d)"  # not the line with its version

#: A command in an indented line, or in a cell of a table. Its name is that of a run or of another command.
COMMAND = re.compile(rf"^    (?:\$ )?{PROGRAM}((?: .*)?)$|\| `{PROGRAM}((?: [^`]*)?)`", re.M)


def commands() -> list[str]:
    """The words of every run of the pages, without comments and redirections."""
    found = [line or cell for page in PAGES for line, cell in COMMAND.findall(page)]
    typed = dict.fromkeys(re.split(r" (?:#|>|\|)", line)[0].strip() for line in found)
    return [line for line in typed if not find_command(line.split())]


#: Commands that no run composes. `lines` is the feature that docs/extend.md shows: tests/test_extend.py installs it.
NOT_COMPOSED = r"--config-dir|--help|miror|--target|^-sc|^lines[ .]"


@pytest.mark.parametrize("line", [line for line in commands() if not re.search(NOT_COMPOSED, line)])
def test_every_command_composes(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()  # the script that some of the commands run
    (tmp_path / "train.ipynb").touch()
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    if "-m" in words:  # of a sweep what all jobs share
        words = [word for word in words if word != "-m" and "," not in word]
    assert main([*([] if "--cfg" in words else ["--cfg", "job"]), *words]) == 0
    assert capsys.readouterr().out


def test_the_other_commands_are_there(command: Command) -> None:
    names = set(re.findall(r"^    scaleflow (\w+)(?: |$)", COMMANDS_PAGE, re.M))
    assert names == {*list_commands()} - {"project"}
    for name in names:
        done = command.python("-m", "scaleflow", name, "--help")
        assert done.returncode == 0
        assert done.stdout


def test_the_refusal_shown_is_the_one_that_comes(command: Command) -> None:
    ended = command("strategy=miror")
    assert ended.returncode == 2
    assert ended.stderr.strip() in README


def shown_code(name: str) -> str:
    (code,) = re.findall(rf"<!-- test: {name} -->\n```python\n(.*?)```", README, re.S)
    return str(code)


def test_the_python_lines_train_and_use_the_model(command: Command) -> None:
    (code,) = re.findall(r"```python\n(import mlflow\nimport scaleflow\n.*?)```", README, re.S)
    (command.folder / "start.py").write_text(code.replace('"model=cnn"', '"model=cnn", "training.max_steps=3"'))
    ended = command.python("-m", "start")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^0\.\d+$", ended.stdout, re.M)


def test_the_own_dataset_and_model_train(command: Command) -> None:
    folder = command.folder / "my_conf"
    shown = README[README.index("    my_conf/dataset/mine.yaml") : README.index("<!-- test")]
    path: Path | None = None
    for line in shown.splitlines():
        if match := re.match(r"    (my_conf/\S+\.yaml)\s+(.*)", line):
            path = command.folder / match[1]
            path.parent.mkdir(parents=True)
            path.write_text(match[2] + "\n")
        elif path is not None and line.startswith("          "):
            path.write_text(path.read_text() + line.strip() + "\n")
    (folder / "my_code.py").write_text(shown_code("my_code.py"))
    (line,) = re.findall(r"^    (?:python -m )?scaleflow (--config-dir my_conf .*)$", README, re.M)
    ended = command(*line.split())
    assert ended.returncode == 0, ended.stderr
    (accuracy,) = re.findall(r"test accuracy +(\S+)", ended.stdout)
    assert float(accuracy) > 0.8


def anchors(page: str) -> set[str]:
    """The anchors of a page: those that GitHub gives its headings, and its own."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S), re.M)
    own = re.findall(r'<a id="([^"]+)">', page)
    return {*own, *(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for link, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", path.read_text()):
        target = path.parent / link if link else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), f"{link}#{anchor}"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_block_of_code_begins_with_the_name_of_its_file(path: Path) -> None:
    for name, first in re.findall(r"<!-- test: (\S+) -->\n```\w+\n(.*)", path.read_text()):
        assert first.startswith("# ")
        assert first.endswith(name)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_every_make_target_named_is_there() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"\bmake ([a-z]+)\b", README)) <= set(targets)
