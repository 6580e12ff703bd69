"""Collects the pages of the site in one folder, for the generator that `make docs` runs.

    python docs/build_site.py build/pages

The pages are those of docs/, and README.md, CONTRIBUTING.md and CHANGELOG.md. GitHub shows the same files. A link from
one to another is relative to the repository there, so it is rewritten here. A notebook becomes a page with its outputs.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

#: Pages that are not in docs/: their path in the repository, and in the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

#: Modules that the pages link to, and where the site describes them.
MODULES = {
    "scaleflow/interfaces/data.py": "api.md#datasets",
    "scaleflow/interfaces/features.py": "api.md#features",
    "scaleflow/interfaces/hooks.py": "api.md#features",
    "scaleflow/interfaces/training.py": "api.md#training-steps",
}

#: The target of a Markdown link to a file of the repository, and its anchor.
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(#[^)\s]*)?(?=\))")


def collect_pages(folder: Path) -> None:
    """Writes all pages and their pictures to a folder, which is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for path in [*map(Path, PAGES), *(page.relative_to(ROOT) for page in ROOT.glob("docs/*.md"))]:
        text = (ROOT / path).read_text()
        (folder / to_site_path(path.as_posix())).write_text(rewrite_links(text, path))
    for path in (page.relative_to(ROOT) for page in ROOT.glob("docs/*.ipynb")):
        text = "\n\n".join(render_cells(json.loads((ROOT / path).read_text()), folder, path.stem))
        (folder / to_site_path(path.as_posix())).write_text(rewrite_links(text, path))


def rewrite_links(text: str, path: Path) -> str:
    """Rewrites the relative links of a page.

    Args:
        text: the page in Markdown.
        path: its path in the repository.
    """

    def rewrite(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(path.parent.as_posix(), match[1]))
        return to_site_path(target) + (match[2] or "")

    return LINK.sub(rewrite, text)


def to_site_path(path: str) -> str:
    """Returns the path in the site of a file of the repository; all pages are in one folder.

    Raises:
        ValueError: if the site does not have the file.
    """
    if path in PAGES or path in MODULES:
        return (PAGES | MODULES)[path]
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    raise ValueError(f"{path}: the site does not have it; add it to PAGES or MODULES, or do not link to it")


def render_cells(notebook: dict[str, Any], folder: Path, name: str) -> Iterator[str]:
    """Yields the cells of a notebook as Markdown, and writes the pictures among the outputs to a folder.

    Args:
        notebook: the content of the .ipynb file.
        folder: the folder of the pictures.
        name: the notebook's name, with which the names of the pictures begin.
    """
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if picture := data.get("image/png"):
                file = f"{name}-{number}.png"
                (folder / file).write_bytes(base64.b64decode(picture))
                yield f"![{''.join(data['text/plain'])}]({file})"
            else:
                yield f"```text\n{''.join(data['text/plain']).rstrip()}\n```"


if __name__ == "__main__":
    collect_pages(Path(sys.argv[1]))
