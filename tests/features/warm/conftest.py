from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.features.warm.warm_server import Warm


@pytest.fixture
def make_warm(tmp_path: Path) -> Iterator[Callable[[], Warm]]:
    with contextlib.ExitStack() as resources:

        def make() -> Warm:
            runtime = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="warm-", dir="/tmp")))
            warm = Warm(tmp_path, runtime)
            resources.callback(warm.close)
            return warm

        yield make


@pytest.fixture
def warm(make_warm: Callable[[], Warm]) -> Warm:
    return make_warm()
