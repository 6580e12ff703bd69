"""The kinds of commands that make a plan: which sections they take from an earlier run, and which checks they need."""

from collections.abc import Sequence
from dataclasses import dataclass

#: The sections that are needed to read and evaluate a run's data again.
DATA = ("dataset", "objective", "precision", "seed")


@dataclass(frozen=True)
class Policy:
    """How a kind of command makes a plan from its words."""

    #: Sections to take from the config of an earlier run; the others come from this machine. None: all
    sections: Sequence[str] | None = None
    work: str = ""  # its work in one process without its own run, such as `predictions`; empty: a run
    may_submit: bool = False  # whether `cluster.submit` is allowed
    needs_files: bool = True  # whether missing files are fetched from the store
    looks_outside: bool = True  # whether to check ports, the TPU and the tracking store


#: A command for one new run.
NEW = Policy(may_submit=True)

#: A run of the Python API, of `rerun` or of a stage; a job; a resumed run; a run that a feature has completed.
TRAIN = Policy()

#: A plan that is only inspected.
LOOK = Policy(looks_outside=False)

#: The evaluation of a trained model. Commands of features have policies of their own.
EVALUATE = Policy(DATA, "evaluations")
