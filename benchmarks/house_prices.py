"""The error of house prices predicted from a table, against scikit-learn on the same rows.

    python -m benchmarks.house_prices              # two tables of 5,000 rows, drawn with the seeds 0 and 1
    python -m benchmarks.house_prices --seeds 5 6

The tables are generated: numbers, categories, a text with line breaks, and missing values. scikit-learn gets medians
for missing numbers, indicators, one-hot categories and the words of the text. scaleflow gets the CSV files as they are:
with default settings, and with `model=mlp`, dropout and the best epoch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import environment

ROWS = 5_000

#: Rows of the training file; the others are for the test.
TRAIN = 4_000

NUMBERS = ("area", "rooms", "year", "condition", "distance", "garden")
CATEGORIES = ("town", "kind", "heating")

#: Words of the descriptions -> what they add to the logarithm of the price.
WORDS = {
    "renovated": 0.10,
    "sunny": 0.05,
    "quiet": 0.04,
    "balcony": 0.05,
    "fireplace": 0.03,
    "view": 0.12,
    "noisy": -0.07,
    "basement": -0.06,
    "needs work": -0.15,
    "old roof": -0.09,
    **dict.fromkeys(("close to school", "bus stop", "garage nearby", "call us today"), 0.0),
}

#: The best that was known before `model=tabular`.
RECIPE = ("model=mlp", "model.dropout=0.2", "checkpoint.best={monitor: val/mae, mode: min}", "checkpoint.export=best")


def make_houses(seed: int) -> Any:
    """Makes the table as a pandas data frame; a twentieth of most columns is missing."""
    import pandas as pd

    random = np.random.default_rng(seed)
    town, kind, heating = (random.integers(0, count, ROWS) for count in (25, 4, 3))
    area = random.gamma(6, 18, ROWS) + 25
    rooms = np.clip((area / 28 + random.normal(0, 1, ROWS)).round(), 1, 9)
    year = random.integers(1890, 2024, ROWS).astype(float)
    condition = random.integers(1, 6, ROWS).astype(float)
    distance = random.exponential(6, ROWS)
    garden = np.where(random.random(ROWS) < 0.5, random.gamma(2, 150, ROWS), 0)
    is_said = random.random((ROWS, len(WORDS))) < 0.22
    log_price = np.log(1900 * area**0.9) + random.normal(0, 0.3, 25)[town] + np.log([1, 0.85, 1.15, 0.7])[kind]
    log_price += 0.05 * (condition - 3) - 0.03 * distance + 0.00012 * garden + 0.03 * rooms
    log_price += 0.0012 * np.maximum(year - 1960, 0) + 0.0012 * np.maximum(1930 - year, 0)
    log_price += is_said @ list(WORDS.values()) + random.normal(0, 0.08, ROWS)
    columns = {
        "area": area.round(1),
        "rooms": rooms,
        "year": year,
        "condition": condition,
        "distance": distance.round(2),
        "garden": garden.round(),
        "town": [f"town {number}" for number in town],
        "kind": np.array(["house", "flat", "villa", "studio"])[kind],
        "heating": np.array(["gas", "oil", "heat pump"])[heating],
        "description": [describe_house(words, random) for words in is_said],
        "price": np.exp(log_price).round(-2),
    }
    houses = pd.DataFrame(columns)
    for name in ("rooms", "year", "condition", "garden", "town", "heating", "description"):
        houses.loc[random.random(ROWS) < 0.05, name] = None
    return houses


def describe_house(is_said: np.ndarray[Any, Any], random: np.random.Generator) -> str:
    words = random.permutation(np.array(list(WORDS))[is_said])
    half = len(words) // 2
    return f"House for sale:\n{', '.join(words[:half])}\n{' and '.join(words[half:])}."


def measure_scikit_learn(houses: Any) -> dict[str, float]:
    """Returns the mean absolute error of each model on the test rows."""
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    inputs = houses.drop(columns="price").fillna({"description": "", **dict.fromkeys(CATEGORIES, "?")})
    errors = {}
    for model in (LinearRegression(), HistGradientBoostingRegressor(random_state=0)):
        columns = make_column_transformer(
            (SimpleImputer(strategy="median", add_indicator=True), list(NUMBERS)),
            (OneHotEncoder(handle_unknown="ignore", sparse_output=False), list(CATEGORIES)),
            (CountVectorizer(binary=True, max_features=200), "description"),
            sparse_threshold=0,
        )
        fitted = make_pipeline(columns, model).fit(inputs[:TRAIN], houses.price[:TRAIN])
        errors[type(model).__name__] = float(np.abs(fitted.predict(inputs[TRAIN:]) - houses.price[TRAIN:]).mean())
    return errors


def measure_scaleflow(houses: Any, folder: Path, *words: str) -> float:
    """Returns the mean absolute error on the test rows of a run on CSV files."""
    data = folder / "data"
    data.mkdir(parents=True)
    houses[:TRAIN].to_csv(data / "train.csv", index=False)
    houses[TRAIN:].to_csv(data / "test.csv", index=False)
    command = [sys.executable, "-m", "scaleflow", "dataset=table", f"dataset.data_dir={data}", "dataset.target=price"]
    command += ["tracking=none", "hardware=cpu", f"hydra.run.dir={folder / 'run'}", *words]
    ended = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"a run failed: {ended.stderr}")
    events = map(json.loads, (folder / "run" / "events.jsonl").read_text().splitlines())
    (error,) = (event["values"]["test/mae"] for event in events if "test/mae" in event.get("values", {}))
    return float(error)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="a table is drawn with each")
    for seed in parser.parse_args(argv).seeds:
        houses = make_houses(seed)
        reference = measure_scikit_learn(houses)
        with tempfile.TemporaryDirectory(prefix="scaleflow-houses-") as folder:
            for label, words in (("default settings", ()), ("an MLP with dropout", RECIPE)):
                error = measure_scaleflow(houses, Path(folder, label), *words)
                ratios = (f"{error / other:.2f} of {name}'s {other:,.0f}" for name, other in reference.items())
                print(f"seed {seed}, {label}: test MAE {error:,.0f}", *ratios, sep=" | ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
