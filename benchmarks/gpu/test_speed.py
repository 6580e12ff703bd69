"""How fast runs are: precisions, XLA, input, the share of the peak. Nothing is asked of a time; losses must fall."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.bench import Bench, Run, expect, expect_learned, expect_on
from benchmarks.gpu.models import find_difference, write_corpus, write_texts
from benchmarks.measure import BY_HAND

PRECISIONS = ("float32", "mixed")

#: How many epochs are trained; the first one compiles and is not measured.
EPOCHS = 4

#: Steps of an epoch on a GPU, and on CPUs, where only the check itself is tried.
STEPS = {"gpu": 20, "cpu": 3}

#: The widths of a model of matrix products, and its batch.
WIDTHS = {"gpu": (4096, 8192, 8192), "cpu": (64, 128, 128)}
WIDE_BATCH = {"gpu": 8192, "cpu": 64}
#: Adam changes each sum over a layer's inputs by about the rate times their number.
WIDE_RATE = {"gpu": 1e-5, "cpu": 1e-3}
CLASSES = 10

#: How far a rate may be above the peak: the clock of a GPU may be higher than the data sheet's.
ABOVE_PEAK = 1.05

#: The largest difference between the first epoch's losses of two settings of XLA, relative to losses above 1 (TF32).
XLA_DIFFERENCE = 1e-2

#: A setting is called slower if it has less than this share of the rate.
SLOWER = 0.9

#: JPEG files of each class, and their width.
FILES, SIDE = 100, 256


def train_for_speed(bench: Bench, words: Sequence[str], name: str, count: int = 1) -> Run:
    """Trains `EPOCHS` epochs on `count` devices, with nothing else to do."""
    strategy = "one_device" if count == 1 else "mirrored"
    plain = ("tracking=none", "checkpoint=none", f"training.epochs={EPOCHS}", f"strategy={strategy}")
    words = [*plain, *bench.device.words(count if bench.device.kind == "cpu" else 1), *words]
    run = bench.train(words, name, bench.device.environment(count))
    expect_on(run, bench.device, replicas=count)
    expect_learned(run.metric("train/loss"))
    return run


def find_rate(run: Run) -> float:
    """Returns the examples per second of the median epoch except the first."""
    return statistics.median(run.metric("perf/examples_per_second")[1:])


def find_first_loss(run: Run) -> float:
    """Returns the training loss of the first epoch. In later ones the smallest differences have grown."""
    return float(next(event["values"]["train/loss"] for event in run.events if event["event"] == "epoch"))


def find_mfu(runs: Iterable[Run]) -> float | None:
    """Returns the median `perf/mfu`, None if the GPU's peak is not known."""
    shares = [event["values"].get("perf/mfu") for run in runs for event in run.events if event["event"] == "epoch"]
    known = [share for share in shares if share is not None]
    return statistics.median(known) if known else None


def resnet_words(bench: Bench, count: int) -> list[str]:
    """Returns the overrides of ResNet-50 on synthetic photographs; of a small ResNet on CPUs."""
    kind = bench.device.kind
    size = bench.options.batch_size if kind == "gpu" else 8
    model = ["model.depth=50", "dataset.shape=[224,224,3]"] if kind == "gpu" else ["dataset.shape=[16,16,3]"]
    examples = STEPS[kind] * size * count * 5 // 4  # a fifth is for the test
    data = ["dataset=synthetic", "dataset.validation=null", f"dataset.examples={examples}"]
    return [*data, "model=resnet", *model, f"training.batch_size={size}", *bench.options.overrides]


def gpt_words(bench: Bench) -> list[str]:
    """Returns the overrides of a GPT of GPT-2's size without its vocabulary; of a small one on CPUs."""
    data = bench.shared / "data-speed"
    if not data.exists():
        data.mkdir()
        write_corpus(data, 400_000)
    sizes = {
        "gpu": ["model.width=768", "model.heads=12", "model.blocks=12", "dataset.tokens=512", "training.batch_size=16"],
        "cpu": ["model.width=32", "model.blocks=1", "dataset.tokens=32", "training.batch_size=8"],
    }[bench.device.kind]
    files = [f"dataset.data_dir={data}", f"dataset.cache_dir={data}", "dataset.validation=null"]
    return [
        "experiment=gpt_bytes",
        "optimizer.learning_rate=0.0005",
        *files,
        *sizes,
        f"training.steps_per_epoch={STEPS[bench.device.kind]}",
    ]


@pytest.mark.gpu(seconds=300, tolerance="the loss falls")
def test_resnet50(bench: Bench) -> None:
    compare_precisions(bench, resnet_words(bench, 1), PRECISIONS)


@pytest.mark.gpu(seconds=240, tolerance="the loss falls")
def test_gpt2(bench: Bench) -> None:
    compare_precisions(bench, gpt_words(bench), ("float32", "mixed", "mixed_bfloat16"))


def compare_precisions(bench: Bench, words: Sequence[str], precisions: Sequence[str]) -> None:
    """Examples/s of a model in each precision, and the share of the peak, by turns in each round."""
    runs: dict[str, list[Run]] = {precision: [] for precision in precisions}
    for number in range(bench.options.rounds):
        for precision in precisions if number % 2 == 0 else reversed(precisions):
            name = f"{precision}-{number}"
            runs[precision].append(train_for_speed(bench, [*words, f"precision={precision}"], name))
    rates = {precision: [find_rate(run) for run in each] for precision, each in runs.items()}
    for precision in precisions:
        bench.values[f"{precision}, examples/s"] = statistics.median(rates[precision])
        record_mfu(bench, precision, runs[precision])
    record_ratio(bench, f"{precisions[1]} / {precisions[0]}", rates[precisions[1]], rates[precisions[0]])
    if bench.device.kind == "gpu" and bench.values[f"{precisions[1]} / {precisions[0]}"] < 1:  # type: ignore[operator]
        bench.remarks.append(f"docs/choosing.md calls {precisions[1]} nearly always worth it; here it is slower")


def record_mfu(bench: Bench, name: str, runs: Iterable[Run]) -> None:
    """Records `perf/mfu`. It must be a share, and it must not exist for a CPU."""
    share = find_mfu(runs)
    if share is None:
        bench.values[f"{name}, perf/mfu"] = "none: the peak is not known"
        return
    expect(bench.device.kind == "gpu", f"perf/mfu is {share} on a CPU, whose peak is not known")
    expect(0 < share <= ABOVE_PEAK, f"perf/mfu is {share}")
    bench.values[f"{name}, perf/mfu"] = share


def record_ratio(bench: Bench, name: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    bench.values[name] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


@pytest.mark.gpu(seconds=400, tolerance="the loss falls", devices=2)
def test_several_gpus(bench: Bench) -> None:
    """Examples/s of ResNet-50 on two and on all devices, against as many times one."""
    for precision in PRECISIONS:
        one = find_rate(train_for_speed(bench, [*resnet_words(bench, 1), f"precision={precision}"], f"{precision}-1"))
        for count in sorted({2, bench.device.count}):
            words = [*resnet_words(bench, count), f"precision={precision}"]
            run = train_for_speed(bench, words, f"{precision}-{count}", count)
            bench.values[f"{precision} on {count}, examples/s"] = find_rate(run)
            bench.values[f"{precision} on {count} / {count} x one"] = find_rate(run) / (count * one)
            record_mfu(bench, f"{precision} on {count}", [run])


@pytest.mark.parametrize("model", [pytest.param(name, id=f"xla_{name}") for name in ("mlp", "cnn", "transformer")])
@pytest.mark.gpu(seconds=180, tolerance=f"the first epoch's losses within {XLA_DIFFERENCE:g} (TF32)")
def test_xla(bench: Bench, model: str) -> None:
    """Examples/s with each value of `hardware.xla`, and whether the losses are the same."""
    scale = 1 if bench.device.kind == "cpu" else 20
    words = [
        *(f"model={model}", "dataset=synthetic", "dataset.shape=[28,28,1]", f"dataset.examples={1600 * scale}"),
        *("dataset.validation=null", "training.batch_size=128"),
    ]
    if model == "transformer":
        data = bench.shared / "data-transformer"
        if not data.exists():
            data.mkdir()
            write_texts(data)
        words = ["model=transformer", "dataset=text_folder", f"dataset.data_dir={data}", "dataset.tokens=24"]
    rates, losses, choice = {}, {}, ""
    for value in ("auto", "true", "false"):
        run = train_for_speed(bench, [*words, f"hardware.xla={value}"], value)
        choice = choice or run.params["resolved.xla"]
        rates[value], losses[value] = find_rate(run), find_first_loss(run)
        bench.values[f"{value}, examples/s"] = rates[value]
        bench.values[f"{value}, first step s"] = run.metric("perf/seconds_to_first_step")[0]
    bench.values["auto"] = choice
    difference = max(find_difference([losses[value]], [losses["false"]]) for value in ("auto", "true"))
    bench.values["difference of the first epoch's loss"] = difference
    expect(difference <= XLA_DIFFERENCE, f"losses differ by {difference:.3g} with XLA, allowed is {XLA_DIFFERENCE:g}")
    best = max(rates, key=lambda value: rates[value])
    if bench.device.kind == "gpu" and rates["auto"] < SLOWER * rates[best]:
        bench.remarks.append(
            f"hardware.xla=auto ({choice}) has {rates['auto'] / rates[best]:.2f} of the rate of {best}"
        )


@pytest.mark.gpu(seconds=150, tolerance="the loss falls")
def test_input(bench: Bench) -> None:
    """Examples/s of a ResNet on JPEG files that are decoded in each epoch, against decoded ones that are kept."""
    write_photos(bench.folder / "photos", FILES if bench.device.kind == "gpu" else 8)
    side = 128 if bench.device.kind == "gpu" else 16
    words = [
        *("dataset=image_folder", f"dataset.data_dir={bench.folder / 'photos'}", f"dataset.size=[{side},{side}]"),
        *("dataset.validation=null", "model=resnet", "precision=mixed", "training.batch_size=32"),
    ]
    rates = {}
    for cache in ("none", "memory"):
        rates[cache] = find_rate(train_for_speed(bench, [*words, f"dataset.cache={cache}"], cache))
        bench.values[f"dataset.cache={cache}, examples/s"] = rates[cache]
    bench.values["none / memory"] = rates["none"] / rates["memory"]


def write_photos(folder: Path, files: int) -> None:
    """Writes JPEG files of coloured noise, in a folder for each class, with a bright bar at the place of the class."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / "train" / f"class{label}").mkdir(parents=True)
        for number in range(files):
            coarse = draw.integers(0, 160, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
            photo = coarse.repeat(8, axis=0).repeat(8, axis=1)
            photo[:, label * SIDE // CLASSES : (label + 1) * SIDE // CLASSES] += 64
            Image.fromarray(photo).save(folder / "train" / f"class{label}" / f"{number}.jpg", quality=90)


@pytest.mark.gpu(seconds=180, tolerance=f"flops_per_example by the formula; nothing above {ABOVE_PEAK:g} of the peak")
def test_mfu(bench: Bench) -> None:
    """`perf/flops_per_example` against the formula, and `perf/mfu` of large products against a bare loop of products.

    No loop may be faster than the peak. If the bare one is, the table of peaks is wrong.
    """
    kind = bench.device.kind
    widths = WIDTHS[kind]
    examples = STEPS[kind] * WIDE_BATCH[kind] * 5 // 4
    words = [
        *("dataset=synthetic", f"dataset.shape=[{widths[0]}]", f"dataset.examples={examples}", "model=mlp"),
        *(
            "dataset.validation=null",
            f"model.units=[{widths[1]},{widths[2]}]",
            *(f"training.batch_size={WIDE_BATCH[kind]}", f"optimizer.learning_rate={WIDE_RATE[kind]}"),
        ),
    ]
    bare = json.loads(bench.run([BY_HAND / "matmul.py", str(widths[-1]), kind]).stdout.splitlines()[-1])
    for precision, dtype in (("float32", "float32"), ("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")):
        run = train_for_speed(bench, [*words, f"precision={precision}"], precision)
        flops, expected = run.metric("perf/flops_per_example")[0], count_operations([*widths, CLASSES])
        expect(flops == expected, f"perf/flops_per_example is {flops:,.0f}, expected {expected:,.0f}")
        bench.values[f"{dtype}, bare TFLOP/s"] = bare[dtype]
        bench.values[f"{dtype}, TFLOP/s"] = find_rate(run) * flops / 1e12
        record_mfu(bench, dtype, [run])
        if (share := find_mfu([run])) is not None:
            peak = find_rate(run) * flops / share / 1e12
            bench.values[f"{dtype}, peak TFLOP/s"] = peak
            expect(
                bare[dtype] <= ABOVE_PEAK * peak,
                f"a loop of {dtype} products reaches {bare[dtype]:.0f} TFLOP/s, more than the peak of {peak:.0f} in "
                "scaleflow/hardware/devices.py",
            )
    if kind == "gpu" and not any("peak" in name for name in bench.values):
        pytest.skip("scaleflow/hardware/devices.py does not have this GPU")


def count_operations(widths: Sequence[int]) -> float:
    """Returns the operations of a training step of dense layers for an example: a product forward and two backward for
    each layer, but one for the first layer, whose inputs need no gradient.
    """
    products = [2.0 * a * b for a, b in itertools.pairwise(widths)]
    return 3 * sum(products) - products[0]
