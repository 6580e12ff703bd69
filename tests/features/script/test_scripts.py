"""Scripts of many shapes, as tutorials have them, run unchanged and give the history of plain Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces.events import RunEnded, RunRefused
from tests.features.script.plain_run import find_missing_packages, list_scripts, write_code_of_notebook
from tests.features.script.runs import join_histories, read_points, record_script, run_plainly


@pytest.mark.slow
@pytest.mark.parametrize("script", list_scripts(), ids=lambda path: path.stem)
def test_a_script_gives_the_history_of_plain_python(isolated: Callable[..., Any], script: Path, tmp_path: Path) -> None:
    missing = find_missing_packages(script)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    plain = script if script.suffix == ".py" else write_code_of_notebook(script, tmp_path)
    folders = [tmp_path / "plain", tmp_path / "recorded"]
    for folder in folders:
        folder.mkdir()
    histories = isolated(run_plainly, str(plain), str(folders[0]))
    events = isolated(record_script, [str(script)], str(folders[1]))
    end = events[-1]
    assert isinstance(end, RunEnded), end.message if isinstance(end, RunRefused) else end
    assert end.status == "FINISHED"
    points = read_points(events)
    for name, values in join_histories(histories).items():
        assert [value for _, value in points[name]] == values, name
