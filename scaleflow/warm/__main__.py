"""`python -m scaleflow.warm`."""

from scaleflow.__main__ import entry

if __name__ == "__main__":
    entry("warm")
