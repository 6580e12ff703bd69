"""`python -m scaleflow.warm`."""

from scaleflow.commands.process import end_with
from scaleflow.warm.command import main

if __name__ == "__main__":
    end_with(main)
