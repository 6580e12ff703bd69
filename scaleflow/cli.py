"""The command: Hydra composes, the plan is checked, a run is launched. `main` gives the exit code."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from scaleflow.errors import Refusal
from scaleflow.interfaces import Plan
from scaleflow.launch import launch
from scaleflow.masking import masked, masked_override
from scaleflow.plan import make_plan
from scaleflow.sections import unknown_key, unknown_option

CONF = "scaleflow.conf"
REFUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the words behind `scaleflow`; `sys.argv` where None.

    Returns:
        0 finished, 1 failed, 2 refused, 130 or 143 interrupted.
    """
    words = split_overrides(list(sys.argv[1:] if argv is None else argv))
    codes: list[int] = []
    began = [time.time()]

    def job(config: DictConfig) -> None:
        codes.append(run(config, began.pop() if began else time.time()))

    app = hydra.main(version_base="1.3", config_path=f"pkg://{CONF}", config_name="config")(job)
    sys.argv = ["scaleflow", *words]
    try:
        refusal = look_at_overrides(words) if {"-m", "--multirun"} & set(words) else None
        if refusal is not None:  # before Hydra makes a folder for the sweep
            return refuse(str(refusal))
        with errors_unabridged():
            app()
    except (HydraException, OmegaConfBaseException, OSError, ValueError, YAMLError) as error:
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
    try:
        plan = plan_of(config)
        folder = writable(folder)
    except (Refusal, OmegaConfBaseException) as error:
        remove_empty(folder)
        return refuse(str(error) if isinstance(error, Refusal) else in_a_line(error))
    overrides = list(HydraConfig.get().overrides.task)
    return launch(plan, OmegaConf.to_container(config, resolve=False), overrides, folder, started)


def mask_sweep() -> None:
    """Masks the secrets in what Hydra wrote about a sweep."""
    path = Path(HydraConfig.get().sweep.dir, "multirun.yaml")
    if HydraConfig.get().mode is RunMode.MULTIRUN and path.is_file():
        kept: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        kept["hydra"]["overrides"] = {k: [masked_override(o) for o in v] for k, v in kept["hydra"]["overrides"].items()}
        kept["hydra"]["job"].pop("override_dirname", None)  # the overrides once more, in a line
        OmegaConf.save(OmegaConf.create(masked(kept)), path)


def plan_of(config: DictConfig) -> Plan:
    """The checked plan of a composed config, with Hydra's record of what was chosen."""
    chosen = HydraConfig.get().runtime
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    choices = {g: str(o) for g, o in chosen.choices.items() if "/" not in g and "@" not in g and o is not None}
    own = [source.path for source in chosen.config_sources if source.schema == "file"]
    assert isinstance(plain, dict)
    return make_plan({str(k): v for k, v in plain.items()}, choices, [str(Path.cwd()), *own])


def writable(folder: Path) -> Path:
    """The run's folder, if files can be made in it."""
    if not os.access(folder, os.W_OK):
        raise Refusal(f"hydra.run.dir={folder}: cannot be written; choose another folder")
    return folder


def remove_empty(folder: Path) -> None:
    """Takes away the folder that Hydra made for a run that is not to be, and its day's if that is empty."""
    with contextlib.suppress(OSError):
        for place in (folder.absolute(), *folder.absolute().parents):
            if place == Path.cwd() or not place.is_relative_to(Path.cwd()):
                break
            place.rmdir()


def refuse(message: str) -> int:
    print(f"scaleflow: {masked(message)}", file=sys.stderr)
    return REFUSED


def split_overrides(words: list[str]) -> list[str]:
    """Replaces `--overrides 'a=1 b=2'` by its words: MLflow hands a parameter on as one."""
    if "--overrides" not in words[:-1]:
        return words
    at = words.index("--overrides")
    return [*words[:at], *shlex.split(words[at + 1]), *words[at + 2 :]]


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


# ---------------------------------------------------------------------------------------------
# Hydra's errors in a line
# ---------------------------------------------------------------------------------------------


def explain(error: Exception, words: Sequence[str]) -> str:
    """What was wrong with the command line, naming the key, the value and what would work."""
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return f"hydra.run.dir={error.filename}: {error.strerror}; choose a folder that can be written"
    with contextlib.suppress(HydraException, OmegaConfBaseException):
        refusal = look_at_overrides(words)
        if refusal is not None:
            return str(refusal)
    if isinstance(error, OverrideParseException):
        typed = masked_override(error.override)
        return f"{typed}: cannot be read as KEY=VALUE; put quotes around a value with special characters"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return str(unknown_option(group, option, error.options))
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}"
    return in_a_line(error)


def in_a_line(error: Exception) -> str:
    """A library's message, the key first where it knows one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = getattr(error, "full_key", None)
    if key and lines:
        return f"{key}: {lines[0]}"
    return "; ".join(lines[:2]) or type(error).__name__


def look_at_overrides(words: Sequence[str]) -> Refusal | None:
    """The first override that names an option or a key that is not there, as a refusal."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.object_type import ObjectType
    from hydra.core.override_parser.overrides_parser import OverridesParser

    is_sweep = bool({"-m", "--multirun"} & set(words))
    search = search_path(words)
    typed = [word for word in words if "=" in word and not word.startswith("-")]
    with initialize_config_module(CONF, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        known: list[str] | None = None
        for override in OverridesParser.create().parse_overrides(typed):
            group = override.key_or_group
            options = loader.get_group_options(group, ObjectType.CONFIG, "config", search)
            if override.is_sweep_override() and not is_sweep:
                return Refusal(
                    f"{override.input_line}: several values need -m, which runs a job for each; a list is written [a,b]"
                )
            for option in chosen(override) if options and not override.is_delete() else ():
                if option not in options:
                    return unknown_option(group, option, options)
            if options or group.startswith("hydra") or override.is_add():
                continue
            known = known or keys_of(compose("config", overrides=[*search, *choices_in(typed, loader, search)]))
            groups = loader.get_group_options("", ObjectType.GROUP, "config", search)
            if group not in known:
                return unknown_key(group, [*known, *groups])
    return None


def chosen(override: Override) -> list[str]:
    """The options that an override of a group names, as they were typed."""
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    value = override.value()
    return [value if isinstance(value, str) else override.get_value_element_as_str()]


def search_path(words: Sequence[str]) -> list[str]:
    """Overrides that put the folders of `--config-dir` on Hydra's search path."""
    after = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--config-dir", "-cd")]
    joined = [word.partition("=")[2] for word in words if word.startswith("--config-dir=")]
    folders = [f"file://{Path(folder).absolute()}" for folder in [*after, *joined]]
    return [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []


def choices_in(typed: Sequence[str], loader: object, search: list[str]) -> list[str]:
    """Of the overrides typed, those that choose an option: they decide which keys there are."""
    from hydra.core.object_type import ObjectType

    groups = loader.get_group_options("", ObjectType.GROUP, "config", search)  # type: ignore[attr-defined]
    return [word for word in typed if word.partition("=")[0] in groups]


def keys_of(config: DictConfig) -> list[str]:
    """Every key of a config, dotted, inner ones too."""

    def walk(node: object, prefix: str) -> Iterator[str]:
        for key, child in node.items() if isinstance(node, dict) else ():
            yield f"{prefix}{key}"
            yield from walk(child, f"{prefix}{key}.")

    return list(walk(OmegaConf.to_container(config, resolve=False), ""))
