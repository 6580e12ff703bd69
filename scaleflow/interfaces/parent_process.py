"""Ends a process when its parent process ends."""

import ctypes
import sys

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def end_with_parent(number: int) -> None:
    """Makes the kernel send this process a signal when its parent ends; 0 for none. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
