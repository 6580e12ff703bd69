"""Private names of Python's standard library."""

from atexit import _run_exitfuncs as run_exit_functions  # before `os._exit`, which leaves out the teardown of modules
from operator import attrgetter
from subprocess import _args_from_interpreter_flags as list_flags  # type: ignore[attr-defined]  # such as -O
from threading import _shutdown as join_threads  # type: ignore[attr-defined]  # as an interpreter does at its end

#: Returns the arguments of an `argparse` parser, for a message about missing ones.
list_arguments = attrgetter("_actions")
