"""The kinds of commands that make a plan of words: what each takes from its base, and what is checked."""

from collections.abc import Sequence
from dataclasses import dataclass

#: The sections by which the data of a run are read and measured again.
DATA = ("dataset", "objective", "precision", "seed")


@dataclass(frozen=True)
class Policy:
    """What a kind of command does with its words."""

    #: The sections that it takes from the config of an earlier run; the others are those of this machine. None: all
    sections: Sequence[str] | None = None
    work: str = ""  # what it computes in one process, without a run of its own, such as `predictions`; empty: a run
    may_submit: bool = False  # whether `cluster.submit` is allowed
    needs_files: bool = True  # whether files that are gone are fetched from the store
    looks_outside: bool = True  # whether ports, the TPU and the tracking store are checked, too


#: A command for one new run.
NEW = Policy(may_submit=True)

#: A run of the Python API, of `rerun` or of a stage; a job; one that goes on; one that a feature has completed.
TRAIN = Policy()

#: A plan that is only looked at.
LOOK = Policy(looks_outside=False)

#: What commands about a trained model take from its run.
EVALUATE = Policy(DATA, "evaluations")
COMPARE = Policy((*DATA, "evaluation"), "evaluations")

CHECK = Policy(work="data checks")
PREDICT = Policy(work="predictions")
