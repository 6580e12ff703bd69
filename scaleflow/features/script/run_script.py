"""Runs a script in a worker, as `python train.py` would, and records it."""

from __future__ import annotations

import builtins
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType

from scaleflow.errors import ConfigError, RunError
from scaleflow.features.script.check import change_constants, read_constants, read_fit_arguments
from scaleflow.features.script.descriptor_output import DescriptorOutput
from scaleflow.features.script.events import ScriptPrinted
from scaleflow.features.script.exit_functions import ExitFunctions
from scaleflow.features.script.feature import ScriptOptions
from scaleflow.features.script.fit_data import FitData
from scaleflow.features.script.fit_progress import StateSaver
from scaleflow.features.script.interruptions import PACKAGE, ScriptRefused, ScriptStopped, StopRequests
from scaleflow.features.script.keras_calls import KerasCalls
from scaleflow.features.script.mlflow_calls import MlflowCalls
from scaleflow.features.script.printing import LineStream, PrintedLines
from scaleflow.features.script.recorder import ScriptRecorder
from scaleflow.features.script.runtime import enter_runtime, set_up_runtime
from scaleflow.features.script.saved_model import save_model
from scaleflow.features.script.source import Program, parse_script
from scaleflow.interfaces.events import Note, PhaseBegan, RunEnded, RunRefused
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.runs import WorkerProcess
from scaleflow.runs.code_digest import is_installed
from scaleflow.runs.data_digest import read_split_digests
from scaleflow.runs.provenance.record import write_data_state
from scaleflow.worker.failures import guard

#: The file in the run's folder with the code of a notebook.
CELLS_FILE = "notebook_cells.py"


class ScriptFailed(RunError):
    """The script raised an exception. Its traceback is printed already."""


def run_script(process: WorkerProcess) -> None:
    """Runs the script of a plan, and reports how it ended.

    Raises ConfigError if it cannot run like this, and ScriptFailed if it fails after its run began.
    """
    process.lock_folder()
    plan = process.spec.plan
    options = plan.of(ScriptOptions)
    lines = PrintedLines(process.emit)
    process.emit = lines.emit
    try:
        assert options.path is not None
        program = parse_script(Path(options.path))
        program.write_cells(process.spec.folder / CELLS_FILE)
        change_constants(program, read_constants(plan))
        runtime = set_up_runtime(plan, program, process.emit)
        recorder = ScriptRecorder(process, process.emit, program, runtime.to_values())
        stop = StopRequests(process.should_stop)
        saver = make_saver(process)
        if process.spec.is_resumed:
            recorder.continue_run(saver.find_last_step(), is_silent=saver.last_fit > 0)
        calls = KerasCalls(recorder, stop, read_fit_arguments(plan), options.compiled_rate, saver)
        mlflow = MlflowCalls(recorder)
        for magic in program.magics:
            process.emit(Note(f"{program.path.name}: the line {magic} is left out, because it is for IPython"))
        with calls.record(), mlflow.record(), enter_runtime(runtime, plan, program, process.emit):
            ended = execute(program, options.arguments, recorder, lines, stop, calls)
        if ended:
            finish(recorder, calls, process)
            saver.remove()
    finally:
        lines.close()


def make_saver(process: WorkerProcess) -> StateSaver:
    """Returns what saves the states of the fits, and has the states of earlier commands."""
    checkpoint = process.spec.plan.checkpoint
    folder = None if checkpoint.name == "none" else Path(process.spec.checkpoints)
    return StateSaver(folder, checkpoint.every_seconds, process.spec.is_resumed)


def execute(
    program: Program,
    arguments: Sequence[str],
    recorder: ScriptRecorder,
    lines: PrintedLines,
    stop: StopRequests,
    calls: KerasCalls,
) -> bool:
    """Executes a script as `__main__`. Returns whether it reached its end; if not, the end is reported.

    Raises ConfigError if the script needs what the command does not allow, and ScriptFailed if it raises an exception.
    """
    process = recorder.process
    module = ModuleType("__main__")
    module.__file__ = str(program.path.absolute())
    module.__dict__["__builtins__"] = builtins
    code = program.compile()
    process.emit(PhaseBegan(f"running {program.path.name}"))
    os.register_at_fork(after_in_child=reset_signals)
    with as_main(module, program, arguments), print_to(lines):
        try:
            run_to_end(code, module, stop, calls, recorder)
        except ScriptStopped:
            end_stopped(recorder)
            return False
        except SystemExit as leaving:
            if leaving.code in (None, 0):
                return not ends_after_stop(stop, recorder)
            if not isinstance(leaving.code, int):
                print(leaving.code, file=sys.stderr)  # as Python does
            end_failed(process, f"the script ended with sys.exit({leaving.code!r})", "")
            return False
        except ScriptRefused as refusal:
            raise ConfigError(str(refusal)) from None
        except BaseException as error:
            text = format_traceback(error)
            reason = traceback.format_exception_only(error)[-1].strip()
            end_failed(process, reason, text)
            return False
    return not ends_after_stop(stop, recorder)


def run_to_end(
    code: CodeType, module: ModuleType, stop: StopRequests, calls: KerasCalls, recorder: ScriptRecorder
) -> None:
    """Executes the code of a script, then waits for its threads and runs what it has registered with `atexit`.

    Raises what the script raises.
    """
    exit_functions = ExitFunctions(is_own_file)
    with exit_functions.collect():
        try:
            with stop.catch_interrupts():
                exec(code, module.__dict__)
                join_threads()
        finally:
            exit_functions.run()
            if not stop.was_raised:  # a script that is resumed may evaluate its model later
                calls.evaluations.finish()
            report_data(calls.data, recorder)


def report_data(data: FitData, recorder: ScriptRecorder) -> None:
    """Records the digests of the data, if there is a run."""
    described = data.describe()
    if described is None or not recorder.is_ready:
        return
    files = recorder.process.spec.files
    is_resumed = recorder.process.spec.plan.resume is not None
    with guard("the digests of the data", recorder.emit):
        if read_split_digests(files) != described.splits:  # an earlier command may have recorded them
            write_data_state(files, files.count_resumes() if is_resumed else 0, {"splits": described.splits})
            recorder.emit(described)


def ends_after_stop(stop: StopRequests, recorder: ScriptRecorder) -> bool:
    """Ends the run as stopped if the script caught the request to stop. Returns whether it did."""
    if stop.was_raised:
        end_stopped(recorder)
    return stop.was_raised


def join_threads() -> None:
    """Waits for the threads that the script has started and not awaited, as Python does at its end."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def reset_signals() -> None:
    """Gives a process that the script forks Python's own handlers: the worker's would keep it from ending."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def as_main(module: ModuleType, program: Program, arguments: Sequence[str]) -> Iterator[None]:
    """Makes a module the `__main__` of this process, with the `sys.argv` and `sys.path` of its script."""
    before = sys.modules["__main__"]
    words = sys.argv
    sys.modules["__main__"] = module
    sys.argv = [str(program.path), *arguments]
    sys.path.insert(0, str(program.path.absolute().parent))
    try:
        yield
    finally:
        sys.modules["__main__"] = before
        sys.argv = words


@contextlib.contextmanager
def print_to(lines: PrintedLines) -> Iterator[None]:
    """Passes what is printed inside the `with` block to the launcher."""
    output = DescriptorOutput(lines)
    errors = LineStream(sys.stderr, lines, before_line=output.read)
    streams = (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = output.stream, errors
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        output.close()
        errors.end_line()
        lines.flush()


def format_traceback(error: BaseException) -> str:
    """Returns the traceback of a script's exception, with the user's own frames only."""
    formatted = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = formatted
    seen: list[traceback.TracebackException] = []
    while part is not None and part not in seen:
        seen.append(part)
        part.stack = traceback.StackSummary.from_list([frame for frame in part.stack if is_own_file(frame.filename)])
        part = part.__cause__ or part.__context__
    return "".join(formatted.format()).rstrip()


def is_own_file(name: str) -> bool:
    """Returns whether a file of a traceback is the user's: not of scaleflow, an installed package or Python."""
    path = Path(name)
    return path.is_file() and not path.is_relative_to(PACKAGE) and not is_installed(path)


def end_failed(process: WorkerProcess, reason: str, text: str) -> None:
    """Reports that a script failed: as the failure of its run, or without a run before the first fit."""
    message = mask_secrets(text or reason)
    if not process.is_ready:
        process.emit(RunRefused(str(message), died=True))
        return
    if text:
        process.emit(ScriptPrinted(str(message)))
    raise ScriptFailed(str(mask_secrets(reason)))


def end_stopped(recorder: ScriptRecorder) -> None:
    if recorder.is_ready:
        recorder.process.emit(RunEnded("KILLED", f"stopped at step {recorder.step}"))
    else:
        recorder.process.emit(RunRefused("stopped before the script trained a model"))


def finish(recorder: ScriptRecorder, calls: KerasCalls, process: WorkerProcess) -> None:
    """Ends the run of a script that reached its end: saves its last fitted model."""
    if recorder.is_silent:
        raise ScriptFailed(
            "the script ended before the call of model.fit at which it was stopped; it does not do what it did before"
        )
    if not recorder.is_ready:
        recorder.begin_run()
    if calls.model is None:
        process.emit(
            Note(
                "the script never called model.fit: of its own loop only what it logged with MLflow is recorded; "
                "strategies need model.fit"
            )
        )
    else:
        process.emit(PhaseBegan("saving the model"))
        save_model(calls.model, calls.inputs, recorder, process)
    process.emit(RunEnded("FINISHED"))
