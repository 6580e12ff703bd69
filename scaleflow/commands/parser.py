"""The parser of a command."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NoReturn

from scaleflow.config.parse import suggest
from scaleflow.errors import ConfigError
from scaleflow.interfaces import name_command
from scaleflow.interfaces.formatting import GENERATOR
from scaleflow.launcher.answer import JSON, print_refusal


class CommandParser(argparse.ArgumentParser):
    """The parser of the command `scaleflow NAME`; its page of help is `about`."""

    def __init__(self, name: str, about: str | None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(f"scaleflow {name}", description=about, formatter_class=form, allow_abbrev=False)
        self.name = name
        self.add_argument(JSON, action="store_true", help="print one JSON object as the last line of standard output")

    def error(self, message: str) -> NoReturn:
        """Ends the command with exit code 2 and one line, which names what was meant."""
        if message.startswith("unrecognized arguments: "):
            word = message.split()[2]
            flags = [*re.findall(r"--[\w-]+", self.format_usage()), "--help"]
            message = f"{word}: there is no such flag{suggest(word, flags, '')} ({', '.join(flags)})"
        elif message.startswith("the following arguments are required: "):
            needed = [action for action in self._actions if action.required and action.dest != "overrides"]
            words = [" ".join([*action.option_strings[:1], str(action.metavar or action.dest)]) for action in needed]
            message = f"{message}; type {name_command(self.name)} {' '.join(words)}"
        self.exit(print_refusal(message.removesuffix(", KEY=VALUE")))  # argparse says so of words that may be absent

    def add_overrides(self, about: str) -> None:
        """Adds the overrides of a config, and the folders with the user's own options."""
        self.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=about)
        self.add_repeated("--config-dir", "DIR", "a folder with your own config options")

    def add_repeated(self, flag: str, metavar: str, about: str) -> None:
        about = f"{about}; repeat the flag for several"
        self.add_argument(flag, action="append", default=[], metavar=metavar, help=about)


def check_page(flag: str, path: Path) -> None:
    """Raises ConfigError if a page cannot be written to a path, or if another program's file is there."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; create it first")
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a folder; name a file, such as {path / 'page.html'}")
    if path.exists() and GENERATOR.encode() not in path.read_bytes()[:1000]:
        raise ConfigError(f"{flag} {path}: this file is no page of scaleflow's; delete it, or name another one")
