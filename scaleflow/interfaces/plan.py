"""A checked command: the `Plan`, and the rules that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scaleflow.interfaces.config import (
    Cluster,
    Dataset,
    Hardware,
    Model,
    ObjectiveOptions,
    Optimizer,
    Precision,
    Strategy,
    Training,
)
from scaleflow.interfaces.recording_config import (
    Checkpoint,
    Debug,
    EvaluationOptions,
    ExportOptions,
    Profiler,
    PromotionOptions,
    Sweep,
    Tracking,
)


@dataclass(frozen=True)
class TaskInfo:
    """Which of several processes this one is, as TF_CONFIG says it.

    Attributes:
        worker: this process's index in `peers`; 0 is the chief, whose events are the run's.
        peers: HOST:PORT of every process that trains or serves, this one included: the chief, then the workers, then
            the parameter servers.
        servers: the number of parameter servers. Default 0.
        evaluator: whether TF_CONFIG names an evaluator: `here` if this process is it (then `worker` has no meaning),
            `elsewhere` if another one is. Default None: there is none.
    """

    worker: int
    peers: tuple[str, ...]
    servers: int = 0
    evaluator: Literal["here", "elsewhere"] | None = None


@dataclass(frozen=True)
class Plan:
    """A command, composed, resolved and typed, and checked as far as that is possible without TensorFlow.

    Attributes:
        strategy, hardware, precision, dataset, model, optimizer, objective, training, evaluation, export, promotion,
            checkpoint, profiler, tracking, cluster, sweep, debug: the sections of the config.
        seed: the seed of the weights, of the order of examples and of synthetic data. 0 to 2**31 - 1. In the config the
            default is 0.
        choices: the chosen option of each config group.
        config: the composed config with interpolations resolved, as plain containers.
        search: folders in which Python looks for the modules that `_target_` names, first match first. Default: none
            besides Python's own.
        resume: the folder or id of the run to resume. Default None: a new run.
        resume_data: `same` refuses to resume a run whose data has changed; `changed` continues. Default `same`.
        resume_code: the same for the user's code that the config names. Default `same`.
        evaluator: whether TF_CONFIG names an evaluator: `here` if this process is it, `elsewhere` if another one is.
            Default None: there is none.
        task: the task of this process, if each machine runs its own launcher. Default None: this command starts all
            processes.
        tf_config: the text of TF_CONFIG, if `task` or `evaluator` comes from it. Default None.
        chief: evaluator: HOST:PORT where the chief answers. Default None: nothing to watch; with a single training
            process nothing listens there.
        trusted_modules: modules whose code `_target_` may run in addition to a list of scaleflow's and Keras's own.
            Default None: any code.
    """

    strategy: Strategy
    hardware: Hardware
    precision: Precision
    dataset: Dataset
    model: Model
    optimizer: Optimizer
    objective: ObjectiveOptions
    training: Training
    evaluation: EvaluationOptions
    export: ExportOptions
    promotion: PromotionOptions
    checkpoint: Checkpoint
    profiler: Profiler
    tracking: Tracking
    cluster: Cluster
    sweep: Sweep
    debug: Debug
    seed: int
    choices: Mapping[str, str]
    config: Mapping[str, Any]
    search: Sequence[str] = ()
    resume: str | None = None
    resume_data: Literal["same", "changed"] = "same"
    resume_code: Literal["same", "changed"] = "same"
    evaluator: Literal["here", "elsewhere"] | None = None
    task: TaskInfo | None = None
    tf_config: str | None = None
    chief: str | None = None
    trusted_modules: Sequence[str] | None = None


@dataclass(frozen=True)
class Rule:
    """A combination of options that does not work, or that a user should know about."""

    #: The keys that the message shows, the one that is best changed first. A group stands for its option.
    keys: tuple[str, ...]
    applies: Callable[[Plan], bool]  # whether a plan has the combination. The name `auto` means: not known yet.
    reason: str  # why it does not work
    instead: str  # what would work
    verdict: Literal["refused", "warning"] = "refused"  # `refused`, or `warning`: the run starts and shows it as a note
