import sys

from scaleflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
