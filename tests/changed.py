"""`python -m tests.changed`: runs the quick tests of the files that changed since main.

A module's tests are in the file of its name, `tests/training/test_loop.py` for `scaleflow/training/loop.py`, or else
in the folder of its package. The tests of the architecture and of the config files always run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent

#: Cheap, and about all files.
ALWAYS = ("tests/test_architecture.py",)

#: What is tested for other files than Python modules, by the beginning of their path.
OTHERS = (
    ("conf/", "tests/conf/test_conf.py"),
    ("README.md", "tests/test_readme.py"),
    ("docs/", "tests/test_readme.py"),
    ("docs/", "tests/test_site.py"),
    ("docs/models.md", "tests/test_answers.py"),
    ("docs/data.md", "tests/test_answers.py"),
    ("mkdocs.yml", "tests/test_site.py"),
    ("MLproject", "tests/test_project.py"),
    ("hydra_plugins/", "tests/hydra_plugins"),
    ("benchmarks/", "tests/benchmarks"),
)


def list_changed_files(since: str = "main") -> list[str]:
    """Paths that differ from the branch `main`, committed or not, and files that git does not know yet."""
    known = git("rev-parse", "--verify", "--quiet", since)
    differ = git("diff", "--name-only", "--diff-filter=d", *git("merge-base", *known, "HEAD")[:1])
    return [*differ, *git("ls-files", "--others", "--exclude-standard")]


def git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def tests_of(path: str) -> Iterator[str]:
    """Test files or folders for a changed file, those that exist."""
    file = PurePosixPath(path)
    if path.startswith("tests/"):
        yield from [path] if file.name.startswith("test_") else [] if len(file.parts) == 2 else [str(file.parent)]
    elif path.startswith("scaleflow/"):
        folder = PurePosixPath("tests", *file.parts[1:-1])
        own = folder / f"test_{file.stem}.py"
        yield str(own if Path(ROOT, own).exists() or folder == PurePosixPath("tests") else folder)
    else:
        yield from (tests for beginning, tests in OTHERS if path.startswith(beginning))


def main() -> int:
    changed = list_changed_files()
    found = {tests for path in changed for tests in tests_of(path) if Path(ROOT, tests).exists()}
    print(f"{len(changed)} files changed since main: {' '.join(sorted(found)) or 'no tests of their own'}", flush=True)
    words = [*ALWAYS, *sorted(found), "-m", "not slow", "--quiet", "--exitfirst"]
    return subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
