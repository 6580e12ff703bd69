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

import contextlib
import re
import sys
from collections.abc import Callable, Sequence

from scaleflow.__main__ import entry
from scaleflow.commands.frame import CommandParser, run_command
from scaleflow.commands.tracked_run import add_run_id, answer_model, format_model_rows
from scaleflow.interfaces.sampling import Sampling
from scaleflow.launcher.answer import ANSWER, FINISHED
from scaleflow.launcher.display import display_for
from scaleflow.predict.language_model import add_sampling_flags, read_sampling
from scaleflow.predict.texts import continue_text

#: Characters that could change a terminal. A model of bytes may write any.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    return run_command(generate_words, argv)


def generate_words(words: list[str]) -> int:
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

    with contextlib.closing(display_for(sys.stderr)) as display:
        text, tracked, seconds = continue_text(typed, sampling, show, display, "--prompt")
        print(flush=True)
        rate = f"{sampling.tokens:,} tokens, {sampling.tokens / seconds:,.0f} tokens/s"
        display.print_summary([*format_model_rows(tracked), ("generated", rate)])
    answer = {**answer_model(tracked), "prompt": typed.prompt, "text": text, "tokens": sampling.tokens}
    ANSWER.read = lambda: {**answer, "seconds": seconds}
    return FINISHED


if __name__ == "__main__":
    entry("generate")
