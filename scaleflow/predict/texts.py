"""Continues a text with the language model of a run, for `scaleflow generate` and `scaleflow.generate_text`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from scaleflow.commands.tracked_run import load_learned_state
from scaleflow.config.from_mlflow import RerunCommand, find_store_options
from scaleflow.config.words import make_override
from scaleflow.errors import ConfigError
from scaleflow.interfaces.sampling import Sampling
from scaleflow.launcher.display import IMPORTING, Display
from scaleflow.launcher.named_runs import find_named_run
from scaleflow.predict.command import hide_errors, make_prediction_plan
from scaleflow.predict.language_model import explain_no_language_model, is_language_model, load_language_model
from scaleflow.tracking.tracked_runs import TrackedRun


def generate_text(
    run_id: str | Path,
    prompt: str,
    *,
    tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    uri: str | None = None,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """Returns the text with which a language model continues a prompt, as `scaleflow generate` does.

    It computes in this process, so it imports TensorFlow.

    Args:
        run_id: a run of `dataset=tokens`, or its model: what `scaleflow generate` takes as RUN_ID.
        prompt: the beginning of the text. It is not part of what is returned.
        tokens: how many tokens are generated. At least 1.
        temperature: 0: the most probable token each time; 1: as the model predicts. At least 0.
        top_k: draws among this many of the most probable tokens. None: among all.
        top_p: draws among the most probable tokens that together have this probability. Above 0, at most 1.
        seed: the same seed draws the same text. At least 0.
        uri: the address of the store that has the run; None: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db.
        on_text: gets each piece of the text as soon as it is generated.

    Raises:
        ConfigError: if there is no such run, it is no language model, the prompt is empty or has words that the run
            does not know, or a value is out of its range.
    """
    sampling = Sampling(tokens, temperature, top_k, top_p, seed)
    sampling.check()
    overrides = [] if uri is None else [make_override("tracking.uri", uri)]
    typed = argparse.Namespace(run_id=str(run_id), overrides=overrides, prompt=prompt)
    quiet = Display(sys.stderr, shows_stages=False)
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        if on_text is not None and len(pieces) > 1:  # the first one is the prompt
            on_text(text)

    return continue_text(typed, sampling, show, quiet, "prompt")[0]


def continue_text(
    typed: argparse.Namespace, sampling: Sampling, show: Callable[[str], None], display: Display, label: str
) -> tuple[str, TrackedRun, float]:
    """Shows the prompt, then each piece of its continuation.

    Returns:
        The continuation, the run, and the seconds that it took.

    Raises:
        ConfigError: as `generate_text` does; `label` names the prompt.
    """
    plan = make_prediction_plan(typed)
    if not typed.prompt:
        raise ConfigError(f"{label}: the text is empty; give the beginning of the text to generate, such as 'The '")
    display.begin_stage("reading the run and its model from MLflow")
    options = find_store_options(RerunCommand(typed.run_id, typed.overrides))
    store, tracker, tracked = find_named_run(typed.run_id, options)
    state = load_learned_state(tracker, tracked, store)
    if state is None or not is_language_model(state):
        raise explain_no_language_model(tracked.run_id, state)
    with tempfile.TemporaryDirectory(prefix="scaleflow-generate-") as folder:
        display.begin_stage(f"{IMPORTING} and loading the model")
        with hide_errors():
            model = load_language_model(plan, tracker, tracked, store, state, Path(folder))
            try:
                tokens = model.encode(typed.prompt)
            except ConfigError as refusal:
                raise ConfigError(f"{label}: {refusal}") from refusal
        display.end_stage()
        show(typed.prompt)
        began, pieces = time.monotonic(), []
        for piece in model.generate(tokens, sampling):
            pieces.append(piece)
            show(piece)
    return "".join(pieces), tracked, time.monotonic() - began
