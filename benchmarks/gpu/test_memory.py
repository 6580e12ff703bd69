"""Whether the memory of a GPU is used as `hardware` says, and what happens if it is not enough."""

from __future__ import annotations

import re

import pytest

from benchmarks.gpu.bench import Bench, expect, expect_learned, expect_on
from benchmarks.gpu.device import sample_memory
from benchmarks.gpu.models import PLAIN, train_model, write_corpus

MIB = 1 << 20

#: The share of the GPU's memory that a small run takes at most with growth, and at least without it.
GROWN, TAKEN = 0.25, 0.5

#: MiB that a process takes on a GPU besides TensorFlow's memory: CUDA's context, cuBLAS, cuDNN.
CONTEXT_MB = 2048

#: The memory limit of runs that use it up, and how often the advice may have to be followed.
LIMIT_MB, ATTEMPTS = 1024, 5

#: Bytes of a synthetic image of 64 x 64 pixels in float32.
IMAGE_BYTES = 64 * 64 * 3 * 4


@pytest.mark.gpu(
    seconds=120,
    tolerance=f"with growth at most {GROWN:.0%} of the GPU's memory, without at least {TAKEN:.0%}",
    only_gpu=True,
)
def test_growth(bench: Bench) -> None:
    """The memory in use on the GPU while a small run trains with and without memory growth."""
    used = {}
    for growth in ("true", "false"):
        with sample_memory(bench.device) as samples:
            words = ["hardware=gpu", f"hardware.memory_growth={growth}"]
            expect_on(train_model(bench, "digits", words, f"growth-{growth}"), bench.device)
        if not samples or not bench.device.memory_mb:
            pytest.skip("nvidia-smi does not report the memory in use, as on a part of a GPU (MIG)")
        used[growth] = max(samples) - samples[0]
        bench.values[f"MiB, memory_growth={growth}"] = used[growth]
    total = bench.device.memory_mb
    expect(used["true"] <= GROWN * total, f"with growth a small run takes {used['true']} of {total} MiB")
    expect(used["false"] >= TAKEN * total, f"without growth a run takes only {used['false']} of {total} MiB")


@pytest.mark.gpu(seconds=60, tolerance=f"{LIMIT_MB} MiB; the process {CONTEXT_MB} MiB more", only_gpu=True)
def test_limit(bench: Bench) -> None:
    """A run with a memory limit takes no more than that, and what CUDA itself needs."""
    with sample_memory(bench.device) as samples:
        run = train_model(bench, "cnn", bench.device.words(limit_mb=LIMIT_MB), "run")
    expect_on(run, bench.device)
    peak = max(run.metric("perf/peak_device_mb"))
    bench.values["perf/peak_device_mb"] = peak
    expect(0 < peak <= LIMIT_MB, f"perf/peak_device_mb is {peak:.0f}, the limit is {LIMIT_MB}")
    if samples:
        used = max(samples) - samples[0]
        bench.values["MiB in use"] = used
        expect(used <= LIMIT_MB + CONTEXT_MB, f"the process takes {used} MiB, the limit is {LIMIT_MB}")


@pytest.mark.gpu(seconds=180, tolerance=f"at most {ATTEMPTS - 1} times advice", only_gpu=True)
def test_out_of_memory(bench: Bench) -> None:
    """A batch that is too large ends the run with advice. The advised words make the same global batch fit."""
    size = 32768
    words = [
        *(*PLAIN, "dataset=synthetic", "dataset.shape=[64]", "dataset.validation=null", "dataset.examples=40960"),
        *("model=mlp", "model.units=[4096,4096]", "training.max_steps=3", *bench.device.words(limit_mb=LIMIT_MB)),
    ]
    batch = [f"training.batch_size={size}"]
    for attempt in range(ATTEMPTS):
        ended = bench.wait(
            bench.start(["-m", "scaleflow", *words, *batch, f"hydra.run.dir={bench.folder / str(attempt)}"])
        )
        if ended.code == 0:
            break
        advice = re.search(r"out of memory on GPU:0.*; ((?:\S+=\S+ )+)(?:or |gives the same)", ended.stderr)
        expect(ended.code == 1 and advice is not None, f"exit code {ended.code}: {ended.last_lines}")
        batch = advice[1].split() if advice else []
    bench.values |= {"attempts": attempt, "batch that fits": " ".join(batch)}
    expect(ended.code == 0, f"the advised words do not fit either: {' '.join(batch)}")
    expect(attempt > 0, f"a batch of {size} fits into {LIMIT_MB} MiB, so nothing was tested")


@pytest.mark.gpu(seconds=120, tolerance="the limit")
def test_in_memory_data(bench: Bench) -> None:
    """Data in memory: a small split is copied to the GPU, one that is larger than its memory is not."""
    limit = LIMIT_MB if bench.device.kind == "gpu" else 8  # on a CPU only the size of the data
    peaks = []
    for name, megabytes in (("small", limit // 8), ("large", 3 * limit // 2)):
        examples = megabytes * MIB // IMAGE_BYTES * 5 // 4
        words = [
            *(*PLAIN, "dataset=synthetic", "dataset.shape=[64,64,3]", f"dataset.examples={examples}"),
            "dataset.validation=null",
            *(
                "model=linear",
                "optimizer.learning_rate=0.00003",
                "training.max_steps=20",
                *bench.device.words(limit_mb=limit),
            ),
        ]
        run = bench.train(words, name)
        expect_on(run, bench.device)
        expect_learned(run.metric("train/loss"))
        if bench.device.kind == "gpu":
            peaks.append(run.metric("perf/peak_device_mb")[-1])
            bench.values[f"peak with {megabytes} MiB of data"] = peaks[-1]
    if peaks:
        expect(peaks[0] >= limit // 8, f"data of {limit // 8} MiB are not on the GPU: its peak is {peaks[0]:.0f} MiB")
        expect(peaks[1] <= limit, f"the peak is {peaks[1]:.0f} MiB, the limit is {limit}")


@pytest.mark.gpu(seconds=90, tolerance=f"{LIMIT_MB} MiB, as training", only_gpu=True)
def test_evaluation(bench: Bench) -> None:
    """A GPT whose training with two examples at once fits. An evaluation with many would need much more."""
    data = bench.folder / "data"
    data.mkdir()
    write_corpus(data)
    size = ("model.width=256", "model.blocks=2", "dataset.tokens=512", "training.batch_size=2")
    files = (f"dataset.data_dir={data}", f"dataset.cache_dir={data}")
    plain = ("tracking=none", "checkpoint=none", "strategy=one_device", "training.max_steps=3")
    run = bench.train(["experiment=gpt_bytes", *files, *size, *plain, *bench.device.words(limit_mb=LIMIT_MB)])
    expect_on(run, bench.device)
    bench.values["test/loss"] = run.metric("test/loss")[-1]


@pytest.mark.gpu(seconds=90, tolerance="it grows with the batch", only_gpu=True)
def test_peak(bench: Bench) -> None:
    """`perf/peak_device_mb` is recorded, and grows with the batch."""
    peaks = []
    for size in (32, 1024):
        run = train_model(bench, "cnn", [*bench.device.words(), f"training.batch_size={size}"], f"batch-{size}")
        peaks.append(run.metric("perf/peak_device_mb")[-1])
        bench.values[f"MiB, batch {size}"] = peaks[-1]
    expect(0 < peaks[0] < peaks[1], f"the peaks are {peaks}")
