import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scaleflow.config.targets import bind_target, check_plan_targets
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan, Target

OWN = """
NUMBER = 3

def build(inputs, outputs, units, dropout=0.0):
    return inputs, outputs, units, dropout

def rate(dropout=0.0, count=1, is_on=0.5):
    return dropout, count, is_on

def anything(**keywords):
    return keywords

def by_position(a, /, b=1):
    return a, b

def nothing():
    return "made"

class Layer:
    def __init__(self, width, inner=None):
        self.width, self.inner = width, inner
"""


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules = {
        "own_targets": OWN,
        "own_broken": "raise RuntimeError('no licence\\nfound')",
        "own_needs": "import a_module_that_is_not_there",
        "own_syntax": "def build(:",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in modules:
        sys.modules.pop(name, None)


def target(path: str, **arguments: Any) -> Target:
    return Target("model", path, arguments)


def refused(path: str, given: int = 0, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        bind_target(target(path, **arguments), given)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_a_similar_name_of_the_module_is_suggested() -> None:
    assert "did you mean own_targets.Layer?" in refused("own_targets.layr")
    assert "did you mean own_targets.nothing?" in refused("own_targets.no")  # what it begins, as F1 begins F1Score
    assert "did you mean" not in refused("own_targets.quite_another") + refused("no_such_module.Layer")


def test_the_arguments_are_bound_and_the_caller_adds_its_own() -> None:
    assert bind_target(target("own_targets.build", units=8), positional=2)("in", "out") == ("in", "out", 8, 0.0)


def test_nothing_is_called_before_the_caller_does() -> None:
    assert callable(bind_target(target("own_targets.nothing")))
    assert bind_target(target("own_targets.nothing"))() == "made"


def test_a_class_is_a_target_too() -> None:
    assert bind_target(target("own_targets.Layer", width=3))().width == 3


def test_a_function_that_takes_any_keyword_gets_them_all() -> None:
    assert bind_target(target("own_targets.anything", a=1, b=[2]))() == {"a": 1, "b": [2]}


def test_a_builtin_without_a_signature_says_itself_what_it_takes() -> None:
    assert bind_target(target("builtins.dict", a=1))() == {"a": 1}


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("no_such_module.build", "No module named 'no_such_module'"),
        ("own_targets.nowhere", "nowhere"),
        ("own_targets.Layer.nowhere", "nowhere"),
        ("own_broken.build", "RuntimeError: no licence"),
        ("own_needs.build", "No module named 'a_module_that_is_not_there'"),
        ("own_syntax.build", "SyntaxError"),
        ("no_such_name", "no_such_name"),
        ("own_targets..build", "own_targets..build"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_refused_with_the_cause(path: str, cause: str) -> None:
    message = refused(path)
    assert message.startswith(f"model._target_={path}: cannot be loaded (")
    assert cause in message
    assert "current folder" in message


@pytest.mark.parametrize("path", ["no_such_module.build", "own_targets.nowhere", "own_targets.Layer.nowhere"])
def test_a_missing_target_is_named_without_the_class_of_an_error(path: str) -> None:
    assert "Error" not in refused(path)


def test_a_target_that_cannot_be_loaded_is_not_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        bind_target(Target("training.step", "json.nothing"))
    assert caplog.text == ""


@pytest.mark.parametrize(("path", "kind"), [("own_targets.NUMBER", "int"), ("own_targets", "module")])
def test_target_that_cannot_be_called_is_refused(path: str, kind: str) -> None:
    assert refused(path) == f"model._target_={path}: this is a {kind}, expected a class or a function"


@pytest.mark.parametrize(
    ("path", "given", "takes"),
    [
        ("own_targets.build", 2, "units, dropout"),
        ("own_targets.Layer", 0, "width, inner"),
        ("own_targets.nothing", 0, "no arguments"),
    ],
)
def test_an_unknown_argument_is_refused_with_those_that_it_takes(path: str, given: int, takes: str) -> None:
    assert refused(path, given, units_=8) == f"model.units_=8: {path} has no such argument; it accepts {takes}"


def test_an_argument_that_is_taken_by_position_alone_is_refused() -> None:
    assert refused("own_targets.by_position", a=1).startswith("model.a=1: own_targets.by_position has no such argument")


def test_a_missing_argument_is_refused_by_name() -> None:
    message = refused("own_targets.build", 2)
    assert message.startswith("model._target_=own_targets.build: missing a required argument: 'units'")
    assert "set it under model" in message


def test_an_argument_that_the_caller_gives_is_not_the_users_to_set() -> None:
    message = refused("own_targets.build", 2, inputs=1, units=8)
    assert message.startswith("model.inputs=1: ")
    assert "set it under model" not in message


def test_a_nested_target_is_built() -> None:
    inner = {"_target_": "own_targets.Layer", "width": 1}
    outer = bind_target(target("own_targets.Layer", width=2, inner=inner))()
    assert (outer.inner.width, outer.inner.inner) == (1, None)


def test_nested_targets_in_a_list_are_built_and_plain_values_stay_plain() -> None:
    made = bind_target(
        target("own_targets.anything", many=[{"_target_": "own_targets.Layer", "width": 1}], plain={"a": [1]})
    )()
    assert made["many"][0].width == 1
    assert made["plain"] == {"a": [1]}
    assert type(made["plain"]) is dict
    assert type(made["plain"]["a"]) is list


@pytest.mark.parametrize(
    ("inner", "cause"),
    [
        ({"_target_": "own_targets.nowhere"}, "own_targets.nowhere"),
        ({"_target_": "own_targets.Layer", "widht": 1}, "widht"),
        ({"_target_": "own_broken.build"}, "own_broken.py, line 1"),
    ],
)
def test_a_nested_target_that_cannot_be_built_is_refused_by_its_key(inner: dict[str, Any], cause: str) -> None:
    message = refused("own_targets.Layer", width=2, inner=inner)
    assert message.startswith("model.inner: ")
    assert cause in message


def test_a_whole_number_is_a_float_where_the_default_is_one() -> None:
    taken = bind_target(target("own_targets.rate", dropout=0, count=2, is_on=True))()
    assert [repr(value) for value in taken] == ["0.0", "2", "True"]


def test_parts_of_a_run_are_checked_without_being_made(plan: Callable[..., Plan]) -> None:
    check_plan_targets(plan("tracking=none"))
    callback = "training.callbacks=[{_target_: own_targets.Layer}]"
    with pytest.raises(ConfigError, match=r"callbacks.*own_targets.Layer: missing a required argument: 'width'; set"):
        check_plan_targets(plan("tracking=none", callback))
    check_plan_targets(plan("tracking=none", callback.replace("Layer}", "Layer, width: 3}")))
    with pytest.raises(ConfigError, match=r"training.step._target_=own_targets.nothing: .* takes fewer"):
        check_plan_targets(plan("tracking=none", "training.step={_target_: own_targets.nothing}"))
    with pytest.raises(ConfigError, match=r"training.callbacks.*\.wide=3: .* has no such argument"):
        check_plan_targets(plan("tracking=none", callback.replace("Layer}", "Layer, width: 3, wide: 3}")))
    with pytest.raises(ConfigError, match=r"objective.loss._target_=own_targets.build: missing .* 'units'"):
        check_plan_targets(plan("tracking=none", "objective.loss={_target_: own_targets.build}"))
    with pytest.raises(ConfigError, match=r"objective.metrics.*own_targets.build: missing .* 'units'"):
        check_plan_targets(plan("tracking=none", "objective.metrics=[auc, {_target_: own_targets.build}]"))


def test_an_argument_that_a_run_adds_is_not_missing(plan: Callable[..., Plan]) -> None:
    """The outputs of the dataset say the number of classes."""
    check_plan_targets(plan("objective.metrics=[{_target_: keras.metrics.MeanIoU}]"))
