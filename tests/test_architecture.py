import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "scaleflow"
CONF = ROOT / "conf"

GROUPS_WITHOUT_TWIN = {"experiment", "debug", "hydra"}
#: Subpackages that are no config group, each with those of them that it may import.
LIVES = {
    "config": set(),
    "worker": {"config"},
    "launcher": {"config", "worker"},
    "sweep": {"config", "worker", "launcher"},
    "doctor": {"config", "worker", "launcher"},
}
WORKERS_ROOMS = ("checkpoint", "strategy", "hardware", "precision", "dataset", "model", "optimizer", "training")
#: The loader travels in each logged model; the probe is a process of the doctor's, which itself imports nothing heavy;
#: the tracer is the worker's part of the profiler.
WORKERS_FILES = {
    "scaleflow.worker.build",
    "scaleflow.worker.evaluate",
    "scaleflow.testing",
    "scaleflow.worker.main",
    "scaleflow.tracking.loader",
    "scaleflow.doctor.tensorflow_probe",
    "scaleflow.profiler.tracer",
}
LAUNCHERS_ROOMS = ("tracking",)
ALLOWED_TO_GROUPS = {"scaleflow.interfaces", "scaleflow.errors"}
ALLOWED_TO_TRACKING = ALLOWED_TO_GROUPS | {"scaleflow.secret_masking"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    name_of(path): path
    for folder in (PACKAGE, ROOT / "hydra_plugins")
    for path in sorted(folder.rglob("*.py"))
    if "conf" not in path.parts[len(ROOT.parts) :]
}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in SOURCES.items()}
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and any(path.rglob("*.yaml")))
ROOMS = sorted({path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"conf"} - set(LIVES))


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def nodes(tree: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    """What runs: without what is for type checkers, and without functions' bodies unless asked for."""
    for child in ast.iter_child_nodes(tree):
        if is_for_types(child):
            continue
        if not inside_functions and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield child
        yield from nodes(child, inside_functions)


def imported(module: str, inside_functions: bool = True) -> set[str]:
    """The dotted names that a module imports; a submodule where that is what `from` takes."""
    found: set[str] = set()
    for node in nodes(TREES[module], inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in SOURCES else str(node.module))
    return found


def top(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


def test_the_modules_are_found() -> None:
    assert {"scaleflow.cli", "scaleflow.worker.main", "scaleflow.model.mlp"} <= set(SOURCES)
    assert "keras" in imported("scaleflow.model.mlp")
    assert "keras" in imported("scaleflow.worker.main")
    assert "keras" not in imported("scaleflow.worker.main", inside_functions=False)
    assert "tensorflow" not in imported("scaleflow.interfaces")


@pytest.mark.parametrize("module", SOURCES)
def test_tensorflow_is_imported_in_the_workers_rooms_alone(module: str) -> None:
    if room_of(module) in WORKERS_ROOMS or module in WORKERS_FILES:
        return
    assert not top(imported(module)) & {"tensorflow", "keras"}


@pytest.mark.parametrize("module", SOURCES)
def test_mlflow_is_imported_in_tracking_alone(module: str) -> None:
    if room_of(module) not in LAUNCHERS_ROOMS:
        assert "mlflow" not in top(imported(module))


def test_the_worker_imports_nothing_heavy_before_it_is_told_what_to_do() -> None:
    assert not top(imported("scaleflow.worker.main", inside_functions=False)) & {"tensorflow", "keras", "numpy"}


def test_the_loader_that_travels_with_a_model_needs_no_scaleflow() -> None:
    assert "scaleflow" not in top(imported("scaleflow.tracking.loader"))


@pytest.mark.parametrize("module", [name for name in SOURCES if room_of(name)])
def test_a_group_knows_the_contracts_the_errors_and_itself(module: str) -> None:
    room = room_of(module)
    allowed = ALLOWED_TO_TRACKING if room == "tracking" else ALLOWED_TO_GROUPS
    own = f"scaleflow.{room}"
    others = {name for name in imported(module) if name == "scaleflow" or name.startswith("scaleflow.")}
    assert {name for name in others - allowed if name != own and not name.startswith(f"{own}.")} == set()


@pytest.mark.parametrize("life", LIVES)
def test_from_words_to_a_run_imports_go_one_way(life: str) -> None:
    own = [name for name in SOURCES if name.startswith(f"scaleflow.{life}.")]
    met = {other.split(".")[1] for name in own for other in imported(name) if other.count(".")}
    assert own
    assert met & set(LIVES) <= LIVES[life] | {life}


@pytest.mark.parametrize("module", ["scaleflow.interfaces", "scaleflow.errors"])
def test_the_contracts_and_the_errors_know_nothing_else(module: str) -> None:
    assert "scaleflow" not in top(imported(module))


@pytest.mark.parametrize("module", [name for name in SOURCES if name != "scaleflow.__main__"])
def test_nothing_imports_the_command(module: str) -> None:
    assert "scaleflow.cli" not in imported(module)


def test_the_main_module_imports_the_command() -> None:
    assert "scaleflow.cli" in imported("scaleflow.__main__")


def test_no_module_is_called_utils() -> None:
    assert not [name for name in SOURCES if {"utils", "util", "helpers", "common", "misc"} & set(name.split("."))]


@pytest.mark.parametrize("group", [group for group in GROUPS if group not in GROUPS_WITHOUT_TWIN])
def test_a_config_group_has_a_subpackage_and_a_tests_folder(group: str) -> None:
    assert (PACKAGE / group / "__init__.py").is_file()
    assert list((ROOT / "tests" / group).glob("test_*.py"))


def test_a_subpackage_is_a_config_group() -> None:
    assert set(ROOMS) == set(GROUPS) - GROUPS_WITHOUT_TWIN


def test_every_group_is_in_a_room_that_the_rules_know() -> None:
    assert set(ROOMS) <= {*WORKERS_ROOMS, *LAUNCHERS_ROOMS, "profiler", "cluster"}


def test_the_packages_listed_are_those_on_disk() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = {name for name, path in SOURCES.items() if path.name == "__init__.py"} | {"scaleflow.conf"}
    assert sorted(listed) == sorted(on_disk)
    assert listed == sorted(listed)


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES.values()}), ids=str)
def test_every_folder_with_modules_is_a_package(folder: Path) -> None:
    assert (folder / "__init__.py").is_file()


def test_the_modules_import_each_other_without_cycles() -> None:
    graph = {name: imported(name, inside_functions=False) & set(SOURCES) - {name} for name in SOURCES}
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                walk(other, (*trail, name))
            done.add(name)

    for name in graph:
        walk(name, ())


@pytest.mark.parametrize(
    "module",
    [
        *(
            "scaleflow",
            "scaleflow.cli",
            "scaleflow.config.plan",
            "scaleflow.launcher.supervisor",
            "scaleflow.worker.main",
        ),
        *("scaleflow.tracking", "scaleflow.doctor.report"),
    ],
)
def test_importing_it_imports_neither_tensorflow_nor_mlflow(module: str) -> None:
    check = f"import sys, {module}; print(*{{'tensorflow', 'keras', 'mlflow', 'numpy', 'rich'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""
