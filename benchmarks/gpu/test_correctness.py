"""Whether runs on a GPU compute what they compute on the CPU, in every way in which a GPU can be used."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu.bench import Bench, Run, expect, expect_learned, expect_on
from benchmarks.gpu.models import (
    MODELS,
    PLAIN,
    WITHOUT_TF32,
    find_difference,
    list_losses,
    train_model,
    train_on_cpu,
)
from scaleflow.cluster.network import free_ports

#: By the name of a check: the precision, whether float32 is computed without TF32, the largest difference of a loss
#: from the CPU's in float32, and why. `sweep.same_losses` allows the same for float32 and for 16 bits.
PRECISIONS = {
    "float32": ("float32", True, 1e-3, "TF32 off: the same 24 bits, summed in another order"),
    "tf32": ("float32", False, 1e-2, "TF32: factors of products are rounded to 11 bits"),
    "float16": ("mixed_float16", False, 5e-2, "float16: layers round to 11 bits; an update that overflows is skipped"),
    "bfloat16": ("mixed_bfloat16", False, 5e-2, "bfloat16: layers round to 8 bits"),
}

#: The largest difference of a resumed run's losses, relative to losses above 1, with deterministic operations.
RESUMED = 1e-6

#: The largest difference of a probability that a GPU computes with TF32 from the CPU's.
PROBABILITY = 1e-2

#: Examples of one update for runs on one and on several devices.
GLOBAL_BATCH = 64

FLOAT32, TF32 = (f"{PRECISIONS[name][2]:g} ({PRECISIONS[name][3]})" for name in ("float32", "tf32"))
FLOAT16 = f"{PRECISIONS['float16'][2]:g} (float16)"


@pytest.mark.gpu(seconds=90)
def test_doctor(bench: Bench) -> None:
    """`python -m scaleflow doctor` names the device, and says which precisions work on it."""
    ended = bench.run(["-m", "scaleflow", "doctor", "--json"])
    found = json.loads(ended.stdout)
    verdicts = [(name, each["works"]) for name, each in found["precisions"].items()]
    kinds = {device["kind"] for device in found["tensorflow"]["devices"]}
    expect(bench.device.kind.upper() in kinds, f"the doctor finds {kinds}")
    expect(found["auto"].get("hardware") == bench.device.kind, f"auto resolves to {found['auto']}")
    bench.values["mixed is"] = str(found["auto"].get("mixed"))
    bench.values |= {name: {True: "works", False: "does not work", None: "unknown"}[works] for name, works in verdicts}
    expect(("float32", True) in verdicts, "float32 does not work")


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        pytest.param(
            *(model, precision),
            marks=pytest.mark.gpu(seconds=120, tolerance=f"{allowed:g} ({why})"),
            id=f"{model}_{precision}",
        )
        for model in MODELS
        for precision, (_, _, allowed, why) in PRECISIONS.items()
    ],
)
def test_losses(bench: Bench, model: str, precision: str) -> None:
    """Trains a model in a precision, and compares all losses with those of the CPU in float32."""
    name, is_plain, allowed, _ = PRECISIONS[precision]
    reference = train_on_cpu(bench, model)
    words = [*bench.device.words(), f"precision={name}"]
    run = train_model(bench, model, words, "run", WITHOUT_TF32 if is_plain else None)
    expect_on(run, bench.device)
    expect(run.params["resolved.precision"] == name, f"resolved.precision is {run.params['resolved.precision']}")
    expect_learned(run.metric("train/loss"))
    if name == "mixed_float16":
        bench.values["loss scale"] = run.metric("train/loss_scale")[-1]
    expect_close(bench, list_losses(run), reference, allowed)


def expect_close(
    bench: Bench, losses: Sequence[float], reference: Sequence[float], allowed: float, name: str = "difference"
) -> None:
    difference = find_difference(losses, reference)
    bench.values[name] = difference
    pairs = ", ".join(f"{ours:.4g}/{theirs:.4g}" for ours, theirs in zip(losses, reference, strict=False))
    expect(difference <= allowed, f"losses differ by {difference:.3g}, allowed is {allowed:g}: {pairs}")


@pytest.mark.gpu(seconds=120, tolerance=FLOAT32)
def test_mirrored(bench: Bench) -> None:
    """Two replicas on one GPU, against one CPU with the same global batch."""
    words = (f"training.global_batch_size={GLOBAL_BATCH}",)
    reference = train_on_cpu(bench, "cnn", words, f"-{GLOBAL_BATCH}")
    divided = [*bench.device.words(logical=2), "strategy=mirrored"]
    run = train_model(bench, "cnn", [*words, *divided], "run", WITHOUT_TF32)
    expect_on(run, bench.device, replicas=2)
    expect_close(bench, list_losses(run), reference, PRECISIONS["float32"][2])


@pytest.mark.gpu(seconds=120, tolerance=FLOAT32)
def test_pipeline(bench: Bench) -> None:
    """Two stages on one GPU, against one CPU."""
    words = ("model=mlp", "model.units=[64,64,64,64]", f"training.global_batch_size={GLOBAL_BATCH}")
    reference = train_on_cpu(bench, "cnn", words, "-stages")
    stages = ("strategy=pipeline", "strategy.stages=2", "strategy.micro_batches=2")
    run = train_model(bench, "cnn", [*words, *bench.device.words(logical=2), *stages], "run", WITHOUT_TF32)
    expect(run.params["resolved.hardware"] == bench.device.kind, "the stages are not on the device")
    expect_close(bench, list_losses(run), reference, PRECISIONS["float32"][2])


@pytest.mark.gpu(seconds=150, tolerance=FLOAT32)
def test_two_workers(bench: Bench) -> None:
    """Two workers on one GPU with a memory limit each; their gradients go over gRPC, since NCCL takes a GPU each."""
    words = (f"training.global_batch_size={GLOBAL_BATCH}",)
    reference = train_on_cpu(bench, "cnn", words, f"-{GLOBAL_BATCH}")
    peers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    folder = bench.folder / "run"
    model = MODELS["cnn"]
    command = [
        *("-m", "scaleflow", *model.overrides(bench, "cnn"), *PLAIN, f"training.max_steps={model.steps}", *words),
        *bench.device.words(limit_mb=bench.device.limit_mb),
        *("strategy=multi_worker", "strategy.communication=ring", "cluster=tf_config", f"hydra.run.dir={folder}"),
    ]
    started = []
    for index in range(2):
        task = {"cluster": {"worker": peers}, "task": {"type": "worker", "index": index}}
        started.append(bench.start(command, WITHOUT_TF32 | {"TF_CONFIG": json.dumps(task)}))
    ended = [bench.wait(each) for each in started]
    for each in ended:
        expect(each.code == 0, f"exit code {each.code}: {each.last_lines}")
    run = Run(folder, ended[0])
    expect_on(run, bench.device, replicas=2)
    expect_close(bench, list_losses(run), reference, PRECISIONS["float32"][2])


@pytest.mark.gpu(seconds=120, tolerance=FLOAT32)
def test_two_runs(bench: Bench) -> None:
    """Two commands at the same time on one GPU, with a memory limit each."""
    reference = train_on_cpu(bench, "digits")
    folders = [bench.folder / f"run-{number}" for number in range(2)]
    model = MODELS["digits"]
    words = [*model.overrides(bench, "digits"), *PLAIN, f"training.max_steps={model.steps}"]
    hardware = bench.device.words(limit_mb=bench.device.limit_mb)
    started = [
        bench.start(["-m", "scaleflow", *words, *hardware, f"hydra.run.dir={folder}"], WITHOUT_TF32)
        for folder in folders
    ]
    for number, (each, folder) in enumerate(zip(started, folders, strict=True)):
        ended = bench.wait(each)
        expect(ended.code == 0, f"exit code {ended.code}: {ended.last_lines}")
        run = Run(folder, ended)
        expect_on(run, bench.device)
        expect_close(bench, list_losses(run), reference, PRECISIONS["float32"][2], f"difference of run {number}")


@pytest.mark.gpu(seconds=180, tolerance=f"{RESUMED:g} (deterministic operations); on the CPU {TF32}")
def test_resume(bench: Bench) -> None:
    """A run that is stopped half way and resumed, on the same device and on the CPU, against one that is not."""
    words = ["tracking=none", "strategy=one_device", "hardware.deterministic=true", *bench.device.words()]
    model = [*MODELS["cnn"].overrides(bench, "cnn"), "training.steps_per_loop=10"]
    whole = bench.train([*model, *words, "training.max_steps=20"], "whole")
    expect_on(whole, bench.device)
    last = [whole.metric("test/loss")[-1]]
    for name, hardware, allowed in (
        ("difference", [], RESUMED),
        ("difference on the CPU", ["hardware=cpu"], PRECISIONS["tf32"][2]),
    ):
        folder = "resumed" + "-on-cpu" * bool(hardware)
        bench.train([*model, *words, "training.max_steps=10"], folder)
        run = bench.train([f"resume={bench.folder / folder}", "training.max_steps=20", *hardware], folder)
        ready = [event for event in run.events if event["event"] == "ready"][-1]
        expect(ready.get("resumed") == 10, f"the run was resumed at step {ready.get('resumed')}, expected 10")
        expect_close(bench, [run.metric("test/loss")[-1]], last, allowed, name)


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        pytest.param(model, precision, marks=pytest.mark.gpu(seconds=120, tolerance=allowed), id=f"export_{name}")
        for name, model, precision, allowed in (
            ("cnn", "cnn", "float32", TF32),
            ("resnet", "resnet", "float32", TF32),
            ("float16", "cnn", "mixed_float16", FLOAT16),
        )
    ],
)
def test_export(bench: Bench, model: str, precision: str) -> None:
    """Exports a model from the device, which compares the SavedModel there, and evaluates it again on the CPU."""
    words = [*MODELS[model].overrides(bench, model), "checkpoint=none", "strategy=one_device", *bench.device.words()]
    run = bench.train([*words, f"precision={precision}", f"training.max_steps={MODELS[model].steps}"])
    expect_on(run, bench.device)
    expect((run.folder / "model" / "saved_model").is_dir(), "there is no SavedModel")
    run_id = find_run_id(run)
    bench.run(["-m", "scaleflow", "evaluate", run_id, "hardware=cpu"])
    evaluated = [value for name, value in bench.read_store(run_id).items() if re.fullmatch(r"evaluate/.*/loss", name)]
    expect(bool(evaluated), "the evaluation has recorded no loss")
    allowed = PRECISIONS["tf32" if precision == "float32" else "float16"][2]
    expect_close(bench, evaluated, [run.metric("test/loss")[-1]], allowed)


@pytest.mark.gpu(seconds=120, tolerance=f"{PROBABILITY:g} of a probability (TF32)")
def test_predict(bench: Bench) -> None:
    """Predicts with the exported model on the device and on the CPU."""
    from sklearn.datasets import load_digits

    words = [*MODELS["digits"].overrides(bench, "digits"), "checkpoint=none", *bench.device.words()]
    run = bench.train([*words, "strategy=one_device", "training.epochs=2"])
    table = bench.folder / "digits.csv"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([f"p{number}" for number in range(64)])
        rows.writerows(load_digits().data[:500].tolist())
    found = []
    for name, hardware in (("device", bench.device.words()), ("cpu", ["hardware=cpu"])):
        output = bench.folder / f"{name}.csv"
        options = ["--input", str(table), "--output", str(output), "--probabilities"]
        bench.run(["-m", "scaleflow", "predict", find_run_id(run), *options, *hardware])
        found.append(read_probabilities(output))
    difference = max(abs(a - b) for a, b in zip(*found, strict=True))
    bench.values |= {"rows": 500, "difference": difference}
    expect(difference <= PROBABILITY, f"probabilities differ by {difference:.3g}, allowed is {PROBABILITY:g}")


def read_probabilities(table: Path) -> list[float]:
    """Returns all probabilities of a table of predictions."""
    with table.open(newline="") as file:
        return [float(cell) for row in csv.DictReader(file) for name, cell in row.items() if name.startswith("probab")]


def find_run_id(run: Run) -> str:
    """Returns the run's id in the store, which the command prints."""
    match = re.search(r"\(([0-9a-f]{32})\)", run.command.stdout)
    expect(match is not None, f"the command names no run: {run.command.last_lines}")
    return match[1] if match else ""


@pytest.mark.gpu(seconds=150, tolerance="the loss falls")
def test_parameter_server(bench: Bench) -> None:
    """Two workers that share a GPU, and a server without one. It is asynchronous, so there is no loss to compare."""
    words = [*MODELS["digits"].overrides(bench, "digits"), "tracking=none", "checkpoint=none", "training.epochs=3"]
    roles = ("strategy=parameter_server", "cluster.workers=2", "cluster.servers=1")
    run = bench.train([*words, *roles, *bench.device.words()], extra={"TF_CPP_MIN_LOG_LEVEL": "0"})
    expect_learned(run.metric("val/loss"))
    bench.values["val/loss"] = run.metric("val/loss")[-1]
    if bench.device.kind == "gpu":
        for log, has_gpu in (("worker-0.log", True), ("worker-1.log", True), ("server-0.log", False)):
            text = (run.folder / log).read_text(errors="replace")
            found = bool(re.search(r"device:GPU:\d+ with \d+ MB", text))
            expect(found == has_gpu, f"{log}: a GPU was {'not ' * has_gpu}used, expected the opposite")


@pytest.mark.gpu(seconds=120)
def test_refusals(bench: Bench) -> None:
    """What cannot work on this device is refused with exit code 2, and a way that works."""
    missing = bench.device.count if bench.device.kind == "gpu" else 1
    kind = bench.device.kind
    cases = {
        f"hardware.devices=[{missing}]: found": ([f"hardware={kind}", f"hardware.devices=[{missing}]"], True),
        "TensorFlow supports memory growth or a memory limit": (
            ["hardware=gpu", "hardware.memory_growth=true", "hardware.memory_limit_mb=512"],
            True,
        ),
        "each logical device of a GPU needs a memory limit": (["hardware=gpu", "hardware.logical_devices=2"], True),
        "only a GPU can have a memory limit": (["hardware=cpu", "hardware.memory_limit_mb=512"], True),
        "each worker needs its own GPU": (
            ["strategy=multi_worker", f"cluster.workers={missing + 1}", "hardware=gpu"],
            kind == "gpu",
        ),
        "hardware=gpu: TensorFlow finds no GPU": (["hardware=gpu"], kind == "cpu"),
    }
    visible = bench.device.environment(bench.device.count)
    for message, (words, applies) in cases.items():
        if applies:
            ended = bench.run(["-m", "scaleflow", "tracking=none", *words], code=2, extra=visible)
            expect(message in ended.stderr, f"{' '.join(words)}: expected '{message}', found: {ended.last_lines}")
    bench.values["refusals"] = sum(applies for _, applies in cases.values())


@pytest.mark.gpu(seconds=90, devices=2)
def test_devices(bench: Bench) -> None:
    """`hardware.devices` by index, on a machine with several GPUs: the last one, and all in reversed order."""
    count = bench.device.count
    if bench.device.kind == "cpu":
        pytest.skip("a machine has one physical CPU, whatever its number of logical ones")
    for name, indices in (("last", [count - 1]), ("reversed", [*reversed(range(count))])):
        words = [f"hardware.devices={indices}".replace(" ", ""), "strategy=mirrored"]
        run = train_model(bench, "digits", ["hardware=gpu", *words], name, bench.device.environment(count))
        expect_on(run, bench.device, replicas=len(indices))
    bench.values["GPUs"] = count
