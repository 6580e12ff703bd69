"""Whatever is typed comes to a plan or to a refusal that names a key: never to another exception."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from hydra.types import RunMode

from scaleflow import cli
from scaleflow.config import compose
from scaleflow.interfaces import Plan
from scaleflow.launcher import launch
from scaleflow.launcher.command_exit import Outcome, to_printable
from tests.conftest import Command

REAL_CASES = 21

GROUPS = {
    "strategy": ["auto", "one_device", "mirrored", "multi_worker", "parameter_server", "pipeline", "tpu"],
    "hardware": ["auto", "cpu", "gpu", "tpu"],
    "precision": ["float32", "mixed", "mixed_float16", "mixed_bfloat16"],
    "dataset": ["digits", "synthetic"],
    "model": ["mlp", "cnn"],
    "optimizer": ["adagrad", "adam", "adamw", "sgd"],
    "checkpoint": ["default", "none"],
    "tracking": ["mlflow", "none"],
    "cluster": ["local", "tf_config"],
    "debug": ["none", "inline", "overfit", "fast", "nan", "placement", "eager"],
    "experiment": ["digits_mirrored", "null"],
}
KEYS = [
    "seed", "resume", "resume_data", "training", "training.epochs", "training.batch_size", "training.global_batch_size",
    "training.accumulate", "training.clip_norm", "training.early_stopping", "training.early_stopping.patience",
    "training.step", "training.step._target_", "training.callbacks", "training.on_nan", "training.steps_per_loop",
    "optimizer.learning_rate", "optimizer.schedule", "optimizer._target_", "optimizer.scale", "model._target_",
    "model.units", "model.x.y", "dataset.limit", "dataset.validation", "dataset._target_", "hardware.devices",
    "hardware.logical_devices", "hardware.tpu", "strategy.stages", "strategy.cuts", "strategy.partitioner",
    "strategy.partitioner.max_shards", "checkpoint.best", "checkpoint.folder", "checkpoint.every_seconds",
    "tracking.uri", "tracking.tags", "tracking.tags.a", "tracking.experiment", "cluster.workers", "cluster.servers",
    "debug.nan", "debug.eager", "strategy.name", "nothing", "training.nothing", "hydra.job.name",
    "hydra.verbose", "hydra.job.env_set.A",
]  # fmt: skip
VALUES = [
    "", "null", "true", "no", "0", "-1", "1", "2", "7", "1e3", "1e400", "-0.0", ".inf", "nan", "-inf", "0x1F", "0o17",
    "1_000", "9" * 30, "1" * 400, "[]", "{}", "[1,2]", "[[1],[2]]", "{a:1}", "{a:{b:[1,{c:2}]}}", "{_target_:a.b}",
    "[{_target_:keras.callbacks.TerminateOnNaN}]", "{1:2}", "{null:1}", "{true:1}", "'quoted'", '"x y"', "a b", "a,b",
    "1,2", "range(1,3)", "choice(1,2)", "interval(0,1)", "glob(*)", "sort(3,1)", "${seed}", "${training.epochs}",
    "${nothing}", "${oc.env:HOME}", "${oc.env:NOTHING_AT_ALL}", "${now:%Y}", "${", "${}", "${.epochs}", "${..seed}",
    "${training}", "${hydra:job.num}", "${hydra:nothing}", "${oc.eval:1}", "${${seed}}", "${oc.create:{a:1}}",
    "${oc.deprecated:seed}", "???", "!!python/object:os.system", "&a", "*a", "%", "@", "`", "#c", "- a", "|", ">",
    "a:b", "a: b", "é", "日本", "\U0001f600", "\u202e", "\x00", "\n", "a\nb", "\t", "\\", "'", '"', "=", "a=b", "~",
    "2026-11-21",
    "12:30:45", "/", "..", "/nothing/there", "sqlite:///x.db", "http://[", "file://", "os.system", "...", "a..b",
    "__import__('os')", "a" * 300, "\ud7ff", "float32", "val/loss", "{monitor:val/loss}",
    "{monitor: val/loss, mode: up}",
]  # fmt: skip

SENSIBLE = [
    "training.epochs=3", "training.batch_size=16", "training.accumulate=2", "training.clip_norm=1.0", "seed=7",
    "model.units=[64,32]", "optimizer.learning_rate=1e-2", "optimizer.schedule=cosine",
    "dataset.limit=${training.epochs}",
    "dataset.validation=test", "hardware.logical_devices=2", "checkpoint.best={monitor: val/loss}",
    "tracking.tags={a: é}",
    "+strategy.stages=3", "training.on_nan=rollback", "training.early_stopping={patience: 2}",
    "tracking.experiment='日本 x'",
]  # fmt: skip
ODDITIES = ["=", "+", "~seed", "~training", "a@b=c", "hydra.run.dir=/proc/none", "dataset@model=digits", "+=1"]


def make_commands() -> Any:
    """The strategy of command lines. Hypothesis is imported here: at the top, each of pytest's workers would do it."""
    from hypothesis import strategies as st

    words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
    numbers = st.one_of(st.integers().map(str), st.floats().map(str), st.integers(10**20, 10**40).map(str))
    values = st.recursive(
        st.one_of(st.sampled_from(VALUES), numbers, words),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
            st.dictionaries(st.sampled_from(["a", "_target_", "monitor", "1", "é"]), inner, max_size=2).map(
                lambda items: "{" + ",".join(f"{key}:{value}" for key, value in items.items()) + "}"
            ),
        ),
        max_leaves=4,
    )
    keys = st.one_of(st.sampled_from(KEYS), words, st.builds("{}.{}".format, st.sampled_from(KEYS), words))
    prefixes = st.sampled_from(["", "", "", "", "+", "++", "~"])
    assignments = st.builds("{}{}={}".format, prefixes, keys, values)
    choices = st.sampled_from([f"{group}={option}" for group, options in GROUPS.items() for option in options])
    wrong_choices = st.builds("{}{}={}".format, prefixes, st.sampled_from(list(GROUPS)), values)
    sensible = st.sampled_from(SENSIBLE)
    oddities = st.one_of(words, st.sampled_from(ODDITIES))
    good = st.lists(st.one_of(choices, sensible), min_size=1, max_size=4)
    odd = st.lists(
        st.one_of(choices, sensible, assignments, assignments, wrong_choices, oddities), min_size=1, max_size=4
    )
    return st.one_of(good, odd, odd, odd).filter(lambda line: not any(word.startswith("-") for word in line))


@contextlib.contextmanager
def up_to_the_plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """The command ends where it would launch, and no sweep is looked for."""
    plans: list[Plan] = []
    keys_with = functools.cache(compose.list_keys_for)
    monkeypatch.setattr(
        compose,
        "list_keys_for",
        lambda made, search: keys_with(tuple(tuple(choice) for choice in made), tuple(search)),
    )
    monkeypatch.setattr(Hydra, "get_mode", lambda *arguments, **keywords: RunMode.RUN)

    def keep(plan: Plan, *arguments: Any, **keywords: Any) -> Outcome:
        plans.append(plan)
        return Outcome()

    monkeypatch.setattr(launch, "launch_run", keep)
    yield plans


def is_a_refusal(code: int, told: str, words: Sequence[str]) -> bool:
    """One line or two on stderr that begin with our name, and say which word or key they are about."""
    message = told.removeprefix("scaleflow: ")
    typed = {part for word in words for part in (word, *re.split("[@=]", word.lstrip("+~"))[:1])}
    names = [
        *KEYS,
        *(f"{group}=" for group in GROUPS),
        *(name for part in typed if part for name in (to_printable(part), to_printable(part).replace("\n", "\\n"))),
        "TF_CONFIG",
    ]
    is_about_something = any(name in message for name in names) or "" in words
    return code == 2 and told != message and len(told.splitlines()) <= 2 and is_about_something


def in_this_process(words: Sequence[str]) -> tuple[int, str]:
    """A command in this process: its exit code, and what it says on stderr."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = cli.main(list(words))
        except SystemExit as left:
            code = int(left.code or 0)
    return code, told.getvalue()


@pytest.mark.parametrize(
    ("cases", "number"), [(12, 0), *(pytest.param(250, number, marks=pytest.mark.slow) for number in range(1, 5))]
)
def test_random_command_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cases: int, number: int) -> None:
    from hypothesis import HealthCheck, Phase, given, seed, settings

    monkeypatch.chdir(tmp_path)
    counts = {"plans": 0, "refusals": 0}

    @seed(number)
    @settings(
        max_examples=cases, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(make_commands())
    def come_to_something(words: list[str]) -> None:
        before = len(plans)
        code, told = in_this_process(words)
        if len(plans) > before:
            assert code == 0, words
            counts["plans"] += 1
        else:
            assert is_a_refusal(code, told, words), (words, code, told)
            counts["refusals"] += 1

    with up_to_the_plan(monkeypatch) as plans:
        come_to_something()
    assert counts["plans"] + counts["refusals"] >= cases * 0.9, counts
    assert min(counts.values()) > cases * 0.02, counts


REAL = [
    ["training.epochs=1e400"], ["model=\U0001f600", "debug=nan"], ["training.nothing=1"],
    ["tracking.tags={a: é}", "seed=-1"],
    ["training.batch_size=" + "9" * 30], ["dataset.limit=${nothing}"], ["dataset.limit=${oc.env:NOTHING_AT_ALL}"],
    ["optimizer.learning_rate=nan"], ["training=0"], ["model=[0,[0],[a: b]]"], ["+=1"], ["\x85u]"], ["a\nb"],
    ["training.callbacks=[{a: 1}]"], ["checkpoint.best={monitor: [1]}"], ["strategy.name=${strategy}"], ["seed=???"],
    ["model=[{a:1.0,1:2},interval(0,1)]"], ["hardware.devices=[0,0]"], ["training.epochs=1,2"],
    ["debug=nan", "hardware.xla=true"],
]  # fmt: skip


@pytest.mark.slow
def test_some_of_them_by_the_real_command(command: Command) -> None:
    assert len(REAL) == REAL_CASES
    for words in REAL:
        done = command(*words)
        assert is_a_refusal(done.returncode, done.stderr, words), (words, done.returncode, done.stderr)
    assert not list(command.folder.rglob("events.jsonl"))
