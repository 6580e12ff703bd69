"""Two promotions at once, and promotions that are killed: the alias always points at a whole version."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError

#: What changes the store in a promotion.
CHANGES = (
    *("create_registered_model", "create_model_version", "set_model_version_tag", "set_registered_model_alias"),
    *("delete_registered_model_alias", "log_artifact", "set_tag"),
)


class Store:
    """A store with models of runs, by their number from 1; none is a version yet."""

    def __init__(self, folder: Path) -> None:
        from mlflow import MlflowClient

        self.folder = folder
        self.client = MlflowClient(f"sqlite:///{folder}/mlflow.db")

    def add_models(self, count: int) -> None:
        experiment = self.client.create_experiment("e", f"file://{self.folder}/artifacts")
        for n in range(count):
            run = self.client.create_run(experiment)
            model = self.client.create_logged_model(experiment, f"model{n}", source_run_id=run.info.run_id)
            self.client.finalize_logged_model(model.model_id, "READY")

    def open_registry(self) -> Any:
        from scaleflow.tracking.registry import ChampionRegistry

        return ChampionRegistry(self.client, "house")

    def promote(self, number: int, before: str | None, is_good: bool = True) -> str | None:
        """Carries out the decision about a model; returns its version."""
        from types import SimpleNamespace

        from scaleflow.features.promotion.decision import Condition, Decision
        from scaleflow.features.promotion.steps import PromotionOutcome, carry_out_decision
        from scaleflow.tracking.model_uris import ModelReference

        (model,) = (each for each in self.list_models() if each.name == f"model{number - 1}")
        run_id = model.source_run_id
        tracker = SimpleNamespace(
            log_artifact=lambda path, folder: self.client.log_artifact(run_id, str(path), folder),
            set_tags=lambda tags: [self.client.set_tag(run_id, *each) for each in tags.items()],
        )
        run = SimpleNamespace(model=ModelReference(run_id, model.model_id))
        decision = Decision([Condition("it is fine" if is_good else "it is too slow", is_good)], smoke={"ms": 1.0})
        found = PromotionOutcome(run, "house", before, None, decision)  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory() as folder:
            done = carry_out_decision(self.open_registry(), tracker, found, Path(folder))  # type: ignore[arg-type]
        return None if done is None else done.version

    def list_models(self) -> list[Any]:
        return list(self.client.search_logged_models([self.client.get_experiment_by_name("e").experiment_id]))

    def describe(self) -> dict[str, Any]:
        """The aliases, and of each version its model, its decision and the version before it."""
        aliases = dict(self.open_registry().find_aliases())
        versions = {}
        for each in self.client.search_model_versions("name = 'house'"):
            tags = self.client.get_model_version("house", each.version).tags
            decision = json.loads(tags.get("scaleflow.promotion", "null"))
            run = self.client.get_run(each.run_id)
            pages = [file.path for file in self.client.list_artifacts(each.run_id, "promotion")]
            versions[str(each.version)] = {
                "model": each.source.removeprefix("models:/"),
                "decision": decision,
                "before": tags.get("scaleflow.promotion.before"),
                "tag": run.data.tags.get("scaleflow.promotion"),
                "pages": pages,
            }
        return {"aliases": aliases, "versions": versions}


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a forked process; returns its result, or None if it was killed."""
    return join_child(*start_child(function, *arguments))


def start_child(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def work() -> None:
        there.send(function(*arguments))

    process = context.Process(target=work)
    process.start()
    there.close()
    return process, here


def join_child(process: Any, connection: Any) -> Any:
    try:
        result = connection.recv() if connection.poll(240) else None
    except EOFError:
        result = None
    process.join(240)
    assert process.exitcode in (0, -signal.SIGKILL)
    return result if process.exitcode == 0 else None


def make_store(folder: Path) -> None:
    store = Store(folder)
    store.add_models(3)
    store.promote(1, None)


def promote_killed(folder: Path, step: int, after: bool) -> str:
    """Promotes the second model; kills this process at a change of the store, before or after it."""
    from mlflow import MlflowClient

    done = []

    def count_changes(name: str) -> None:
        change = getattr(MlflowClient, name)

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            is_last = len(done) == step
            done.append(name)
            if is_last and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = change(*arguments, **keywords)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(MlflowClient, name, wrapped)

    for name in CHANGES:
        count_changes(name)
    Store(folder).promote(2, "1")
    return "finished"


def describe_store(folder: Path) -> dict[str, Any]:
    return Store(folder).describe()


def promote_second(folder: Path, before: str) -> str | None:
    return Store(folder).promote(2, before)


def kill_at_each_step(folder: Path, empty: Path) -> list[tuple[int, Any, Any]]:
    base = folder / "base"
    base.mkdir()
    shutil.copy(empty, base / "mlflow.db")
    in_child(make_store, base)
    found: list[tuple[int, Any, Any]] = []
    for step in range(20):
        copy = folder / f"step{step}"
        shutil.copytree(base, copy)
        if in_child(promote_killed, copy, step, step % 2 == 1) == "finished":
            return found
        killed = in_child(describe_store, copy)
        if killed["aliases"]["champion"] == "1":
            in_child(promote_second, copy, "1")
        found.append((step, killed, in_child(describe_store, copy)))
    raise AssertionError("it never finished")


@pytest.mark.slow
def test_a_promotion_that_is_killed_leaves_a_whole_champion(
    isolated: Callable[..., Any], tmp_path: Path, empty_store: Path
) -> None:
    found = isolated(kill_at_each_step, tmp_path, empty_store)
    assert len(found) >= 6
    for step, killed, repeated in found:
        champion = killed["versions"][killed["aliases"]["champion"]]
        assert champion["decision"]["is_good"], step
        assert champion["decision"]["model"] == champion["model"]
        assert champion["pages"] == ["promotion/house.html"]
        assert champion["before"] == ("" if killed["aliases"]["champion"] == "1" else "1")
        assert repeated["aliases"] == {"champion": "2"}, step
        assert set(repeated["versions"]) == {"1", "2"}
        assert repeated["versions"]["2"]["before"] == "1"
    assert {killed["aliases"]["champion"] for _, killed, _ in found} == {"1", "2"}


def promote_at_once(folder: Path, empty: Path) -> tuple[list[str | None], dict[str, Any]]:
    shutil.copy(empty, folder / "mlflow.db")
    in_child(make_store, folder)
    barrier = multiprocessing.get_context("fork").Barrier(2)

    def promote(number: int) -> str | None:
        store = Store(folder)
        barrier.wait(240)
        return store.promote(number, "1")

    children = [start_child(promote, number) for number in (2, 3)]
    return [join_child(*each) for each in children], in_child(describe_store, folder)


def test_of_two_promotions_at_once_one_is_decided_again(
    isolated: Callable[..., Any], tmp_path: Path, empty_store: Path
) -> None:
    versions, found = isolated(promote_at_once, tmp_path, empty_store)
    (promoted,) = (each for each in versions if each is not None)
    assert found["aliases"] == {"champion": promoted}
    assert found["versions"][promoted]["before"] == "1"
    (other,) = set(found["versions"]) - {"1", promoted}
    assert (found["versions"][other]["before"], found["versions"][other]["decision"]) == (None, None)


def roll_back_and_decline(folder: Path, empty: Path) -> list[Any]:
    shutil.copy(empty, folder / "mlflow.db")
    store = Store(folder)
    registry = store.open_registry()
    found: list[Any] = [refuse(registry.roll_back)]
    store.add_models(3)
    store.promote(1, None)
    found += [refuse(registry.roll_back), store.promote(2, "1", is_good=False), store.describe()]
    found += [store.promote(2, "1"), store.describe()["aliases"], registry.roll_back(), store.describe()["aliases"]]
    store.client.set_registered_model_alias("house", "champion", store.promote(3, "2", is_good=False) or "")
    return [*found, refuse(registry.roll_back)]


def refuse(function: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as refusal:
        function()
    return str(refusal.value)


def test_a_rollback_moves_the_alias_to_the_version_before(
    isolated: Callable[..., Any], tmp_path: Path, empty_store: Path
) -> None:
    nothing, first, kept, declined, version, promoted, moved, aliases, unknown = isolated(
        roll_back_and_decline, tmp_path, empty_store
    )
    assert nothing == "--rollback: the model house has no alias champion"
    assert first == "--rollback: version 1 of house was the first one; set the alias with MLflow"
    assert (kept, declined["aliases"]) == ("2", {"champion": "1", "challenger": "2"})
    assert declined["versions"]["2"]["decision"]["reasons"] == "it is too slow"
    assert declined["versions"]["2"]["tag"] == "house, version 2: challenger: it is too slow"
    assert (version, promoted) == ("2", {"champion": "2"})
    assert (moved, aliases) == (("2", "1"), {"champion": "1"})
    assert unknown.startswith("--rollback: version 3 of house says nothing of a version before it")
