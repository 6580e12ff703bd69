"""What is done to which run, and when: drawn from a seed, each case by itself."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EPOCHS, STEPS_PER_EPOCH, STEPS_PER_CALL = 4, 10, 2
STEPS = EPOCHS * STEPS_PER_EPOCH

#: A run of two seconds or so: 20 calls, and a checkpoint at every other one.
WORDS = (
    "hydra.run.dir=run",
    "hardware=cpu",
    "hardware.deterministic=true",
    "hardware.intra_op_threads=1",
    "dataset.limit=400",
    "training.global_batch_size=32",
    "model.units=16",
    f"training.epochs={EPOCHS}",
    f"training.steps_per_epoch={STEPS_PER_EPOCH}",
    f"training.steps_per_loop={STEPS_PER_CALL}",
    "training.callbacks=[{_target_: tests.pace.Pace, seconds: 0.05}]",
    "checkpoint.every_steps=4",
)

STRATEGIES: Mapping[str, Sequence[str]] = {
    "one_device": (),
    "mirrored": ("hardware.logical_devices=2",),
    "multi_worker": ("cluster.workers=2",),
    "parameter_server": ("cluster.workers=2",),
    "pipeline": ("hardware.logical_devices=2",),
}

#: The processes of a run. The chief is `parameter_server`'s coordinator; the forker is what workers are forked from.
ROLES: Mapping[str, Sequence[str]] = {
    "one_device": ("launcher", "chief", "forker"),
    "mirrored": ("launcher", "chief", "forker"),
    "multi_worker": ("launcher", "chief", "worker", "forker"),
    "parameter_server": ("launcher", "chief", "worker", "server", "forker"),
    "pipeline": ("launcher", "chief", "forker"),
}

KILL, TERM, PAUSE, STALL = "kill -9", "SIGTERM", "SIGSTOP, later SIGCONT", "SIGSTOP for good"
DISK, DAMAGE, LOCK, GONE = "disk full", "damaged checkpoint", "store locked", "server gone"

#: Each kind of fault, how often it is drawn, and whom it can befall.
KINDS: Mapping[str, tuple[int, Sequence[str]]] = {
    KILL: (45, ("launcher", "launcher", "chief", "chief", "worker", "worker", "server", "forker")),
    TERM: (15, ("launcher", "chief", "worker", "server")),
    PAUSE: (10, ("launcher", "chief", "worker", "server", "forker")),
    STALL: (8, ("chief", "worker", "server")),
    DISK: (10, ("launcher", "chief", "chief")),
    DAMAGE: (12, ("launcher",)),
    LOCK: (5, ("store",)),
    GONE: (5, ("store",)),
}

#: In which part of a run's life it comes: while it is built, while it trains, or from its last step on.
STAGES = {"start": 3, "steps": 12, "end": 5}

#: In seconds, at most: how long after the beginning of its stage it comes, if no step says when.
WITHIN = {"start": 2.0, "steps": 0.06, "end": 1.0}

#: How a checkpoint is damaged.
DAMAGES = ("bit of data", "bit of index", "bit of manifest", "short data", "short manifest", "no manifest", "no data")


@dataclass(frozen=True)
class Case:
    """One run, what befalls it, and when.

    Attributes:
        number: its place in the campaign; with the seed it says all the rest.
        strategy: the run's.
        kind: of the fault.
        role: whom it befalls.
        stage: the part of the run in which it comes.
        step: after which step, if the stage is `steps`.
        seconds: how long after that.
        lasts: in seconds: how long what passes takes to pass; 0: it is there until the command has ended.
        how: in which way, where there are several.
        place: from 0 to 1: where in a file, or how little room a disk has.
        restarts: `cluster.max_restarts`; None where the command does not say.
        again: a second fault: kill -9 of this role in the command that goes on.
    """

    number: int
    strategy: str
    kind: str
    role: str
    stage: str = "steps"
    step: int = STEPS // 2
    seconds: float = 0.0
    lasts: float = 0.0
    how: str = ""
    place: float = 0.5
    restarts: int | None = None
    again: str = ""

    @property
    def words(self) -> list[str]:
        """The run's command line, but for where it is recorded."""
        words = [f"strategy={self.strategy}", *STRATEGIES[self.strategy], *WORDS]
        if self.restarts is not None:
            words.append(f"cluster.max_restarts={self.restarts}")
        if self.kind == STALL:
            words.append("cluster.stall_seconds=30")
        if self.kind in (LOCK, GONE, DISK):
            words.append("tracking.flush_seconds=4")
        return words

    def __str__(self) -> str:
        when = {"start": "at the start", "steps": f"after step {self.step}", "end": "after the last step"}[self.stage]
        extra = "".join(f", {word}" for word in (self.how, self.again and f"then kill -9 of {self.again}") if word)
        lasts = f", for {self.lasts:.1f} s" if self.lasts else ""
        restarts = "" if self.restarts is None else f", {self.restarts} restarts"
        return (
            f"{self.number}: {self.strategy}: {self.kind} of {self.role} {when} + {self.seconds:.2f} s"
            f"{lasts}{restarts}{extra}"
        )


def drawn(seed: int, number: int) -> Case:
    """The case of this number; the strategies take turns."""
    draw = random.Random(f"{seed}/{number}")
    strategy = list(STRATEGIES)[number % len(STRATEGIES)]
    kind = draw.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
    role = draw.choice([r for r in KINDS[kind][1] if r in (*ROLES[strategy], "store")])
    stages = {s: w for s, w in STAGES.items() if s != "start" or kind in (KILL, TERM, PAUSE)}
    stage = draw.choices(list(stages), list(stages.values()))[0]
    restarts = {KILL: draw.choice([None, None, 2]), STALL: 2}.get(kind)
    step = draw.randrange(0, STEPS, STEPS_PER_CALL)
    passes = kind == PAUSE or (kind in (LOCK, GONE) and draw.random() < 0.5)
    return Case(
        number=number,
        strategy=strategy,
        kind=kind,
        role=role,
        stage="steps" if kind == DAMAGE else stage,
        step=max(step, STEPS // 4) if kind == DAMAGE else step,
        seconds=draw.uniform(0, WITHIN["steps" if kind == DAMAGE else stage]),
        lasts=draw.uniform(0.5, 3.0) if passes else 0.0,
        how={
            DAMAGE: draw.choice(DAMAGES),
            GONE: draw.choice(["refuses", "does not answer"]),
        }.get(kind, ""),
        place=draw.random(),
        restarts=restarts,
        again=draw.choice(["launcher", "chief"]) if draw.random() < 0.2 else "",
    )
