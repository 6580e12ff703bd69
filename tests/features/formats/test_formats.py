"""The formats of `export.formats`: what is refused, and in which words."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.features.formats.formats import check_formats, list_formats
from scaleflow.features.formats.record import merge_tables


def test_formats_that_cannot_be_made_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(list_formats()) == ["keras", "litert", "litert_int8", "onnx", "openvino"]
    check_formats(None)
    for names, text in (
        (["onx"], "there is no format onx; did you mean onnx? (keras, litert, litert_int8, onnx, openvino)"),
        (["keras", "keras"], "keras is there twice; leave one of them out"),
    ):
        with pytest.raises(ConfigError) as refusal:
            check_formats(names)
        assert str(refusal.value) == f"export.formats: {text}"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"onnx needs tf2onnx and onnxruntime, which is not .* 'scaleflow\[onnx\]'"):
        check_formats(["keras", "onnx"])


@pytest.mark.parametrize(
    ("name", "text", "operations"),
    [
        ("litert", "error: 'tf.StringSplitV2' op is neither a custom op nor a flex op", ["StringSplitV2"]),
        ("onnx", "No Op registered for Foo with domain_version of 18", ["Foo"]),
        ("onnx", "[ONNXRuntimeError] : 9 : Could not find an implementation for Bar(1) node", ["Bar"]),
        ("keras", "Could not find an implementation", []),
    ],
)
def test_operations_that_a_format_cannot_express_are_named(name: str, text: str, operations: list[str]) -> None:
    assert list(list_formats()[name].find_unsupported(text)) == operations


def find_faults() -> list[Any]:
    from types import SimpleNamespace

    from scaleflow.features.formats.converter import Converter, find_losses

    plan = SimpleNamespace(of=lambda section: section())
    reference = {"accuracy": 0.9, "loss": 0.3, "price/mae": 2.0, "price/loss": 4.0}
    converter = Converter(plan, None, None, None, None, reference)  # type: ignore[arg-type]
    forms = list_formats()

    def fault(name: str, **values: float) -> str:
        found = {**reference, "difference": 0.0, **values}
        return converter._find_fault(forms[name], found)

    return [
        find_losses(reference, {**reference, "accuracy": 0.88, "price/mae": 2.5}),
        fault("onnx", difference=9e-5),
        fault("onnx", difference=2e-4),
        fault("onnx", difference=float("nan")),
        fault("litert_int8", difference=0.5, accuracy=0.895),
        fault("litert_int8", accuracy=0.88),
        fault("litert_int8", **{"price/mae": 2.1}),
    ]


def test_a_format_that_differs_is_not_good(isolated: Callable[..., Any]) -> None:
    losses, *faults = isolated(find_faults)
    assert losses == pytest.approx({"accuracy": 0.02, "price/mae": 0.25})
    assert faults == [
        "",
        "its outputs differ by 0.0002 of the largest one; export.tolerance allows 0.0001",
        "its outputs are NaN or infinite where those of the model are not",
        "",
        "its accuracy is 0.88, and 0.9 in float32; export.int8_loss allows 0.01",
        "its price/mae is 2.1, and 2 in float32; export.int8_loss allows 0.01",
    ]


def test_a_table_keeps_the_formats_of_an_earlier_conversion() -> None:
    before = {"columns": ["format", "result", "mb"], "data": [["keras", "good", 1.0], ["onnx", "it failed", None]]}
    now = {"columns": ["format", "result", "ms"], "data": [["onnx", "good", 2.0]]}
    assert merge_tables(before, now) == {
        "columns": ["format", "result", "ms", "mb"],
        "data": [["keras", "good", None, 1.0], ["onnx", "good", 2.0, None]],
    }
