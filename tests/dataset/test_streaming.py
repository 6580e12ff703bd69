"""Files that are larger than the memory a run may take: they are counted, checked and read as a stream."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces import Batching
from tests.dataset.files import options
from tests.dataset.reading import spread_over
from tests.dataset.test_tfrecord import example, written

MEGABYTE = 1 << 20

#: The size of the files, and how far the peak of the resident memory may rise while they are read once. What is read
#: ahead depends on how fast who reads is: most often it rises by 100 MB, beside other work by 200.
LARGE, GROWTH = 960 * MEGABYTE, 320 * MEGABYTE


def peak() -> int:
    """The peak of this process's resident memory, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def growth(work: Callable[[], int]) -> tuple[int, int]:
    """(what the work returns, how far the peak has risen during it)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    found = work()
    return found, peak() - before


def examples_read(make: Callable[[], Any], steps: int | None = None) -> int:
    """How many examples a feed gives, in one epoch or the first steps of it."""
    from scaleflow import dataset

    strategy = spread_over(1)
    splits = dataset.prepare_splits(make(), options(cache="none", shuffle=64), 0)
    feed = dataset.make_feed(splits.train, Batching(32, 1, 1), strategy, 0, transforms=splits.transforms, buffer=64)
    return sum(int(mask.numpy().sum()) for *_, mask in feed.batches(1, steps or feed.batching.steps(feed.examples)))


def tfrecords(base: Path) -> tuple[int, int, int]:
    """(bytes on disk, examples read in an epoch, growth)."""
    from scaleflow.dataset.tfrecord import TFRecord

    record = example(pixels=bytes(256 << 10), label=1)
    half = [record] * (LARGE // len(record) // 2)
    size = sum(written(base / f"{n}.tfrecord", half).stat().st_size for n in range(2))
    features = {"pixels": {"kind": "raw", "shape": [512, 512]}, "label": {"dtype": "int64"}}
    return size, *growth(
        lambda: examples_read(lambda: TFRecord(str(base), features, "pixels", "label", classes=2, test=0))
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of the memory is asked of Linux")
def test_files_of_any_size_are_read_in_little_memory(isolated: Callable[..., Any], tmp_path: Path) -> None:
    try:
        size, count, grown = isolated(tfrecords, tmp_path)
    finally:
        for path in tmp_path.iterdir():
            path.unlink()
    assert size > 0.9 * LARGE
    assert count == size // (256 << 10)
    assert grown < GROWTH
