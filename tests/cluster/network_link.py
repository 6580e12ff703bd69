"""A slow cable, for kernels that have no netem: `python -m tests.cluster.network_link TAP TAP SECONDS
BYTES_PER_SECOND LOSS`.

Makes two TAP devices in the network namespace that it runs in, says so, and hands on each frame that one of them is
given to the other, so much later and no more in a second, until its standard input ends. Of each way the part LOSS of
the frames is lost, drawn with a fixed seed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

#: From <linux/if_tun.h>: makes a device of Ethernet frames, without a header of its own.
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000

#: Longest frame that is handed on.
LONGEST = 1 << 16


class Way:
    """One of the two directions.

    Args:
        source, target: descriptors of the devices.
        delay: seconds that a frame takes to the other end.
        rate: bytes in a second; frames wait for those before them.
        loss: the part of the frames that is lost.
    """

    def __init__(self, source: int, target: int, delay: float, rate: float, loss: float) -> None:
        self.source, self._target, self._delay, self._rate = source, target, delay, rate
        self._on_its_way: deque[tuple[float, bytes]] = deque()
        self._is_free = 0.0
        self._loss, self._random = loss, random.Random(0)

    def take(self) -> None:
        frame = os.read(self.source, LONGEST)
        self._is_free = max(time.monotonic(), self._is_free) + len(frame) / self._rate
        if self._random.random() < self._loss:
            return
        self._on_its_way.append((self._is_free + self._delay, frame))

    def give(self) -> float | None:
        """Hands on what has arrived; gives for how many seconds there is nothing to do, None for as long as it is."""
        while self._on_its_way:
            left = self._on_its_way[0][0] - time.monotonic()
            if left > 0:
                return left
            frame = self._on_its_way.popleft()[1]
            with contextlib.suppress(OSError):  # a device that is not up yet takes none
                os.write(self._target, frame)
        return None


def tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def main() -> None:
    one, other = map(tap, sys.argv[1:3])
    delay, rate, loss = map(float, sys.argv[3:6])
    ways = [Way(one, other, delay, rate, loss), Way(other, one, delay, rate, loss)]
    print("ready", flush=True)
    while True:
        waits = [seconds for way in ways if (seconds := way.give()) is not None]
        readable, _, _ = select.select([0, one, other], [], [], min(waits, default=None))
        if 0 in readable:
            return
        for way in ways:
            if way.source in readable:
                way.take()


if __name__ == "__main__":
    main()
