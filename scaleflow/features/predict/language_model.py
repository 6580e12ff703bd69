"""Continues texts with a run's language model and its recorded tokenizer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import LearnedState, Plan, name_command
from scaleflow.interfaces.sampling import Sampling
from scaleflow.runs.run import Run

#: The data source whose runs record their tokenizer.
SOURCE = "scaleflow.dataset.tokens.Tokens"

#: Maximum number of unknown words that a message names.
MAX_NAMED = 5


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for generating text. A flag that is not typed is None."""
    default = Sampling()
    for flag, metavar, kind, about in (
        ("--tokens", "N", int, f"how many tokens to generate (default: {default.tokens})"),
        ("--temperature", "T", float, "0: the most probable token each time; 1, the default: as the model predicts"),
        ("--top-k", "K", int, "draw among the K most probable tokens (default: all)"),
        ("--top-p", "P", float, "draw among the most probable tokens that together have this probability"),
        ("--seed", "S", int, f"the same seed draws the same text (default: {default.seed})"),
    ):
        parser.add_argument(flag, metavar=metavar, type=kind, help=about)


def read_sampling(typed: argparse.Namespace) -> Sampling | None:
    """Returns the sampling options typed as flags, or None without flags. Raises ConfigError if one is wrong."""
    options = {}
    for option in fields(Sampling):
        value = getattr(typed, option.name)
        if value is not None:
            options[option.name] = value
    sampling = Sampling(**options)
    sampling.check(lambda name: f"--{name.replace('_', '-')} ")
    return sampling if options else None


def is_language_model(state: LearnedState) -> bool:
    """Returns whether a run learned to predict tokens and recorded its tokenizer."""
    return state.source == SOURCE and "tokenizer" in state.reading


def explain_no_language_model(run: Run) -> ConfigError:
    """Returns the error for a run without a language model."""
    if len(getattr(run.learned_state.outputs, "shape", ())) == 2:
        reason = "its dataset made the tokens itself, so scaleflow does not know what text they are"
    else:
        reason = "it does not predict the next token"
    return ConfigError(
        f"{run.run_id}: this run is no language model of dataset=tokens: {reason}; use {name_command('predict')}"
    )


class LanguageModel:
    """Continues texts.

    Args:
        path: an exported model: a Keras file or the folder of a SavedModel.
        state: the run's learned state.

    Raises:
        ConfigError: if the model or the tokenizer cannot be loaded, or the model looks at later tokens.
    """

    def __init__(self, path: Path, state: LearnedState) -> None:
        from scaleflow.dataset.reading.tokenizer import restore_tokenizer
        from scaleflow.model.gpt import load_next_token

        inputs: Any = state.inputs
        (self._window,) = inputs.shape
        self._tokenizer = restore_tokenizer(state.reading["tokenizer"], state.reading.get("learned"))
        self._predict = load_next_token(path, self._window, inputs.dtype)

    def encode(self, prompt: str) -> list[int]:
        """Returns the tokens of a prompt.

        Raises ConfigError if it is empty, or has words that the run does not know.
        """
        from scaleflow.dataset.reading.tokenizer import find_unknown

        unknown = find_unknown(self._tokenizer, prompt)
        if unknown:
            more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
            raise ConfigError(
                f"the run does not know {', '.join(map(repr, unknown[:MAX_NAMED]))}{more}: its vocabulary is that of "
                "its training data; use other words"
            )
        tokens = self._tokenizer.encode(prompt.encode()).tolist() if prompt else []
        if not tokens:
            raise ConfigError("the text is empty; give the beginning of the text to generate, such as 'The '")
        return list(map(int, tokens))

    def generate(self, tokens: list[int], sampling: Sampling) -> Iterator[str]:
        """Yields the generated text after a prompt's tokens, in pieces."""
        from scaleflow.dataset.reading.tokenizer import TextStream
        from scaleflow.model.gpt import generate_tokens

        stream = TextStream(self._tokenizer, tokens)
        unused = self._tokenizer.unused
        for token in generate_tokens(self._predict, tokens, self._window, sampling=sampling, unused=unused):
            yield stream.add(token)
        yield stream.finish()


def load_language_model(plan: Plan, run: Run, folder: Path) -> LanguageModel:
    """Downloads a run's model into a folder and loads it on the devices of a plan.

    Raises ConfigError as `LanguageModel` does.
    """
    from scaleflow.tracking.saved_models import download_saved_model
    from scaleflow.tracking.tracked_runs import download_model
    from scaleflow.worker.keras_import import import_keras
    from scaleflow.worker.runtime import setup_runtime

    import_keras()
    setup_runtime(plan, lambda event: None)
    refusals = []
    for download in (download_model, download_saved_model):  # there may be no Keras file, or no code for it
        try:
            return LanguageModel(download(run.tracker, run.model, folder), run.learned_state)
        except ConfigError as refusal:
            refusals.append(refusal)
    raise refusals[0]
