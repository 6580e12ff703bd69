"""The small training runs that are compared, and the files that they read."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.bench import Bench, Run

#: Neither tracking nor checkpoints, one device, losses at fixed steps.
PLAIN = ("tracking=none", "checkpoint=none", "strategy=one_device", "training.steps_per_loop=10")

#: cuBLAS and cuDNN then compute float32 products in float32.
WITHOUT_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}

LOSSES = ("train/loss", "val/loss", "test/loss")

TEXTS, WORDS_OF_TEXT, VOCABULARY = 200, 24, 300


@dataclass(frozen=True)
class Model:
    """A model with its data.

    Attributes:
        words: overrides.
        steps: how many steps it trains.
        write: writes its files into a folder, which `{data}` in the words stands for.
    """

    words: Sequence[str]
    steps: int = 30
    write: Callable[[Path], None] | None = None

    def overrides(self, bench: Bench, name: str) -> list[str]:
        """Returns the overrides, after writing the files if no check has done so."""
        data = bench.shared / f"data-{name}"
        if self.write is not None and not data.exists():
            data.mkdir()
            self.write(data)
        return [word.replace("{data}", str(data)) for word in self.words]


def write_texts(folder: Path) -> None:
    """Writes texts of two classes, which differ in how often words occur."""
    draw = random.Random(0)
    for label in range(2):
        (folder / f"class{label}").mkdir()
        for number in range(TEXTS):
            words = [f"w{int(VOCABULARY * draw.random() ** (1 + label))}" for _ in range(WORDS_OF_TEXT)]
            (folder / f"class{label}" / f"{number}.txt").write_text(" ".join(words))


def write_corpus(folder: Path, characters: int = 60_000) -> None:
    """Writes a text of words that often follow each other."""
    draw = random.Random(0)
    words, word = [], 0
    for _ in range(characters // 4):
        word = (word * 7 + draw.randrange(3)) % VOCABULARY
        words.append(f"w{word}")
    (folder / "corpus.txt").write_text(" ".join(words)[:characters])


MODELS: Mapping[str, Model] = {
    "digits": Model(("dataset=digits", "model=mlp")),
    "cnn": Model(("dataset=synthetic", "dataset.shape=[16,16,3]", "dataset.examples=2500", "model=cnn")),
    "resnet": Model(("dataset=synthetic", "dataset.shape=[16,16,3]", "dataset.examples=1000", "model=resnet"), 10),
    "transformer": Model(
        (
            *("dataset=text_folder", "dataset.data_dir={data}", "dataset.tokens=24", "model=transformer"),
            "optimizer.learning_rate=0.0003",
        ),
        30,
        write_texts,
    ),
    "gpt": Model(
        (
            *("experiment=gpt_bytes", "dataset.data_dir={data}", "dataset.cache_dir={data}", "dataset.tokens=32"),
            *("model.width=64", "model.blocks=2", "optimizer.warmup_steps=5"),
        ),
        30,
        write_corpus,
    ),
}


def train_model(
    bench: Bench, name: str, words: Sequence[str], folder: str, extra: Mapping[str, str] | None = None
) -> Run:
    """Trains a model, with overrides that come after its own."""
    model = MODELS[name]
    steps = f"training.max_steps={model.steps}"
    return bench.train([*model.overrides(bench, name), *PLAIN, steps, *words], folder, extra)


def train_on_cpu(bench: Bench, name: str, words: Sequence[str] = (), key: str = "") -> list[float]:
    """Returns the losses in float32 on the CPU. Those of the same `key` are computed once."""

    def train() -> list[float]:
        return list_losses(train_model(bench, name, ("hardware=cpu", "hardware.xla=false", *words), "cpu"))

    return bench.reuse(f"losses-{name}{key}", train)


def list_losses(run: Run) -> list[float]:
    """Returns the training losses of all calls, then those of validation and test."""
    return [value for name in LOSSES for value in run.metric(name)]


def find_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the largest difference, relative to losses above 1; infinite if their numbers differ."""
    if len(losses) != len(reference):
        return float("inf")
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, reference, strict=True))
