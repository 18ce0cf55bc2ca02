"""`ropewalk`, `python -m ropewalk` and `torchrun -m ropewalk`: the command, if the packages that it needs are there."""

import sys
import warnings
from importlib.util import find_spec

NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command, or say in one line which extra has it."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        print(f"error: {' and '.join(missing)} {verb} not installed: pip install 'ropewalk[bench]'", file=sys.stderr)
        raise SystemExit(2)
    # Ropewalk needs no NumPy; torch warns where it is missing.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    from ropewalk.cli import app

    app(prog_name="ropewalk")


if __name__ == "__main__":
    main()
