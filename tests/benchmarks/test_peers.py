"""The comparison with other tools: its rows, its data, and what it says if they are not installed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import __main__ as program
from benchmarks.peers.images import CLASSES, write_images


@pytest.mark.parametrize("name", sorted(set(program.BENCHMARKS) - {"workers"}))
def test_each_benchmark_makes_a_row_for_each_opponent(name: str) -> None:
    benchmark = program.BENCHMARKS[name](Path(sys.executable))
    rows = benchmark.rows({contestant: [1.0, 3.0] for contestant in benchmark.contestants})
    opponents = set(benchmark.contestants) - {program.OURS, program.WARM}
    assert {row.against for row in rows} == opponents
    assert all(row.ratios == [1.0, 1.0] for row in rows)


def test_workers_are_measured_by_what_unconnected_runs_do() -> None:
    benchmark = program.BENCHMARKS["workers"](Path(sys.executable))
    speeds = {"two": 4.0, "one": 2.5, "unconnected": 5.0, program.DDP: 3.0, program.DDP_BESIDE: 4.0}
    rows = benchmark.rows({name: [speeds[name]] for name in benchmark.contestants})
    assert [row.ratio for row in rows] == pytest.approx([0.8, 0.8, 0.75, 0.8 / 0.75])


def test_missing_peers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = tmp_path / "python"
    assert program.main(["mlp", "--python", str(nowhere)]) == 2
    assert f"there is no {nowhere}" in capsys.readouterr().err
    with pytest.raises(program.MissingError, match=r"lacks no-such-tool; run: make bench-peers"):
        program.find_versions(Path(sys.executable), ["numpy", "no-such-tool"])
    assert program.find_versions(Path(sys.executable), ["numpy"])["numpy"] == np.__version__


def test_the_requirements_name_every_library_that_the_scripts_import() -> None:
    assert program.list_packages("# a\ntorch>=2 # b\n\nscikit-learn\n") == ["torch", "scikit-learn"]
    packages = {"hydra": "hydra-core", "sklearn": "scikit-learn", "omegaconf": "hydra-core"}
    scripts = {path.stem: ast.parse(path.read_text()) for path in program.SCRIPTS.glob("*.py")}
    modules = {module for tree in scripts.values() for module in list_imports(tree)}
    libraries = modules - sys.stdlib_module_names - set(scripts) - {"tensorflow"}  # this one runs where scaleflow does
    assert {"torch", "lightning", "jax"} < libraries
    required = program.list_packages(program.REQUIREMENTS.read_text())
    assert {packages.get(library, library) for library in libraries} <= set(required)


def list_imports(tree: ast.Module) -> set[str]:
    """Returns the top-level modules that a script imports."""
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.split(".")[0] for name in names}


def test_the_images_are_bytes_whose_classes_can_be_told(tmp_path: Path) -> None:
    write_images(tmp_path / "images.npz", (8, 8, 1), 500)
    with np.load(tmp_path / "images.npz") as arrays:
        x, y = arrays["x_train"], arrays["y_train"]
    assert (x.dtype, x.shape) == (np.uint8, (500, 8, 8, 1))
    means = np.stack([x[y == each].mean(axis=0) for each in range(CLASSES)])
    distances = ((x[:, None].astype(float) - means) ** 2).sum(axis=(2, 3, 4))
    assert 0.4 < (distances.argmin(axis=1) == y).mean() <= 1


@pytest.mark.parametrize("words", [["nothing"], ["--rounds", "0"]])
def test_wrong_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.parse_arguments(words)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err
