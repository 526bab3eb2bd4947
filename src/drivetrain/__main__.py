"""`python -m drivetrain` is the `drivetrain` command; it works under any launcher."""

import os
import sys

if __name__ == "__main__":
    if sys.path and sys.path[0] in ("", os.getcwd()):
        sys.path.pop(0)  # `python -m` adds the current folder, whose modules could shadow installed ones

    from drivetrain.cli import main

    main()
