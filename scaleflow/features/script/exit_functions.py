"""Runs the functions that a script registers with `atexit`. The worker itself ends without them."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


class ExitFunctions:
    """The functions that a script has registered with `atexit`.

    Args:
        is_own_file: returns whether a file is the user's. What libraries register does not run: the process goes on.
    """

    def __init__(self, is_own_file: Callable[[str], bool]) -> None:
        self._is_own_file = is_own_file
        self._registered: list[tuple[Any, Callable[[], Any]]] = []

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Replaces the functions of `atexit` inside the `with` block."""
        module: Any = atexit
        register = atexit.register
        unregister = atexit.unregister

        def register_own(function: Any, *arguments: Any, **named: Any) -> Any:
            frame = inspect.currentframe()
            caller = frame.f_back if frame is not None else None
            if caller is None or not self._is_own_file(caller.f_code.co_filename):
                return register(function, *arguments, **named)
            self._registered.append((function, partial(function, *arguments, **named)))
            return function

        def unregister_own(function: Any) -> None:
            unregister(function)
            self._registered = [each for each in self._registered if each[0] != function]

        module.register = register_own
        module.unregister = unregister_own
        try:
            yield
        finally:
            module.register = register
            module.unregister = unregister

    def run(self) -> None:
        """Calls the functions, the last one first. Prints their exceptions, as Python does."""
        while self._registered:
            _, call = self._registered.pop()
            try:
                call()
            except BaseException:
                traceback.print_exc()
