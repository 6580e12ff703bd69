"""What MLflow takes: names, sizes, registered models; held against MLflow's own checks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import IDENTITY, Point, Tracking
from scaleflow.tracking.keys import MAX_KEY, MetricKeys, to_allowed_key, to_distinct_keys
from scaleflow.tracking.store import (
    BYTES_PER_BATCH,
    DESCRIPTION,
    PARAMS_PER_BATCH,
    MlflowTracker,
    split_text_batches,
)
from scaleflow.tracking.uri import check_registered_name

LONG = "model." + "layer." * 60


def test_every_key_has_a_name_of_its_own_that_mlflow_takes() -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from mlflow.utils.validation import _validate_param_name

    # Letters that names are made of, and such as become the same.
    keys = st.text(alphabet="ab/.-_ :@#\u00e9\n", min_size=0, max_size=12) | st.text(max_size=300)

    @settings(max_examples=200, deadline=None, database=None)
    @given(st.dictionaries(keys, st.integers(), max_size=12))
    def check(values: dict[str, int]) -> None:
        made = to_distinct_keys(values)
        assert sorted(made.values()) == sorted(map(str, values.values()))
        for name in made:
            _validate_param_name(name)
            assert len(name) <= MAX_KEY
        assert to_distinct_keys(dict(reversed(list(values.items())))) == made
        names = MetricKeys()
        assert len({names[key] for key in values}) == len(values)
        for key in values:
            _validate_param_name(names[key])
            assert names[key] == names[key]

    check()


def test_a_name_that_can_stay_stays_and_others_are_like_it() -> None:
    assert to_distinct_keys({"a b/c.d-e:f": 1, "val/hit@1": 2}) == {"a b/c.d-e:f": "1", "val/hit_1": "2"}
    same = to_distinct_keys({"x_1": "own", "x@1": "at", "x#1": "hash"})
    assert same["x_1"] == "own"
    assert sorted(same.values()) == ["at", "hash", "own"]
    assert all(name.startswith("x_1-") for name in same if name != "x_1")
    cut = to_distinct_keys({LONG + "units": 1, LONG + "rate": 2})
    assert len(cut) == 2
    assert all(len(name) == MAX_KEY and name.startswith("model.layer.layer") for name in cut)
    assert [to_allowed_key(key) for key in ("", ".", "..", "/a", "a/../b", "a//b", "a/")] == [
        *("_", "_", "__", "_a", "a_.._b", "a__b", "a_")
    ]


def test_a_batch_is_as_large_as_mlflow_takes() -> None:
    many = [(f"key{n}", "v") for n in range(2 * PARAMS_PER_BATCH + 1)]
    assert [len(batch) for batch in split_text_batches(many)] == [PARAMS_PER_BATCH, PARAMS_PER_BATCH, 1]
    heavy = [(f"key{n}", "\u00fc" * 6000) for n in range(100)]
    found = list(split_text_batches(heavy))
    assert [item for batch in found for item in batch] == heavy
    assert len(found) > 1
    assert all(len(json.dumps(batch)) < BYTES_PER_BATCH * 1.1 for batch in found)


def test_no_param_tag_or_metric_is_lost_in_the_store(empty_store: Path, tmp_path: Path) -> None:
    """And none is changed, or there twice, when all is sent again."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    tracker = MlflowTracker(Tracking(uri=f"sqlite:///{tmp_path}/mlflow.db"))
    tracker.connect()
    params = {f"{LONG}{n}": str(n) for n in range(205)} | {"a@b": "1", "a#b": "2", "long": "x" * 9000}
    points = [Point(key, float(n), n, 1000 + n) for key in ("hit@1", "hit#1", f"{LONG}loss") for n in range(1200)]
    tags = {f"tag{n}": str(n) for n in range(150)} | {"scaleflow.error": "e" * 9000, "password": "sesame"}
    for _ in range(2):
        tracker.start("run", {IDENTITY: "one"}, 1000)
        tracker.log_params(params)
        tracker.set_tags(tags)
        tracker.log_metrics(points)
    client: Any = tracker._client
    run = client.get_run(tracker.run_id)
    assert sorted(run.data.params.values()) == sorted(value[:6000] for value in params.values())
    assert run.data.tags.items() >= {"tag149": "149", "password": "****", "scaleflow.error": "e" * 6000}.items()
    assert len(run.data.metrics) == 3
    for key in run.data.metrics:
        assert [point.step for point in client.get_metric_history(tracker.run_id, key)] == list(range(1200))


def test_a_description_is_written_unless_the_user_has_written_one(empty_store: Path, tmp_path: Path) -> None:
    shutil.copy(empty_store, tmp_path / "mlflow.db")

    def start(**tags: str) -> tuple[Any, Callable[[], str]]:
        tracker = MlflowTracker(Tracking(uri=f"sqlite:///{tmp_path}/mlflow.db"))
        tracker.connect()
        tracker.start("run", {IDENTITY: str(len(tags)), **tags}, 1000)
        return tracker, lambda: str(tracker.fetch_run().data.tags[DESCRIPTION])

    tracker, read = start()
    for text in ("running", "finished", "password=sesame", "x" * 8000):
        tracker.describe(text)
        assert read() == text.replace("sesame", "****")
    client: Any = tracker._client
    client.set_tag(tracker.run_id, DESCRIPTION, "what I think of it")  # as MLflow's UI does
    tracker.describe("finished")
    assert read() == "what I think of it"

    tracker, read = start(**{DESCRIPTION: "from the config"})
    tracker.describe("finished")
    assert read() == "from the config"


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        *(("digits-mlp", None), ("a b_c.d", "newest"), ("x", "v1x"), ("x", "a" * 255)),
        *(("", None), (" ", None), ("a/b", None), ("a:b", None), ("..", None), (".", None), ("../x", None)),
        *(("x", ""), ("x", "a b"), ("x", "latest"), ("x", "LATEST"), ("x", "v12"), ("x", "V3"), ("x", "a" * 256)),
    ],
)
def test_a_registered_models_name_and_alias_are_refused_where_mlflow_would(name: str, alias: str | None) -> None:
    from mlflow.utils import validation

    def mlflows() -> bool:
        try:
            validation._validate_model_name(name)
            if alias is not None:
                validation._validate_model_alias_name(alias)
                validation._validate_model_alias_name_reserved(alias)
        except validation.MlflowException:
            return False
        return True

    def ours() -> bool:
        try:
            check_registered_name(Tracking(register_as=name, alias=alias))
        except ConfigError:
            return False
        return True

    assert ours() == mlflows()


def test_quotes_which_could_not_be_searched_for_are_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"tracking\.register_as=it's: expected a name without"):
        check_registered_name(Tracking(register_as="it's"))
