"""An unchanged Keras script as a run: `scaleflow train.py`."""

from dataclasses import dataclass, field
from typing import Any

from scaleflow.interfaces.config import Plan, Rule
from scaleflow.interfaces.features import Feature, OwnRuns


@dataclass(frozen=True)
class ScriptOptions:
    """A script, and what the command changes in it.

    Attributes:
        path: the file. None: the command runs no script.
        arguments: the script's own arguments, for its `sys.argv`.
        constants: other values of constants at the top of the script. Here they are text: `plan.config` has the values.
        fit: other arguments of each `fit`, also as text.
        compiled_rate: the learning rate of the compiled optimizer. None: the script's own.
        typed: the config groups that the command sets, such as `precision`.
        in_process: whether the script has trained and recorded the run itself, with `scaleflow.fit` or `Record`.
    """

    path: str | None = None
    arguments: list[str] = field(default_factory=list)
    constants: dict[str, str] = field(default_factory=dict)
    fit: dict[str, str] = field(default_factory=dict)
    compiled_rate: float | None = field(default=None, metadata={"above": 0.0})
    typed: list[str] = field(default_factory=list)
    in_process: bool = False


def runs_script(plan: Plan) -> bool:
    """Returns whether a plan runs a script."""
    return plan.of(ScriptOptions).path is not None


def list_code(config: Any) -> list[str]:
    """Returns the script of a config: it is the user's code, and so are the modules that it imports."""
    options = config.get("script") or {}
    path = options.get("path")
    return [path] if path else []


FEATURE = Feature(
    name="script",
    about="an unchanged Keras script as a run",
    public_names={
        "Record": "scaleflow.features.script.in_process",
        "fit": "scaleflow.features.script.in_process",
    },
    file_words={
        ".py": "scaleflow.features.script.words:translate_script",
        ".ipynb": "scaleflow.features.script.words:translate_script",
    },
    typed_keys={
        "script.constants": "script",
        "script.fit": "fit",
        "script.compiled_rate": "optimizer.learning_rate",
    },
    typed_words="scaleflow.features.script.words:restore_command",
    compiled_models="scaleflow.features.script.compiled_model:plan_compiled",
    section=ScriptOptions,
    conf="scaleflow.features.script.conf",
    defaults=("script_keys",),
    is_used=runs_script,
    task="scaleflow.features.script.task:RunScript",
    check="scaleflow.features.script.check:check_script",
    own_code=list_code,
    other_files=("notebook_cells.py", "script_artifacts"),
    own_runs=OwnRuns(
        param="script.file",
        reason=(
            "it is the run of a script, which reads its data itself; `scaleflow rerun` runs it again, and "
            "mlflow.pyfunc.load_model loads its model"
        ),
        rerun_words="scaleflow.features.script.words:translate_rerun",
        is_resumable=True,
    ),
    events=("scaleflow.features.script.events",),
    launcher="scaleflow.features.script.output:ScriptOutput",
    rules=(
        Rule(
            "script.in_process",
            "a program or notebook trained this run itself, with scaleflow.fit or scaleflow.Record",
            "run that program again",
            keys=("script.in_process",),
        ),
        Rule(
            "script.path!=null & strategy=parameter_server",
            "a script's model.fit cannot train on parameter servers",
            "use strategy=mirrored",
            keys=("strategy",),
        ),
        Rule(
            "script.path!=null & strategy=pipeline",
            "a script's model.fit cannot divide a model into stages",
            "use strategy=mirrored",
            keys=("strategy",),
        ),
        Rule(
            "script.path!=null & strategy=tpu",
            "scripts have not been tried on TPUs",
            "use strategy=mirrored on GPUs or a CPU",
            keys=("strategy",),
        ),
        Rule(
            "script.path!=null & strategy=multi_worker",
            "Keras's model.fit does not work with several workers (keras#20585)",
            "use strategy=mirrored on one machine",
            keys=("strategy",),
        ),
        Rule(
            "script.path!=null & cluster!=local",
            "a script runs on this machine",
            "use cluster=local",
            keys=("cluster",),
        ),
        Rule(
            "script.path!=null & debug.inline",
            "a script needs a process of its own",
            "leave debug.inline out; `python -m pdb` runs a script in a debugger",
            keys=("debug.inline",),
        ),
    ),
)
