"""Makes the folder of a new project: a dataset, a model, a recipe, a pipeline, a test and a README.

    scaleflow init my_project
    cd my_project
    scaleflow --config-dir conf experiment=first

Everything works as it is. The README says what to change. `schema/` is for editors: see `scaleflow schema --help`.

Exit code: 0 made; 2 the folder cannot be made, nothing was written.
"""

import json
import os
import re
from pathlib import Path

from scaleflow.commands.frame import CommandParser, make_main
from scaleflow.errors import ConfigError
from scaleflow.features.housekeeping.schema import describe_config
from scaleflow.launcher.command_exit import Outcome

STARTER = Path(__file__).parent / "starter"

#: Placeholder for the project's name in the files of `starter`.
NAME = "PROJECT"

#: Suffix of Python files in `starter`. They are not modules of scaleflow.
PYTHON = ".py.txt"


@make_main
def main(argv: list[str]) -> Outcome:
    parser = CommandParser("init", __doc__)
    parser.add_argument("folder", type=Path, help="the folder to make")
    folder = parser.parse_args(argv).folder
    make_project(folder)
    print(f"made {folder}: read {folder / 'README.md'}; try it with")
    print(f"  cd {folder}\n  scaleflow --config-dir conf experiment=first")
    return Outcome()


def make_project(folder: Path) -> None:
    """Writes the files of a new project. Raises ConfigError if the folder cannot be used."""
    name = folder.absolute().name
    if not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII):
        raise ConfigError(
            f"{folder}: {name!r} is the name of the project, too; use letters, digits, - and _, a letter first"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder}: the folder has files already; name a new one")
        for template in sorted(STARTER.rglob("*")):
            if template.suffix not in (".txt", ".md", ".yaml"):
                continue
            file_name = str(template.relative_to(STARTER)).replace(PYTHON, ".py")
            write(folder / file_name, template.read_text().replace(NAME, name))
        for group in (None, "dataset", "model"):
            write(folder / "schema" / f"{group or 'config'}.json", json.dumps(describe_config(group), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {os.strerror(error.errno or 0)}") from error


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
