"""Fine-tuning: frozen layers, LoRA, and learning rates for parts of a model."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import keras

from scaleflow.compat import keras as private
from scaleflow.errors import ConfigError
from scaleflow.interfaces import FreezePhase, Lora, Model

#: A message names at most this many layers.
NAMED = 12


def walk_layers(model: keras.Layer, prefix: str = "") -> Iterator[tuple[str, keras.Layer]]:
    """Yields (path, layer) for each layer with weights, at any depth: `backbone`, `backbone/block`, and so on."""
    for layer in private.flatten_layers(model, include_self=False, recursive=False):
        if layer.weights:
            path = prefix + layer.name
            yield path, layer
            yield from walk_layers(layer, f"{path}/")


def matches(path: str, pattern: str) -> bool:
    """Returns whether a pattern matches a path or its last parts, such as a layer's name. `*` also matches `/`."""
    parts = path.split("/")
    return any(fnmatchcase("/".join(parts[first:]), pattern) for first in range(len(parts)))


def find_layers(model: keras.Model, pattern: str, setting: str) -> list[keras.Layer]:
    """Returns the layers with weights that match a pattern.

    Args:
        pattern: a layer's name or path, with `*` for any characters and `?` for one.
        setting: the key and its value, for the message.

    Raises ConfigError if no layer matches.
    """
    layers = dict(walk_layers(model))
    matching = [layer for path, layer in layers.items() if matches(path, pattern)]
    if not matching:
        raise ConfigError(
            f"{setting}: {pattern} matches no layer with weights{suggest_name(pattern, layers)}; the model has "
            f"{format_paths(layers)}"
        )
    return matching


def suggest_name(pattern: str, paths: Iterable[str]) -> str:
    """Returns `; did you mean X?` for the most similar path, outer layers first; an empty string if none is similar."""
    for depth in range(2):
        named = {path.lower(): path for path in paths if path.count("/") == depth}
        similar = difflib.get_close_matches(pattern.removeprefix("!").lower(), named, n=1)
        if similar:
            return f"; did you mean {named[similar[0]]}?"
    return ""


def format_paths(names: Collection[str]) -> str:
    """Formats up to `NAMED` paths of layers, outer layers first. A layer with inner layers shows their number."""
    ordered = sorted(names, key=lambda path: path.count("/"))
    shown = ordered[:NAMED]
    if len(ordered) > NAMED:  # inner layers all or none
        first_hidden = ordered[NAMED]
        shown = [path for path in shown if path.count("/") < first_hidden.count("/")] or shown
    texts = []
    for path in shown:
        inner = sum(other.startswith(f"{path}/") for other in names)
        texts.append(f"{path} (contains {inner})" if inner else path)
    text = ", ".join(texts)
    if len(ordered) > len(shown):
        text += f" and {len(ordered) - len(shown)} more"
    return text


#: Prefix of the functions that make scaleflow's own models.
OWN_MODELS = "scaleflow.model."


def fine_tune(model: keras.Model, options: Model) -> None:
    """Freezes layers and adds LoRA according to the config group `model`. Call it in the strategy's scope.

    If `model.freeze` depends on the epoch, it freezes nothing: see `list_freeze_phases`.

    Raises ConfigError if a pattern matches no layer, or if nothing is left to train.
    """
    if isinstance(options.freeze, list):
        freeze_layers(model, options.freeze, format_patterns(options.freeze))
    if options.lora is not None:
        add_lora(model, options.lora)
    if isinstance(options.freeze, list) and options.freeze:
        check_trains(model, format_patterns(options.freeze))


def check_trains(model: keras.Model, setting: str) -> None:
    """Raises ConfigError if no variable of the model trains."""
    if not model.trainable_variables:
        names = format_paths(dict(walk_layers(model)))
        raise ConfigError(f"{setting}: no layer is left to train; the model has {names}")


def list_freeze_phases(model: keras.Model, options: Model) -> list[FreezePhase]:
    """Lists the phases of `model.freeze`: the layers that train from an epoch on. Empty if it does not change.

    Call it after `fine_tune`. The patterns of each phase apply to the model as it was made, not to the phase before.
    Afterwards every layer that trains in any phase is trainable, so that the optimizer creates state for all of them.

    Raises ConfigError if a pattern matches no layer, or if nothing trains in a phase.
    """
    if not isinstance(options.freeze, dict):
        return []
    parts = [*private.flatten_layers(model), *model.variables]
    at_first = [(part, part.trainable) for part in parts]
    trains_in_any = [False] * len(parts)
    phases = []
    for epoch, patterns in sorted(options.freeze.items()):
        private.set_trainable(at_first)
        setting = format_patterns({epoch: patterns})
        freeze_layers(model, patterns, setting)
        train_lora(model)
        check_trains(model, setting)
        phases.append(FreezePhase(epoch, [(part, part.trainable) for part in parts]))
        for n, part in enumerate(parts):
            trains_in_any[n] = trains_in_any[n] or part.trainable
    private.set_trainable(zip(parts, trains_in_any, strict=True))
    return phases


def format_patterns(freeze: Sequence[str] | Mapping[int, Sequence[str]]) -> str:
    """Formats `model.freeze=...` as a user types it."""
    if not isinstance(freeze, Mapping):
        return f"model.freeze=[{', '.join(freeze)}]"
    phases = [f"{epoch}: [{', '.join(patterns)}]" for epoch, patterns in freeze.items()]
    return f"model.freeze={{{', '.join(phases)}}}"


def loads_weights(options: Model) -> bool:
    """Returns whether the config says that the model starts from saved weights."""
    arguments = options.target.arguments
    weights = arguments.get("weights")  # `keras_hub` has True here, which means weights only with a preset
    return bool(options.init_from or (weights and arguments.get("preset", weights)))


def find_freeze_warning(model: keras.Model, options: Model) -> str | None:
    """Returns a warning if a built-in model has frozen layers with random weights; else None."""
    if not options.target.path.startswith(OWN_MODELS):  # a model of the user's may have loaded weights
        return None
    frozen = [path for path, layer in walk_layers(model) if "/" not in path and not layer.trainable]
    if not options.freeze or not frozen:
        return None
    advice = "model.init_from"
    for key in ("preset", "weights"):
        if key in options.target.arguments:
            advice += f" or model.{key}"
            break
    return (
        f"{format_patterns(options.freeze)}: the weights of {format_paths(frozen)} are random and stay so; set {advice}"
    )


def freeze_layers(model: keras.Model, patterns: Sequence[str], setting: str) -> None:
    """Freezes all layers that match a pattern, with their inner layers.

    Patterns apply in order. A pattern that starts with `!` makes its layers trainable again. `setting` is the key and
    its value, for messages.
    """
    for pattern in patterns:
        for layer in find_layers(model, pattern.removeprefix("!"), setting):
            layer.trainable = pattern.startswith("!")


def add_lora(model: keras.Model, options: Lora) -> None:
    """Adds LoRA (Hu et al. 2021, arXiv:2106.09685) to the layers that match a pattern, and to their inner layers.

    The weight matrices of these layers no longer train. The new low-rank matrices do, even in a frozen layer.

    Raises ConfigError if a pattern matches no layer that supports LoRA, or if Keras cannot add it.
    """
    names = options.layers or []
    setting = f"model.lora.layers=[{', '.join(names)}]"
    able = {path: layer for path, layer in walk_layers(model) if hasattr(layer, "enable_lora")}
    able_ids = set(map(id, able.values()))
    chosen: dict[int, keras.Layer] = {}
    for pattern in names:
        matching: dict[int, keras.Layer] = {}
        for outer in find_layers(model, pattern, setting):
            for layer in private.flatten_layers(outer):
                if id(layer) in able_ids:
                    matching[id(layer)] = layer
        if not matching:
            raise ConfigError(
                f"{setting}: {pattern} matches no layer that takes LoRA; these do: {format_paths(able) or 'none'}"
            )
        chosen |= matching
    for layer in chosen.values():
        try:
            layer.enable_lora(options.rank)
        except ValueError as error:  # the weights have a constraint, or LoRA already
            raise ConfigError(f"{setting}: {layer.name}: {' '.join(str(error).split())}") from error
    train_lora(model)


def train_lora(model: keras.Model) -> None:
    """Makes the low-rank matrices of LoRA trainable and freezes the weight matrices, also in frozen layers.

    Freezing a layer in Keras freezes its LoRA matrices as well.
    """
    for layer in private.flatten_layers(model):
        if getattr(layer, "lora_enabled", False):
            weights, first, second = private.list_lora_matrices(layer)
            weights.trainable = False
            first.trainable = True
            second.trainable = True


def merge_lora(model: keras.Model) -> keras.Model:
    """Adds the product of the LoRA matrices to the weight matrices, removes LoRA and returns the model.

    The layers then have the same set of weights as before LoRA was added.
    """
    for layer in private.flatten_layers(model):
        if getattr(layer, "lora_enabled", False):
            weights, first, second = private.list_lora_matrices(layer)
            scale = getattr(layer, "lora_alpha", layer.lora_rank) / layer.lora_rank  # Keras 3.8 has no lora_alpha
            weights.assign(weights + scale * keras.ops.matmul(first, second))
            private.remove_lora(layer)
    return model


def find_decayed(model: keras.Model, excluded: Sequence[str]) -> list[bool]:
    """Returns, for each trainable variable, whether weight decay applies to it.

    `excluded` is `optimizer.no_decay`: `bias`, `norm`, or patterns of layers.

    Raises ConfigError if a pattern matches no layer.
    """
    setting = f"optimizer.no_decay=[{', '.join(excluded)}]"
    without_decay: list[keras.Variable] = []
    for name in excluded:
        if name == "bias":
            without_decay += [variable for variable in model.trainable_variables if variable.name.endswith("bias")]
        elif name == "norm":
            for _, layer in walk_layers(model):
                if "norm" in type(layer).__name__.lower():  # its own weights: a wrapper holds the layer it normalizes
                    without_decay += private.list_own_weights(layer)
        else:
            for layer in find_layers(model, name, setting):
                without_decay += layer.variables
    ids = set(map(id, without_decay))
    return [id(variable) not in ids for variable in model.trainable_variables]


def find_rate_factors(model: keras.Model, factors: Mapping[str, float]) -> list[float]:
    """Returns the learning rate factor of each trainable variable. If several patterns match, the last one counts.

    Raises ConfigError if a pattern matches no layer, or only layers that do not train.
    """
    shown = ", ".join(f"{pattern}: {factor:g}" for pattern, factor in factors.items())
    setting = f"optimizer.rate_factors={{{shown}}}"
    by_id: dict[int, float] = {}
    for pattern, factor in factors.items():
        variables: list[keras.Variable] = []
        for layer in find_layers(model, pattern, setting):
            variables += [variable for variable in layer.variables if variable.trainable]
        if not variables:
            raise ConfigError(f"{setting}: {pattern} matches only layers that do not train; leave it out")
        for variable in variables:
            by_id[id(variable)] = factor
    return [by_id.get(id(variable), 1.0) for variable in model.trainable_variables]
