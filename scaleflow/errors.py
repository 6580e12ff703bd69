"""The exceptions that scaleflow raises on purpose.

    ScaleflowError
    ├── ConfigError             the command cannot work: exit code 2, no run
    │   ├── StoreUnreachable    the tracking store does not answer
    │   ├── RunMissing          the tracking store has no such run, or has it in its trash
    │   │   └── RunDeleted      the run is in its trash
    │   ├── FolderBusy          another process works in the run's folder (`runs/folder.py`)
    │   └── ActorUnanswered     a Ray actor, or its machine, does not answer (`launcher/processes/ray_host.py`)
    └── RunError                a run began and could not finish: exit code 1, status FAILED
        ├── NotFinite           the loss or the weights became NaN or infinite
        ├── RunFailed           raised by `scaleflow.run`, with the run's id, folder and metrics (`api.py`)
        ├── ExportError         the exported model and the trained model give different outputs
        ├── CheckpointError     a checkpoint could not be written
        └── WorkerDied          a worker process ended without a report

An exception of a user's model or dataset keeps its type while the run trains. Before there is a run, its text becomes a
refusal.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Literal

#: What Keras writes around the reason of an error: the layer that was called, or whose weights were read, before it.
AROUND_REASON = re.compile(
    r"(?:Exception encountered when calling (.+?)\.|Example error message for object .+?:)\n\s*\n(.*?)"
    r"(?:\n\s*\n\s*(?:Arguments received|List of objects)|\Z)",
    re.DOTALL,
)


class ScaleflowError(Exception):
    """Base of every error that scaleflow raises on purpose."""


class ConfigError(ScaleflowError):
    """The command cannot work.

    The user reads the message on standard error: one or two lines that name the key, its value and what would work.
    """

    #: Keras adds the arguments of the layer that is called to the text of an exception, unless it has this.
    _keras_call_info_injected = True


class StoreUnreachable(ConfigError):
    """A tracking store does not answer. The same command may work later."""


class RunMissing(ConfigError):
    """A tracking store has no such run: it was deleted, or another store has it."""


class RunDeleted(RunMissing):
    """The run is in the trash of its store."""


class NothingCanRun(ConfigError):
    """All jobs of the first batch of a sweep are refused."""


class RunError(ScaleflowError):
    """A run that had begun could not finish. The message is recorded as the reason."""


class NotFinite(RunError):
    """The loss or the weights became NaN or infinite.

    Args:
        step: the optimizer update, counted from 1, whose loss is not finite, or after which the weights are not.
        what: which of the two.

    Attributes:
        fact: the message without its advice.
        last_cause: the last update that can be the cause; the state after it is unusable.
    """

    def __init__(self, step: int, what: Literal["the loss is", "the weights are"] = "the loss is") -> None:
        advice = "try a lower optimizer.learning_rate, training.clip_norm=1.0, or training.on_nan=rollback"
        if step == 1 and what == "the loss is":
            advice = "no update came before it, so look for NaN in the dataset's inputs or in the model"
        self.fact = f"{what} not finite at step {step}"
        super().__init__(f"{self.fact}; {advice}")
        self.step = step
        self.last_cause = step - 1 if what == "the loss is" else step


class ExportError(RunError):
    """The SavedModel, loaded again, does not give the outputs of the trained model."""


class CheckpointError(RunError):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


class WorkerDied(RunError):
    """A worker process ended without a report.

    Args:
        how: the signal or the exit status, in words.
        last_lines: the end of the process's log.
        name: the name of the process.
    """

    def __init__(self, how: str, last_lines: str, name: str = "worker 0") -> None:
        super().__init__(f"{name} {how}" + (f"; the end of its log: {last_lines}" if last_lines else ""))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class if it has none."""
    return next(iter(read_reason(error).splitlines()), type(error).__name__)


def read_reason(error: BaseException) -> str:
    """Returns an error's message without what Keras and TensorFlow write around it: calls, arguments, operations."""
    text = re.sub(r"\x1b\[\d*m", "", str(error)).strip()
    if match := AROUND_REASON.search(text):
        place = f"{match[1]}: " if match[1] else ""
        return place + read_reason(Exception(match[2]))
    text = re.split(r"(?:Exception|Error) encountered:\s", text)[-1].partition(" Full object config: ")[0].strip()
    if text.startswith("in user code:"):
        text = text.splitlines()[-1]
    return re.sub(r"\{\{function_node.*?\}\} *| *\[Op:\w*\].*", "", text).strip()


def find_similar(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known word that is most similar to a word, whatever their case, or else one that it begins."""
    words = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(word.casefold(), words, n=1, cutoff=cutoff)
    longer = sorted((each for each in words if word and each.startswith(word.casefold())), key=len)
    return words[(close or longer)[0]] if close or longer else None
