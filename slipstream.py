"""The entry of the command `slipstream` and of Ray's workers: puts Slipstream's packages before the user's.

`pipeline`, `jobs` and `configs` are common names of folders, and the current folder or `PYTHONPATH` may have them too.
"""

import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)


def own_first() -> None:
    """Make Python look for packages in this file's folder first."""
    sys.path[:] = [HERE, *(folder for folder in sys.path if folder != HERE)]


def main() -> int:
    """Run the job that the command line names; returns the exit code."""
    own_first()
    from jobs.__main__ import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
