"""Options of the objective for one output, or for several by name."""

from collections.abc import Callable, Mapping
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Outputs

#: The outputs of a dataset: one, or several by name.
Described = Outputs | Mapping[str, Outputs]


def find_mask_note(model: Any, outputs: Described) -> str | None:
    """Returns a note if a model's outputs have a Keras mask, which the loss of each position does not use; else None.

    A mask does not pass through every strategy. `Outputs.ignore` does.
    """
    described = list(outputs.values()) if isinstance(outputs, Mapping) else [outputs]
    has_positions = any(len(each.shape) > 1 and each.ignore is None for each in described)
    masked = any(getattr(each, "_keras_mask", None) is not None for each in getattr(model, "outputs", None) or ())
    if not (has_positions and masked):
        return None
    return (
        "model: its outputs have a Keras mask, but the loss and the metrics also count the masked positions; to "
        "leave them out, give their targets a separate value and set Outputs.ignore to it"
    )


def by_output(outputs: Described, option: Any, key: str, is_one: Callable[[Any], bool]) -> dict[str, Any]:
    """Returns an option's value for each output that it names; "" is the name of the only output.

    Args:
        option: the value of `key`; None for none.
        key: the config key, for messages.
        is_one: returns whether a value is that of one output, and not a mapping from outputs.

    Raises ConfigError if it names an output that does not exist, or does not say which of several it is for.
    """
    if option is None:
        return {}
    if isinstance(outputs, Outputs):
        if not is_one(option):
            raise ConfigError(
                f"{key}: names the outputs {', '.join(option)}, but the dataset has a single output without a name; "
                "give its value alone"
            )
        return {"": option}
    known = ", ".join(outputs)
    if is_one(option):
        raise ConfigError(f"{key}: the dataset has the outputs {known}; write {key}={{{next(iter(outputs))}: ...}}")
    if unknown := [name for name in option if name not in outputs]:
        raise ConfigError(f"{key}: names {', '.join(map(str, unknown))}; the dataset has the outputs {known}")
    return dict(option)
