"""The structure of the package: who may import what, lazy imports inside functions included."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from scaleflow.interfaces.features import Feature, list_features

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "scaleflow"
CONF = ROOT / "conf"

#: The modules at the top level: what users type or import.
TOP_LEVEL = (
    *("__main__", "cli", "api", "errors", "testing"),
    *("best", "evaluate", "project", "sync"),
)

GROUPS_WITHOUT_TWIN = {"experiment", "debug", "hydra"}

#: The package of the optional parts.
FEATURES = "scaleflow.features"

#: What every module may import.
CONTRACTS = ("scaleflow.errors", "interfaces", "compat")

#: The layers above the config groups, from the lowest to the highest. Each may import those below it, and the groups.
LAYERS = ("config", "runs", "worker", "launcher", "sweep", "commands")

#: What the groups may import besides the contracts.
GROUP_EXTRAS = {
    "dataset": {"files", "serving"},
    "checkpoint": {"files"},
    "evaluation": {"pages", "serving"},
    "model": {"serving"},
    "profiler": {"pages"},
    "tracking": {"pages", "serving"},
}

#: Groups whose code runs in the worker, with TensorFlow.
WORKER_GROUPS = (
    "checkpoint",
    "strategy",
    "hardware",
    "precision",
    "dataset",
    "model",
    "objective",
    "optimizer",
    "training",
)

#: Other modules that import TensorFlow or Keras. The loader travels in each logged model; the probe is a process of the
#: doctor's; the tracer is the worker's part of the profiler. Formats are exported in the worker, and opened in another
#: process.
WORKER_MODULES = {
    "scaleflow.compat.keras",
    "scaleflow.compat.tensorflow",
    *(f"scaleflow.features.augment.{name}" for name in ("changes", "draws", "feed", "image_changes")),
    "scaleflow.features.balance.order",
    "scaleflow.features.doctor.tensorflow_probe",
    "scaleflow.features.formats.converter",
    "scaleflow.features.formats.runtimes.keras_file",
    "scaleflow.features.formats.runtimes.litert",
    "scaleflow.features.predict.compute",
    *(
        f"scaleflow.features.script.{name}"
        for name in (
            *("keras_calls", "recorder", "saved_model", "runtime", "in_process"),
            *("compiled_model", "compiled.train_compiled"),
        )
    ),
    *(f"scaleflow.features.script.{name}" for name in ("fit_data", "fit_progress", "fit_state", "random_state")),
    "scaleflow.profiler.tracer",
    "scaleflow.testing",
    "scaleflow.serving.layers",
    "scaleflow.serving.loader",
    "scaleflow.serving.plain_model",
    "scaleflow.features.warm.server",
    *(f"scaleflow.worker.{name}" for name in ("build", "data", "engine", "evaluate", "export", "failures")),
    *(f"scaleflow.worker.{name}" for name in ("keras_import", "kept_predictions", "runtime")),
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    name_of(path): path
    for folder in (PACKAGE, ROOT / "hydra_plugins")
    for path in sorted(folder.rglob("*.py"))
    if "conf" not in path.parts[len(ROOT.parts) :]
}
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and any(path.rglob("*.yaml")))
GROUP_PACKAGES = sorted(set(GROUPS) - GROUPS_WITHOUT_TWIN - {"sweep"})


@functools.cache
def parse(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(), str(SOURCES[module]))


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


@functools.cache
def imported(module: str, inside_functions: bool = True, with_types: bool = False) -> set[str]:
    """The dotted names that a module imports; a submodule where that is what `from` takes."""
    found: set[str] = set()
    for node in ast.walk(parse(module)) if with_types else nodes(parse(module), inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in SOURCES else str(node.module))
    return found


def top(names: set[str]) -> set[str]:
    """The packages of names, and those whose private names `compat` has for them."""
    return {name.removeprefix("scaleflow.compat.").partition(".")[0] for name in names}


def package_of(module: str) -> str:
    """`launcher` of `scaleflow.launcher.prepare`, `features.warm` of `scaleflow.features.warm.server`, and
    `scaleflow.api` of itself.
    """
    parts = module.split(".")
    if parts[1:2] == ["features"]:
        return ".".join(parts[1:3])
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and SOURCES[module].name == "__init__.py") else module


def find_cycle(graph: Mapping[str, Collection[str]]) -> list[str]:
    """The first cycle of a graph; empty if there is none."""
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name not in done:
            for other in sorted(graph.get(name, ())):
                if cycle := walk(other, (*trail, name)):
                    return cycle
            done.add(name)
        return []

    return next(filter(None, (walk(name, ()) for name in graph)), [])


def test_the_modules_are_found() -> None:
    assert {"scaleflow.cli", "scaleflow.worker.main", "scaleflow.model.mlp"} <= set(SOURCES)
    assert "keras" in imported("scaleflow.model.mlp")
    assert "keras" in imported("scaleflow.worker.keras_import")
    assert "keras" not in imported("scaleflow.worker.keras_import", inside_functions=False)
    assert "tensorflow" not in imported("scaleflow.interfaces.training")
    assert find_cycle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]


def test_no_cycle_between_modules() -> None:
    """Imports for types only included, except those of a package's own modules in its `__init__`."""
    graph = {name: imported(name, with_types=True) & set(SOURCES) - {name} for name in SOURCES}
    assert find_cycle(graph) == []


def test_no_cycle_between_packages() -> None:
    graph: dict[str, set[str]] = {}
    for name in SOURCES:
        others = {package_of(other) for other in imported(name) & set(SOURCES)}
        graph.setdefault(package_of(name), set()).update(others - {package_of(name)})
    assert find_cycle(graph) == []


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downward(layer: str) -> None:
    allowed = {*CONTRACTS, *GROUP_PACKAGES, *LAYERS[: LAYERS.index(layer) + 1]}
    modules = [name for name in SOURCES if package_of(name) == layer]
    others = {package_of(other) for name in modules for other in imported(name) & set(SOURCES)}
    assert modules
    assert {other for other in others - allowed if other in LAYERS or other.startswith("features")} == set()
    entry_points = ("api", "cli", "evaluate", "sync", "project", "testing")
    assert others & {f"scaleflow.{name}" for name in entry_points} == set()


def test_no_layer_names_a_module_of_a_higher_one() -> None:
    """A name that is resolved when it is used would hide a cycle from the tests of imports."""
    for name in set(SOURCES) - {"scaleflow.commands.table"}:
        if package_of(name) in LAYERS:
            higher = LAYERS[LAYERS.index(package_of(name)) + 1 :]
            constants = (node.value for node in ast.walk(parse(name)) if isinstance(node, ast.Constant))
            named = {each.partition(":")[0] for each in constants if isinstance(each, str)} & set(SOURCES)
            modules = {each for each in named if each.count(".") > 1}  # `scaleflow.pipeline` is a tag, too
            assert {each for each in modules if package_of(each) in higher} == set(), name


@pytest.mark.parametrize("group", GROUP_PACKAGES)
def test_a_group_imports_the_contracts_and_itself(group: str) -> None:
    allowed = {*CONTRACTS, group, *GROUP_EXTRAS.get(group, ())}
    modules = [name for name in SOURCES if package_of(name) == group]
    assert modules
    assert {package_of(other) for name in modules for other in imported(name) & set(SOURCES)} - allowed == set()


def test_the_core_names_no_feature() -> None:
    """Not even in a text that names a module; `interfaces/features.py` looks into the folder."""
    for name in SOURCES:
        if name.startswith(FEATURES) or name == "scaleflow.interfaces.features":
            continue
        assert not [other for other in imported(name) if f"{other}.".startswith(f"{FEATURES}.")], name
        texts = [node.value for node in ast.walk(parse(name)) if isinstance(node, ast.Constant)]
        assert not [text for text in texts if isinstance(text, str) and f"{FEATURES}." in text], name


@pytest.mark.parametrize("feature", list_features())
def test_a_feature_imports_the_core_and_the_features_that_it_needs(feature: str) -> None:
    needed = {f"features.{name}" for name in list_features()[feature].needs}
    modules = [name for name in SOURCES if package_of(name) == f"features.{feature}"]
    assert modules
    others = {package_of(other) for name in modules for other in imported(name) if other in SOURCES}
    features = {other for other in others if other.startswith("features.")}
    assert features - {f"features.{feature}"} == needed


def test_declarations_of_features_import_nothing_else() -> None:
    """Each command reads all of them."""
    for name in SOURCES:
        if name.startswith(FEATURES) and name.endswith(".feature"):
            allowed = {"dataclasses", "re", "typing"}
            for contract in ("config", "directions", "features"):
                allowed.add(f"scaleflow.interfaces.{contract}")
            assert imported(name) <= allowed, name


def test_the_contracts_import_nothing_else_and_files_and_pages_only_the_contracts() -> None:
    for name in SOURCES:
        if (package := package_of(name)) in (*CONTRACTS, "files", "pages"):
            others = {package_of(other) for other in imported(name) if other in SOURCES}
            assert others - {package, *CONTRACTS} == set(), name
            assert "numpy" not in top(imported(name)), name


def test_the_config_is_parsed_without_the_environment() -> None:
    """What the environment says is looked up by `launcher/prepare.py`, and passed on."""
    for name in SOURCES:
        if package_of(name) == "config":
            assert "os.environ" not in ast.unparse(parse(name)), name
            assert not top(imported(name)) & {"socket", "subprocess"}, name


def test_no_module_asks_for_the_name_of_a_cluster_engine() -> None:
    """It asks the engine: `find_engine(plan.cluster)`."""
    for name in SOURCES:
        compared = (ast.unparse(node) for node in ast.walk(parse(name)) if isinstance(node, ast.Compare))
        assert not [text for text in compared if re.search(r"\bcluster\.name\b", text)], name


def test_only_the_folder_of_a_run_knows_the_names_of_its_files() -> None:
    names = {
        "events.jsonl",
        "record.json",
        "config.yaml",
        "overrides.yaml",
        "environment.txt",
        "provenance.json",
    }
    names |= {
        "run.lock",
        "record.lock",
        "sweep.lock",
        "sweep.json",
        "multirun.yaml",
        "traceback.txt",
    }
    for name in SOURCES:
        if name in ("scaleflow.runs.folder", "scaleflow.project") or name.startswith("hydra_plugins"):
            continue
        constants = (node for node in ast.walk(parse(name)) if isinstance(node, ast.Constant))
        written = {node.value for node in constants if node.value in names}
        assert written == set(), name


def test_tensorflow_is_imported_in_the_worker_only() -> None:
    for name in SOURCES:
        if package_of(name) not in WORKER_GROUPS and name not in WORKER_MODULES:
            assert not top(imported(name)) & {"tensorflow", "keras"}, name


def test_mlflow_is_imported_in_tracking_only() -> None:
    """A script imports MLflow itself; its calls need one private name, which `compat` imports inside a function."""
    for name in SOURCES:
        if (
            package_of(name) not in ("tracking", "serving", "compat")
            and name != "scaleflow.features.script.mlflow_calls"
        ):
            assert "mlflow" not in top(imported(name)), name


def test_the_worker_imports_nothing_heavy_before_it_has_its_spec() -> None:
    assert not top(imported("scaleflow.worker.main", inside_functions=False)) & {"tensorflow", "keras", "numpy"}


def test_the_code_that_travels_with_a_model_needs_no_scaleflow() -> None:
    for name in SOURCES:
        if package_of(name) == "serving":
            used = {each for each in imported(name) if each.startswith("scaleflow")}
            names = ("prediction_columns", "cells", "layers", "reasons", "signature_files")
            assert used <= {f"scaleflow.serving.{name}" for name in names}


#: Packages of which all modules are private, though their names do not say so.
PRIVATE_PACKAGES = ("keras.src", "tensorflow.python")

#: What begins with `_` and is public, by its documentation.
PUBLIC = {"_exit", "_asdict", "_replace"}

#: Functions whose second argument is the name of an attribute.
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "object.__setattr__", "attrgetter"}


def is_private(name: str) -> bool:
    parts = name.split(".")
    return name.startswith(PRIVATE_PACKAGES) or any(
        part == "__internal__" or (part.startswith("_") and not part.startswith("__")) for part in parts
    )


@functools.cache
def list_own_names(module: str) -> set[str]:
    """The attributes that the classes of a module set or define."""
    found: set[str] = set()
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(each.id for each in node.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


ALL_OWN_NAMES = {name for module in SOURCES for name in list_own_names(module)}


def list_used_names(node: ast.AST) -> list[str]:
    """The names of modules and attributes that a node mentions, also in strings."""
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{each.name}" for each in node.names if not str(node.module).startswith("scaleflow")]
    if isinstance(node, ast.Attribute):
        text = ast.unparse(node)
        return [text if text.startswith(PRIVATE_PACKAGES) else node.attr]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
        return [str(each.value) for each in node.args[:2] if isinstance(each, ast.Constant)]
    is_module = isinstance(node, ast.Constant) and str(node.value).startswith(PRIVATE_PACKAGES)
    return [str(node.value)] if isinstance(node, ast.Constant) and is_module else []


def list_private_names(module: str) -> Iterator[str]:
    """The private names of libraries that a module uses."""
    for node in ast.walk(parse(module)):
        if names := {*filter(is_private, list_used_names(node))} - PUBLIC:
            owner = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
            is_inherited = owner in ("self", "cls", "super()")
            yield from names - (ALL_OWN_NAMES if is_inherited else list_own_names(module))


def test_private_names_of_libraries_are_used_in_compat_only() -> None:
    """A new release can break them, so `compat` has each of them once, with its purpose."""
    used = {name: set(list_private_names(name)) for name in SOURCES if package_of(name) != "compat"}
    assert {name: found for name, found in used.items() if found} == {}


def test_only_the_main_module_imports_the_command() -> None:
    assert [name for name in SOURCES if "scaleflow.cli" in imported(name)] == ["scaleflow.__main__"]


def test_the_top_level_holds_what_users_type_or_import() -> None:
    found = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert found == set(TOP_LEVEL)


def test_no_module_is_called_utils() -> None:
    assert not [name for name in SOURCES if {"utils", "util", "helpers", "common", "misc"} & set(name.split("."))]


@pytest.mark.parametrize("group", [group for group in GROUPS if group not in GROUPS_WITHOUT_TWIN])
def test_a_config_group_has_a_subpackage_and_a_tests_folder(group: str) -> None:
    assert (PACKAGE / group / "__init__.py").is_file()
    assert list((ROOT / "tests" / group).glob("test_*.py"))


def test_every_group_is_known_to_these_rules() -> None:
    assert set(GROUP_PACKAGES) == {
        *WORKER_GROUPS,
        "tracking",
        "profiler",
        "cluster",
        "evaluation",
    }


def test_the_packages_listed_are_those_on_disk() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = {name for name, path in SOURCES.items() if path.name == "__init__.py"} | {"scaleflow.conf"}
    on_disk |= {feature.conf for feature in list_features().values() if feature.conf}
    assert sorted(listed) == sorted(on_disk)
    assert listed == sorted(listed)


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES.values()}), ids=str)
def test_every_folder_with_modules_is_a_package(folder: Path) -> None:
    assert (folder / "__init__.py").is_file()


@pytest.mark.parametrize(
    "module",
    [
        *(
            "scaleflow",
            "scaleflow.cli",
            "scaleflow.config.plan",
            "scaleflow.launcher.processes.supervisor",
            "scaleflow.worker.main",
        ),
        *("scaleflow.tracking", "scaleflow.features.doctor.command"),
    ],
)
def test_importing_it_imports_neither_tensorflow_nor_mlflow(module: str) -> None:
    check = f"import sys, {module}; print(*{{'tensorflow', 'keras', 'mlflow', 'numpy', 'rich'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.strip() == ""


def test_the_page_names_each_field_of_a_feature() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition("| field of `Feature` |")[2].partition("\n\n")[0]
    names = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(names) == sorted(each.name for each in fields(Feature))


def test_the_files_that_the_page_names_exist() -> None:
    """A name may also be in a folder that is named before it in the same paragraph or row."""
    page = (ROOT / "docs/architecture.md").read_text()
    assert len(page.splitlines()) <= 250
    for paragraph in re.split(r"\n\n|\n(?=\||\d\.)", page):
        folders = [ROOT, PACKAGE]
        for name in re.findall(r"`([\w./]+(?:\.py|\.yaml|\.md|/))`", paragraph):
            if re.search("[A-Z]{3}", name):  # a name that stands for any
                continue
            found = [folder / name for folder in folders if (folder / name).exists()]
            assert found, f"docs/architecture.md names {name}"
            folders += [found[0] if found[0].is_dir() else found[0].parent]
