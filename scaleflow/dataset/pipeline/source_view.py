"""A source that gives the examples of another one in another form."""

from __future__ import annotations

from typing import Any

from scaleflow.interfaces import Source


class SourceView:
    """Base of sources that change what another source gives; whatever they do not define is that of the other one.

    Attributes:
        source: the other source.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["source"], name)


def find_original(source: Any) -> Any:
    """Returns the source that the user names, of which a source may be a view."""
    return find_original(source.source) if isinstance(source, SourceView) else source
