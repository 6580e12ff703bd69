"""A rotation that looks like a part of a turn, as Keras has it, gets a note."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scaleflow.config.plan import check_rules


@pytest.mark.parametrize(("degrees", "is_noted"), [("0.1", True), ("0.99", True), ("1", False), ("15", False)])
def test_a_rotation_below_one_degree_gets_a_note(plan: Callable[..., Any], degrees: str, is_noted: bool) -> None:
    notes = [note for note in check_rules(plan(f"dataset.augment={{rotation: {degrees}}}")) if "rotation" in note]
    assert bool(notes) == is_noted
    if is_noted:
        assert notes[0].startswith(f"dataset.augment.rotation={degrees}: it is in degrees")
        assert "0.1 are 36 degrees" in notes[0]
