"""`python -m scaleflow`."""

from scaleflow.command import end_with


def run_command() -> int:
    """Imports the command, which takes a third of a second, and runs it; returns its exit code."""
    from scaleflow.cli import main

    return main()


if __name__ == "__main__":
    end_with(run_command)
