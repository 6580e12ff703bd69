"""The exceptions that scaleflow raises on purpose.

    ScaleflowError
    ├── ConfigError             the command cannot work: exit code 2, no run
    │   ├── StoreUnreachable    the tracking store does not answer
    │   ├── RunMissing          the tracking store has no such run, or has it in its trash
    │   │   └── RunDeleted      the run is in its trash
    │   └── FolderBusy          another process works in the run's folder (`runs/folder.py`)
    └── RunError                a run began and could not finish: exit code 1, status FAILED
        ├── NotFinite           the loss or the weights became NaN or infinite
        ├── RunFailed           raised by `scaleflow.run`, with the run's id, folder and metrics (`api.py`)
        ├── ExportError         the exported model and the trained model give different outputs
        ├── CheckpointError     a checkpoint could not be written
        └── WorkerDied          a worker process ended without a report

An exception in a user's model or dataset keeps its type during training. Before the run starts, it becomes a
ConfigError with its text.
"""

import contextlib
import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

#: Keras's text around the reason of an error. It has the layer that was called, or whose weights were read.
AROUND_REASON = re.compile(
    r"(?:Exception encountered when calling (.+?)\.|Example error message for object .+?:)\n\s*\n(.*?)"
    r"(?:\n\s*\n\s*(?:Arguments received|List of objects)|\Z)",
    re.DOTALL,
)

#: TensorFlow's insertions in a reason: names of functions, operations and iterators.
WITHIN_REASON = re.compile(
    r"\{\{function_node.*?\}\} *| *\[Op:\w*\].*| *\[\[\{\{node.*| for '\{\{node [^']*'"
    r"|Error in user-defined function passed to .*?Iterator::\S+: |\bConfigError: "
)

#: Lines of TensorFlow's errors that precede the reason.
LEADS_TO_REASON = re.compile(r"\s*$|Graph execution error|Detected at node|<stack traces|\d+ root error|\s+File ")

#: A line of code in the text of a traceback.
PLACE = re.compile(r'File "(.+?)", line (\d+), in ([\w<>]+)')


class ScaleflowError(Exception):
    """Base of every error that scaleflow raises on purpose."""


class ConfigError(ScaleflowError):
    """The command cannot work.

    The user sees the message on standard error: one or two lines with the key, its value and a value that works.
    """

    #: Without this attribute, Keras appends the arguments of the called layer to the text of an exception.
    _keras_call_info_injected = True


class StoreUnreachable(ConfigError):
    """A tracking store does not answer. The same command may work later."""


class RunMissing(ConfigError):
    """A tracking store has no such run: it was deleted, or another store has it."""


class RunDeleted(RunMissing):
    """The run is in the trash of its store."""


class NothingCanRun(ConfigError):
    """All jobs in the first batch of a sweep are rejected."""


class RunError(ScaleflowError):
    """A run started but could not finish. The message is recorded as the reason."""


class NotFinite(RunError):
    """The loss or the weights became NaN or infinite.

    Args:
        step: the optimizer update, counted from 1: its loss is not finite, or the weights after it are not.
        what: whether the loss or the weights are not finite.

    Attributes:
        fact: the message without its advice.
        last_cause: the last update that can be the cause. The state after it is unusable.
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
    """The exported SavedModel gives other outputs than the trained model."""


class CheckpointError(RunError):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


class WorkerDied(RunError):
    """A worker process ended without a report.

    Args:
        how: the signal or the exit status in words.
        last_lines: the last lines of the process's log.
        name: the name of the process.
    """

    def __init__(self, how: str, last_lines: str, name: str = "worker 0") -> None:
        super().__init__(f"{name} {how}" + (f"; the end of its log: {last_lines}" if last_lines else ""))


def read_reason(error: BaseException) -> str:
    """Returns the reason of an error in one line: its innermost cause, and the line of the user's code that raised it.

    The reason is the first line of the message, or the first two lines if the user's code raised the error. Without a
    message, it is the name of the exception's class.
    """
    error = find_cause(error)
    lines = []
    for line in unwrap_reason(read_message(error)).splitlines():
        if not LEADS_TO_REASON.match(line):
            lines.append(line.strip())
    place = find_user_line(error)
    if not place:
        return lines[0].rstrip(":") if lines else type(error).__name__
    reason = re.sub(r"([.:,;]); ", r"\1 ", "; ".join(lines[:2])).rstrip(".:") or type(error).__name__
    return f"{reason} ({place})"


def find_cause(error: BaseException) -> BaseException:
    """Returns the innermost error from the user's code behind a library's error, or else the error itself."""
    cause = error
    current = error
    while not is_raised_in_words(current):
        hidden = current.__cause__ or current.__context__
        if hidden is None:
            break
        current = hidden
        if list_user_frames(current):
            cause = current
    return cause


def is_raised_in_words(error: BaseException) -> bool:
    """Returns whether the user's code or scaleflow raised an error. Its message then says more than its cause does."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    return any(is_user_file(file) or Path(file).is_relative_to(Path(__file__).parent) for file in files)


def list_user_frames(error: BaseException) -> list[tuple[str, Any, str]]:
    """Returns (file, line, function) for each frame in the user's code, with the innermost frame last."""
    codes = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return [(code.co_filename, line, code.co_name) for code, line in codes if is_user_file(code.co_filename)]


def find_user_line(error: BaseException) -> str:
    """Returns the innermost line of the user's code in an error, such as `mine.py, line 35, in call`, or ""."""
    named = [place for place in PLACE.findall(read_message(error)) if is_user_file(place[0])]
    places = named or list_user_frames(error)
    if not places:
        return ""
    file, line, name = places[-1]
    with contextlib.suppress(OSError, ValueError):
        file = str(Path(file).relative_to(Path.cwd()))
    place = f"{file}, line {line}"
    return place if name == "<module>" else f"{place}, in {name}"


def is_user_file(file: str) -> bool:
    """Returns whether a file contains the user's code: not scaleflow's, a library's, Python's or generated code."""
    path = Path(file)
    is_library = {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(Path(__file__).parent)
    is_python = file.startswith("<") or path.is_relative_to(sysconfig.get_path("stdlib"))
    return not (is_library or is_python or path.name.startswith("__autograph_generated_file"))


def read_message(error: BaseException) -> str:
    """Returns an error's message without terminal colours. A `KeyError` with several lines loses its quotes."""
    is_text = isinstance(error, KeyError) and "\n" in str(error.args[:1] and error.args[0])
    return re.sub(r"\x1b\[\d*m", "", str(error.args[0] if is_text else error)).strip()


def unwrap_reason(text: str) -> str:
    """Removes Keras's and TensorFlow's additions from an error's message: calls, arguments, operations."""
    match = AROUND_REASON.search(text)
    if match:
        inner = unwrap_reason(match[2].strip())
        return f"{match[1]}: {inner}" if match[1] and not re.match(r"\w+\.call\(\): ", inner) else inner
    text = re.split(r"(?:Exception|Error) encountered(?: during deserialization)?:\s", text)[-1]
    text = text.partition(" Full object config: ")[0].partition("\nTraceback (most recent call last)")[0].strip()
    if text.startswith("in user code:"):
        text = text.splitlines()[-1]
    text = re.sub(r"assertion failed: \[(.*)\]", lambda match: match[1].replace("] [", " "), text)
    return WITHIN_REASON.sub("", text).strip()


def find_similar(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known word that is most similar to a word, or else the shortest one that starts with it.

    Ignores case. Returns None if no known word is similar.
    """
    words = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), words, n=1, cutoff=cutoff)
    if close:
        return words[close[0]]
    longer = [name for name in words if word and name.startswith(word.casefold())]
    return words[min(longer, key=len)] if longer else None
