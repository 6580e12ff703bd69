"""The command: Hydra composes, the plan is checked, a run is launched. `main` gives the exit code."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scaleflow.errors import Refusal
from scaleflow.explain import CONF, check_config_dirs, check_overrides, explain, in_a_line
from scaleflow.interfaces import Plan
from scaleflow.launch import launch
from scaleflow.masking import masked, masked_override
from scaleflow.plan import make_plan
from scaleflow.resume import resumed
from scaleflow.sync import repair
from scaleflow.terminal import complain
from scaleflow.tracking import located

#: Of Hydra's flags those that take the next word.
FLAGS_WITH_VALUE = (
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--cfg", "-c", "--package", "-p"),
    *("--info", "-i", "--experimental-rerun"),
)

REFUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the words behind `scaleflow`; `sys.argv` where None.

    Returns:
        0 finished, 1 failed, 2 refused, 130 or 143 interrupted.
    """
    words = options_as_text(flags_first(split_overrides(list(sys.argv[1:] if argv is None else argv))))
    codes: list[int] = []
    began = [time.time()]

    def job(config: DictConfig) -> None:
        codes.append(run(config, began.pop() if began else time.time()))

    app = hydra.main(version_base="1.3", config_path=f"pkg://{CONF}", config_name="config")(job)
    sys.argv = ["scaleflow", *words]
    try:
        check_config_dirs(words)
        if {"-m", "--multirun"} & set(words):
            check_overrides(words)  # before Hydra makes a folder for the sweep
        with errors_unabridged():
            app()
    except Refusal as refusal:
        return refuse(str(refusal))
    except Exception as error:  # of a word that it did not expect Hydra raises whatever comes
        is_hydras = isinstance(error, HydraException | OmegaConfBaseException) or began
        if "HYDRA_FULL_ERROR" in os.environ or not is_hydras:
            raise  # asked for, or none of Hydra's
        return refuse(explain(error, words))
    return codes[0] if len(codes) == 1 else int(any(codes))


def entry() -> None:
    """The console script, and `python -m scaleflow`: a process of its own."""
    leave(main())


def leave(code: int) -> NoReturn:
    """Ends the process without taking apart, module by module, what MLflow imported: half a second or more."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it is gone
            stream.flush()
    os._exit(code)


def run(config: DictConfig, started: float) -> int:
    """Checks a composed config and launches it."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    mask_sweep()
    overrides = typed()
    with contextlib.ExitStack() as until_it_ended:
        try:
            if config.get("resume") is not None:
                return go_on(config, overrides, folder, started)
            plan = plan_of(config)
            folder = writable(folder)
            plan = until_it_ended.enter_context(located(plan))
        except (Refusal, OmegaConfBaseException) as error:
            remove_empty(folder)
            return refuse(str(error) if isinstance(error, Refusal) else in_a_line(error))
        return launch(plan, OmegaConf.to_container(config, resolve=False), overrides, folder, started)


def typed() -> list[str]:
    """The overrides as they were typed, interpolations and all."""
    words = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(words, list)
    return [str(word) for word in words]


def go_on(config: DictConfig, overrides: Sequence[str], made: Path, started: float) -> int:
    """Goes on with an earlier run, in its folder; the one that Hydra made for this command is not needed."""
    composed, choices, search = resolved(config)
    run = resumed(str(composed["resume"]), composed, choices, overrides)
    plan = make_plan(run.config, run.choices, [*search, *(folder for folder in run.search if folder not in search)])
    remove_empty(made)
    if run.is_through:
        standing = repair(run.folder)  # what the command that finished it could not record
        if standing.outcome == "not recorded":
            complain(f"the store has not taken everything: {standing.reason}; python -m scaleflow.sync {run.folder}")
        print(f"{run.folder}: the run is finished; training.epochs=N with more epochs would go on with it")
        return 0
    if any((run.folder / "checkpoints").glob("step-*")):  # the weights are there
        plan = replace(plan, model=replace(plan.model, init_from=None))
    with located(plan) as plan:
        return launch(plan, run.config, run.changes, writable(run.folder), started, life=run.number)


def mask_sweep() -> None:
    """Masks the secrets in what Hydra wrote about a sweep."""
    path = Path(HydraConfig.get().sweep.dir, "multirun.yaml")
    if HydraConfig.get().mode is RunMode.MULTIRUN and path.is_file():
        kept: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        kept["hydra"]["overrides"] = {k: [masked_override(o) for o in v] for k, v in kept["hydra"]["overrides"].items()}
        kept["hydra"]["job"].pop("override_dirname", None)  # the overrides once more, in a line
        OmegaConf.save(OmegaConf.create(masked(kept)), path)


def plan_of(config: DictConfig) -> Plan:
    """The checked plan of a composed config."""
    return make_plan(*resolved(config))


def resolved(config: DictConfig) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """The config as plain containers, the option chosen in each group, and where a user's modules are."""
    chosen = HydraConfig.get().runtime
    if missing := sorted(OmegaConf.missing_keys(config)):
        has = "has" if len(missing) == 1 else "have"
        raise Refusal(f"{', '.join(missing)}: {has} no default; write {' '.join(f'{key}=...' for key in missing)}")
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    choices = {g: str(o) for g, o in chosen.choices.items() if "/" not in g and "@" not in g and o is not None}
    own = [source.path for source in chosen.config_sources if source.schema == "file"]
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items()}, choices, [str(Path.cwd()), *own]


def writable(folder: Path) -> Path:
    """The run's folder, if files can be made in it."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise Refusal(f"hydra.run.dir={folder}: cannot be written ({error.strerror}); choose another folder") from error
    return folder


def remove_empty(folder: Path) -> None:
    """Takes away the folder that Hydra made for a run that is not to be, and its day's if that is empty."""
    with contextlib.suppress(OSError):
        for place in (folder.absolute(), *folder.absolute().parents):
            if place == Path.cwd() or not place.is_relative_to(Path.cwd()):
                break
            place.rmdir()


def refuse(message: str) -> int:
    print(f"scaleflow: {printable(str(masked(message)))}", file=sys.stderr)
    return REFUSED


def printable(message: str) -> str:
    """At most two lines, with what can't be printed of the words that were typed in escapes."""
    lines = message.split("\n")
    shown = ["".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line) for line in lines]
    return ("\n" if len(shown) <= 2 else "\\n").join(shown)


def split_overrides(words: list[str]) -> list[str]:
    """Replaces `--overrides 'a=1 b=2'` by its words: MLflow hands a parameter on as one."""
    if "--overrides" not in words[:-1]:
        return words
    at = words.index("--overrides")
    return [*words[:at], *shlex.split(words[at + 1]), *words[at + 2 :]]


def flags_first(words: Sequence[str]) -> list[str]:
    """Moves flags, with their values, before the overrides: Hydra's parser takes no flag between two of them."""
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        (flags if word.startswith("-") else overrides).append(word)
        if word in FLAGS_WITH_VALUE:
            flags += islice(rest, 1)
    return flags + overrides


def options_as_text(words: Sequence[str]) -> list[str]:
    """Quotes the option of `debug=nan`, which Hydra would take for a number."""
    return [re.sub(r"(?<=[=,])nan(?=,|$)", "'nan'", word) if word.startswith("debug=") else word for word in words]


@contextlib.contextmanager
def errors_unabridged() -> Iterator[None]:
    """Has Hydra raise its errors instead of printing them and exiting with 1."""
    if "HYDRA_FULL_ERROR" in os.environ:
        yield
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        os.environ.pop("HYDRA_FULL_ERROR", None)
