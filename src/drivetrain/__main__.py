"""`python -m drivetrain` is the `drivetrain` command; it works under any launcher."""

import os
import sys

if __name__ == "__main__":
    if sys.path and sys.path[0] in ("", os.getcwd()):
        sys.path.pop(0)  # python -m puts it there; no module of the current folder shall shadow another's

    from drivetrain.cli import main

    main()
