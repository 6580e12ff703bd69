"""The error of model=tabular on public tables, against scikit-learn, and what each of its parts contributes.

    python -m benchmarks.tabular                          # all tables, and the ablation: half an hour on two cores
    python -m benchmarks.tabular --variants default       # without the ablation
    python -m benchmarks.tabular --tables diabetes engel

The tables are those that scikit-learn, statsmodels and vega_datasets ship. A fifth of the rows, drawn with a seed, is
the test. scikit-learn gets one-hot categories and medians for the linear model, and numbered categories for boosting.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: What is typed for each row of the ablation.
VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "numbers periodic in all members": ("model.numbers=periodic",),
    "numbers piecewise linear in all members": ("model.numbers=piecewise",),
    "numbers only scaled": ("model.numbers=plain",),
    "a single member, a tenth held out": ("model.members=1",),
    "a tenth held out, no folds": ("dataset.validation=0.1",),
    "the last epoch": ("checkpoint.export=last",),
    "a constant learning rate": ("optimizer.schedule=constant",),
    "model=mlp": ("model=mlp",),
}


def load_tables() -> dict[str, tuple[Any, str]]:
    """Returns data frames and their targets, by name."""
    from sklearn import datasets
    from vega_datasets import local_data

    def load(name: str) -> Any:
        return importlib.import_module(f"statsmodels.datasets.{name}").load_pandas().data

    def name_classes(frame: Any, column: str = "target") -> Any:
        return frame.assign(**{column: [f"class {int(value)}" for value in frame[column]]})

    cars = local_data.cars()
    anes, schools, fair = load("anes96"), load("star98"), load("fair")
    share = schools.NABOVE / (schools.NABOVE + schools.NBELOW)
    years = load("fertility")[["1960", "1965", "1970", "1975", "1980", "1985", "1990", "2000"]]
    years = years[years["2000"].notna()].rename(columns=lambda year: f"year_{year}")
    weather, travel = local_data.seattle_weather(), load("modechoice").drop(columns="individual")
    return {
        "diabetes": (datasets.load_diabetes(as_frame=True).frame, "target"),
        "breast cancer": (name_classes(datasets.load_breast_cancer(as_frame=True).frame), "target"),
        "wine": (name_classes(datasets.load_wine(as_frame=True).frame), "target"),
        "cars, consumption": (cars[cars.Miles_per_Gallon.notna()], "Miles_per_Gallon"),
        "cars, origin": (cars, "Origin"),
        "Seattle, temperature": (weather, "temp_max"),
        "Seattle, weather": (weather, "weather"),
        "stocks": (local_data.stocks(), "price"),
        "investments": (load("grunfeld"), "invest"),
        "schools": (schools.iloc[:, :14].assign(share=share).drop(columns=["NABOVE", "NBELOW"]), "share"),
        "election, vote": (name_classes(anes, "vote"), "vote"),
        "election, party": (anes.drop(columns="vote"), "PID"),
        "fertility": (years, "year_2000"),
        "economy": (load("macrodata"), "realinv"),
        "Engel's law": (load("engel"), "foodexp"),
        "cancer by county": (load("cancer"), "cancer"),
        "travel": (name_classes(travel, "choice"), "choice"),
        "affairs": (fair.assign(affairs=np.where(fair.affairs > 0, "yes", "no")), "affairs"),
    }


def divide_rows(frame: Any, target: str, seed: int) -> tuple[Any, Any]:
    """Returns the rows to train on, and those for the test; the target is the column `target`."""
    frame = frame.rename(columns={target: "target"}).rename(columns=lambda name: name.replace("/", " by "))
    order, count = np.random.default_rng([7, seed]).permutation(len(frame)), round(len(frame) / 5)
    return frame.iloc[order[count:]].reset_index(drop=True), frame.iloc[order[:count]].reset_index(drop=True)


def are_classes(train: Any) -> bool:
    return train.target.dtype.kind not in "fiu"


def score_scikit_learn(train: Any, test: Any) -> dict[str, float]:
    """Returns the error of each model on the test rows: RMSE, or log loss."""
    from sklearn import metrics
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    (inputs, test_inputs), is_class = (prepare_columns(each) for each in (train, test)), are_classes(train)
    words = [name for name in inputs if inputs[name].dtype.kind not in "fiub"]
    numbers = [name for name in inputs if name not in words]
    numbered = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    scaled = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    few = all(inputs[name].nunique() < 250 for name in words)
    options: dict[str, Any] = {"random_state": 0, "categorical_features": list(range(len(words))) if few else None}
    linear = LogisticRegression(max_iter=2000) if is_class else LinearRegression()
    boosting = (HistGradientBoostingClassifier if is_class else HistGradientBoostingRegressor)(**options)
    found = {}
    for name, columns, model in (
        ("linear", ((one_hot, words), (scaled, numbers)), linear),
        ("boosting", ((numbered, words), ("passthrough", numbers)), boosting),
    ):
        fitted = make_pipeline(make_column_transformer(*columns, sparse_threshold=0), model).fit(inputs, train.target)
        if is_class:
            found[name] = metrics.log_loss(test.target, fitted.predict_proba(test_inputs), labels=fitted.classes_)
        else:
            found[name] = metrics.root_mean_squared_error(test.target, fitted.predict(test_inputs))
    return found


def prepare_columns(rows: Any) -> Any:
    """Returns the inputs with numbers in place of dates, and a word in place of a missing one."""
    inputs = rows.drop(columns="target")
    for name in list(inputs):
        kind = inputs[name].dtype.kind
        if kind == "M":
            dates = inputs.pop(name).dt
            turn = 2 * np.pi * dates.dayofyear / 365.25
            parts = {"day": dates.as_unit("s").astype("int64") / 86400, "sin": np.sin(turn), "cos": np.cos(turn)}
            inputs = inputs.assign(**{f"{name} {part}": values for part, values in parts.items()})
        elif kind not in "fiub":
            inputs[name] = inputs[name].fillna("?")
    return inputs


def score_scaleflow(train: Any, test: Any, folder: Path, *words: str) -> tuple[float, float]:
    """Returns the error on the test rows of a run, and its seconds. It runs in this process."""
    import scaleflow

    data = folder / "data"
    data.mkdir(parents=True)
    train.to_parquet(data / "train.parquet")
    test.to_parquet(data / "test.parquet")
    options = ["dataset=table", f"dataset.data_dir={data}", "dataset.target=target", f"hydra.run.dir={folder / 'run'}"]
    options += ["tracking=none", "hardware=cpu", "evaluation=none", "debug=inline"]
    options += [] if are_classes(train) else ["dataset.kind=regression"]
    options += [] if any(word.startswith("model=") for word in words) else ["model=tabular"]
    began = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        result = scaleflow.run(*options, *words)
    return result.metrics["test/loss" if are_classes(train) else "test/rmse"], time.monotonic() - began


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", help="some of the tables; default: all")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0, help="draws the test rows")
    typed = parser.parse_args(argv)
    tables = load_tables()
    print("| table | rows | linear | boosting |", *(f" {name} |" for name in typed.variants), sep="", flush=True)
    print("|---|---|---|---|", "---|" * len(typed.variants), sep="")
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in typed.variants}
    for table in typed.tables or tables:
        train, test = divide_rows(*tables[table], typed.seed)
        known = score_scikit_learn(train, test)
        cells = [table, f"{len(train) + len(test):,}", *(f"{known[name]:.4g}" for name in ("linear", "boosting"))]
        for variant in typed.variants:
            with tempfile.TemporaryDirectory(prefix="scaleflow-tables-") as folder:
                error, seconds = score_scaleflow(train, test, Path(folder), *VARIANTS[variant])
            ratios[variant].append((error / known["boosting"], error / min(known.values())))
            cells.append(f"{error:.4g}")
            print(f"{table}, {variant}: {error:.4g} in {seconds:.0f} s", file=sys.stderr, flush=True)
        print(f"| {' | '.join(cells)} |", flush=True)
    print(
        "\n| variant | median of boosting | median of the better | mean of the better | worst |",
        "|---|---|---|---|---|",
        sep="\n",
    )
    for variant, found in ratios.items():
        boosting, better = zip(*found, strict=True)
        middle = statistics.median(boosting), statistics.median(better)
        cells = [variant, *(f"{each:.2f}" for each in (*middle, statistics.geometric_mean(better), max(better)))]
        print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
