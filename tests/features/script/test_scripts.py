"""Scripts of many shapes, as tutorials have them, run unchanged and give the history of plain Python.

`make test-rest` runs one script of each kind, `pytest --scripts tests/features/script/test_scripts.py` all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces.events import FaultReported, RunEnded, RunRefused
from tests.features.script.plain_run import find_missing_packages, list_scripts, write_code_of_notebook
from tests.features.script.runs import join_histories, read_points, record_part, record_script, run_plainly

#: One script of each kind.
COVER = (
    *("accumulation_step", "class_weights", "compile_options", "dataframe_features", "endpoint_layer", "flowers"),
    *("gan_phases", "image_pipeline", "lists_of_outputs", "mlflow_script", "py_dataset", "review_text", "vae"),
)

#: Scripts without random numbers in the training, for two replicas.
WITHOUT_DRAWS = ("accumulation_step", "compile_options", "endpoint_layer", "lists_of_outputs")

#: Scripts whose histories depend on the start of the process, with the reason.
DIFFERENT = {"memory_growth": "it sets a variable that counts only before TensorFlow is imported, and a note says so"}


def choose_scripts(config: pytest.Config) -> list[Path]:
    """Returns the scripts to run: a cover, or all with `--scripts`."""
    scripts = [script for script in list_scripts() if script.stem not in DIFFERENT]
    return scripts if config.getoption("--scripts") else [script for script in scripts if script.stem in COVER]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "script" in metafunc.fixturenames:
        scripts = choose_scripts(metafunc.config)
        if "replicas" in metafunc.function.__name__:
            scripts = [script for script in scripts if script.stem in WITHOUT_DRAWS]
        metafunc.parametrize("script", scripts, ids=lambda path: path.stem)


def events_status(events: Sequence[Any]) -> str:
    """Returns how the part of a run ended."""
    end = events[-1]
    if isinstance(end, FaultReported):
        return "FAILED"
    return end.status if isinstance(end, RunEnded) else str(end)


def run_both(isolated: Callable[..., Any], script: Path, tmp_path: Path, *words: str) -> tuple[Any, Any]:
    """Returns the values of plain Python and of scaleflow, by the name of the metric."""
    missing = find_missing_packages(script)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    plain = script if script.suffix == ".py" else write_code_of_notebook(script, tmp_path)
    folders = [tmp_path / "plain", tmp_path / "recorded"]
    for folder in folders:
        folder.mkdir()
    histories = isolated(run_plainly, str(plain), str(folders[0]))
    events = isolated(record_script, [str(script), *words], str(folders[1]))
    end = events[-1]
    assert isinstance(end, RunEnded), end.message if isinstance(end, RunRefused) else end
    assert end.status == "FINISHED"
    points = read_points(events)
    expected = join_histories(histories)
    return expected, {name: [value for _, value in points[name]] for name in expected}


@pytest.mark.slow
def test_a_script_gives_the_bits_of_plain_python(isolated: Callable[..., Any], script: Path, tmp_path: Path) -> None:
    expected, recorded = run_both(isolated, script, tmp_path)
    assert recorded == expected


@pytest.mark.slow
def test_a_script_that_failed_continues_with_the_same_bits(
    isolated: Callable[..., Any], script: Path, tmp_path: Path
) -> None:
    missing = find_missing_packages(script)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    folders = [tmp_path / "whole", tmp_path / "parts"]
    for folder in folders:
        folder.mkdir()
    whole, batches = isolated(record_part, [str(script)], str(folders[0]), None, 0)
    if batches < 2:
        pytest.skip("it has no fit to interrupt")
    first, _ = isolated(record_part, [str(script)], str(folders[1]), batches * 3 // 5, 0)
    second, more = isolated(record_part, [str(script)], str(folders[1]), None, 1)
    assert events_status(first) == "FAILED"
    assert events_status(second) == "FINISHED"
    assert more == batches - batches * 3 // 5, "batches that are trained on again"
    expected = read_points(whole)
    points = read_points([*first, *second])
    assert {name: sorted(values) for name, values in points.items()} == {
        name: sorted(values) for name, values in expected.items()
    }


@pytest.mark.slow
def test_two_replicas_give_the_history_of_one_device(
    isolated: Callable[..., Any], script: Path, tmp_path: Path
) -> None:
    expected, recorded = run_both(isolated, script, tmp_path, "strategy=mirrored", "hardware.logical_devices=2")
    for name, values in expected.items():
        assert recorded[name] == pytest.approx(values, rel=1e-5, abs=1e-7), name
