"""Lets a language model continue a text.

    scaleflow generate RUN_ID --prompt "Once upon a time"
    scaleflow generate RUN_ID --prompt "The " --tokens 300 --temperature 0.8 --top-k 40 --seed 1

RUN_ID is the id of a run of dataset=tokens in MLflow, the folder of the run, or its model: models:/NAME/VERSION,
models:/NAME@ALIAS or models:/m-... The run is looked up in `tracking.uri=...`, else in MLFLOW_TRACKING_URI, else in
sqlite:///mlflow.db.

The text appears on standard output as it is generated; everything else is on standard error. The prompt is read by the
tokenizer of the run. A new token depends on the tokens in the window that the model was trained on (`dataset.tokens`).
When the window is full, it moves on by half. For many prompts, a table or a folder of them, use `scaleflow predict`.

Exit code: 0 the text is generated; 1 it failed; 2 the command cannot work; 130 or 143 interrupted.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from scaleflow.commands.frame import CommandParser, make_main
from scaleflow.commands.tracked_run import add_run_id, answer_model, find_run, format_model_rows
from scaleflow.config.compose import CommandWords
from scaleflow.config.typed_folder import in_typed_folder
from scaleflow.config.words import make_override
from scaleflow.errors import ConfigError
from scaleflow.features.predict.command import hide_errors, make_prediction_plan
from scaleflow.features.predict.language_model import (
    add_sampling_flags,
    explain_no_language_model,
    is_language_model,
    load_language_model,
    read_sampling,
)
from scaleflow.interfaces.sampling import Sampling
from scaleflow.launcher.command_exit import Outcome
from scaleflow.launcher.display import IMPORTING, Display, display_for
from scaleflow.runs.run import Run

#: Control characters, which could change a terminal. A model of bytes may generate any of them.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@make_main
def main(words: list[str]) -> Outcome:
    parser = CommandParser("generate", __doc__)
    add_run_id(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="an override of hardware, strategy or tracking.uri"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the beginning of the text")
    add_sampling_flags(parser)
    typed = parser.parse_intermixed_args(words)
    sampling = read_sampling(typed) or Sampling()
    printable: Callable[[str], str] = (lambda text: CONTROLS.sub("\ufffd", text)) if sys.stdout.isatty() else str

    def show(text: str) -> None:
        print(printable(text), end="", flush=True)

    with display_for(sys.stderr) as display:
        text, run, seconds = continue_text(typed, sampling, show, display=display, label="--prompt")
        print(flush=True)
        rate = f"{sampling.tokens:,} tokens, {sampling.tokens / seconds:,.0f} tokens/s"
        display.print_summary([*format_model_rows(run), ("generated", rate)])
    answer = {**answer_model(run), "prompt": typed.prompt, "text": text, "tokens": sampling.tokens}
    return Outcome(read=lambda: {**answer, "seconds": seconds})


@in_typed_folder
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
    """Returns a language model's continuation of a prompt, as `scaleflow generate` does.

    It computes in this process, so it imports TensorFlow.

    Args:
        run_id: a run of `dataset=tokens`, or its model, like RUN_ID of `scaleflow generate`.
        prompt: the beginning of the text. The result does not repeat it.
        tokens: number of tokens to generate. At least 1.
        temperature: 0: the most probable token each time; 1: as the model predicts. At least 0.
        top_k: draws among this many of the most probable tokens. None: among all.
        top_p: draws among the most probable tokens that together have this probability. Above 0, at most 1.
        seed: the same seed draws the same text. At least 0.
        uri: address of the store with the run; None: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db.
        on_text: receives each piece of the text as soon as it is generated.

    Raises:
        ConfigError: if the run does not exist or is not a language model, if the prompt is empty or has words that the
            run does not know, or if a value is out of its range.
    """
    sampling = Sampling(tokens, temperature, top_k, top_p=top_p, seed=seed)
    sampling.check()
    overrides = [] if uri is None else [make_override("tracking.uri", uri)]
    typed = argparse.Namespace(run_id=str(run_id), overrides=overrides, prompt=prompt)
    quiet = Display(sys.stderr, shows_phases=False)
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        if on_text is not None and len(pieces) > 1:  # the first piece is the prompt
            on_text(text)

    return continue_text(typed, sampling, show, display=quiet, label="prompt")[0]


def continue_text(
    typed: argparse.Namespace, sampling: Sampling, show: Callable[[str], None], display: Display, label: str
) -> tuple[str, Run, float]:
    """Shows the prompt, then each piece of its continuation.

    Returns:
        The continuation, the run, and the seconds for generating.

    Raises:
        ConfigError: as `generate_text` does. Messages call the prompt `label`.
    """
    plan = make_prediction_plan(typed)
    if not typed.prompt:
        raise ConfigError(f"{label}: the text is empty; give the beginning of the text to generate, such as 'The '")
    display.begin_phase("reading the run and its model from MLflow")
    run, _ = find_run(CommandWords(typed.overrides, run_id=typed.run_id), needs_run=False)
    if not is_language_model(run.learned_state):
        raise explain_no_language_model(run)
    with tempfile.TemporaryDirectory(prefix="scaleflow-generate-") as folder:
        display.begin_phase(f"{IMPORTING} and loading the model")
        with hide_errors():
            model = load_language_model(plan, run, Path(folder))
            try:
                tokens = model.encode(typed.prompt)
            except ConfigError as refusal:
                raise ConfigError(f"{label}: {refusal}") from refusal
        display.end_phase()
        show(typed.prompt)
        began = time.monotonic()
        pieces = []
        for piece in model.generate(tokens, sampling):
            pieces.append(piece)
            show(piece)
    return "".join(pieces), run, time.monotonic() - began
