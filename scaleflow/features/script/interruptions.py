"""Exceptions that end a script from within.

They are no `Exception`: a script that catches all exceptions does not catch them.
"""


class ScriptStopped(BaseException):
    """The run is asked to stop."""


class ScriptRefused(BaseException):
    """The script does something that the command does not allow. The text is for the user."""
