"""`python -m dovetail` is the command `dovetail`."""

from dovetail.cli import main

if __name__ == "__main__":
    main()
