"""`python -m drivetrain` is the `drivetrain` command; it works under any launcher."""

from drivetrain.cli import main

if __name__ == "__main__":
    main()
