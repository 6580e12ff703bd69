"""What MLproject's entry points call: `python -m scaleflow.project main strategy=auto ... --overrides 'a=1 b=2'`.

MLflow gives every parameter, those that nobody has typed too. An option that is what config.yaml says anyway is left
away: typed, it would win over a recipe's (`-P experiment=...`). Then the command itself takes this process's place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from scaleflow.command import refuse

#: The words of each entry point's command, behind `python -m`.
COMMANDS: Mapping[str, Sequence[str]] = {
    "main": ("scaleflow",),
    "sweep": ("scaleflow", "-m"),
    "evaluate": ("scaleflow.evaluate",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Becomes the command; comes back only where there is none."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        os.execv(sys.executable, [sys.executable, "-m", *COMMANDS[words[0]], *drop_empty_words(words[1:])])
    return refuse(f"{' '.join(words[:1])}: expected one of {', '.join(COMMANDS)} first")


def drop_empty_words(words: Sequence[str]) -> list[str]:
    """The words without those that say nothing: `GROUP=DEFAULT`, and `KEY=`."""
    defaults = {f"{group}={option}" for group, option in default_options().items()}
    own = words.index("--overrides") if "--overrides" in words else len(words)
    kept = [word for word in words[:own] if word not in defaults and not word.endswith("=")]
    return [*kept, *(words[own:] if "".join(words[own + 1 :]).strip() else ())]


def default_options() -> dict[str, str]:
    """The option of each config group that config.yaml chooses; `null` for none."""
    listed = OmegaConf.load(Path(__file__).with_name("conf") / "config.yaml").defaults
    chosen = [dict(entry) for entry in listed if isinstance(entry, DictConfig)]
    options = {str(group): option for entry in chosen for group, option in entry.items()}
    return {
        group: "null" if option is None else str(option)
        for group, option in options.items()
        if not group.startswith("override ")
    }


if __name__ == "__main__":
    sys.exit(main())
