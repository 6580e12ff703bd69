"""Runs work in parallel, each piece on a part of this machine: the jobs of a sweep, the stages of a pipeline."""

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from scaleflow.cluster.gpus import CUDA_DEVICES, GROWTH, share, visible_gpus
from scaleflow.launcher.processes.worker_process import THREADS_ENV
from scaleflow.runs.provenance.machine import count_cores

#: Work that has begun. The call returns when the work has ended.
Work = Callable[[], None]

#: A part of this machine, as environment variables for the processes of the work.
Portion = Mapping[str, str]


def divide_machine(count: int) -> list[Portion]:
    """Divides this machine among `count` parallel pieces of work; a single one gets the whole machine."""
    if count == 1:
        return [{}]
    gpus = visible_gpus()
    threads = dict.fromkeys(THREADS_ENV, str(max(1, count_cores() // count)))
    if not gpus:
        return [threads] * count
    # Without memory growth, the first process on a shared GPU would take all of its memory.
    growth = {GROWTH: "true"} if len(gpus) < count else {}
    return [{**threads, **growth, CUDA_DEVICES: ",".join(share(gpus, n, count))} for n in range(count)]


def run_side_by_side(begin_next: Callable[[Portion], Work | None], count: int, end_others: Callable[[], None]) -> None:
    """Runs work, `count` pieces at a time, until none runs and none can begin.

    With `count` 1 it runs in the caller's thread: a debugger needs that.

    Args:
        begin_next: begins a piece of work; None: none can begin now. Called at the start and whenever a piece has
            ended.
        end_others: called after an exception. The exception is raised when the running pieces have ended.
    """
    free = divide_machine(count)
    if count == 1:
        work = begin_next(free[0])
        while work is not None:
            work()
            work = begin_next(free[0])
        return
    running: dict[Future[None], Portion] = {}
    with ThreadPoolExecutor(count, "work") as pool:
        try:
            while True:
                while free:
                    work = begin_next(free[0])
                    if work is None:
                        break
                    running[pool.submit(work)] = free.pop(0)
                if not running:
                    return
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    free.append(running.pop(ended))
                    ended.result()
        except BaseException:
            end_others()
            raise
