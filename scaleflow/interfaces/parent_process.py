"""Ties the life of a process to that of the process that started it."""

import ctypes
import sys

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def end_with_parent(number: int) -> None:
    """Makes the kernel send this process a signal when its parent ends; 0 for none. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
