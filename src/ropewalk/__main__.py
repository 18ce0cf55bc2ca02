"""`ropewalk`, `python -m ropewalk` and `torchrun -m ropewalk`: the command, if the packages that it needs are there."""

import os
import sys
import warnings
from importlib.util import find_spec

NEEDED, NEEDED_BY_DOCTOR = ("typer", "rich"), ("torch",)


def main() -> None:
    """Run the command, or say in one line which extra has it; `doctor` needs none."""
    # Ropewalk needs no NumPy; torch warns where it is missing.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    is_doctor = sys.argv[1:] == ["doctor"]
    missing = [name for name in (NEEDED_BY_DOCTOR if is_doctor else NEEDED) if find_spec(name) is None]
    if missing:
        verb, package = "is" if len(missing) == 1 else "are", "torch" if is_doctor else "'ropewalk[bench]'"
        print(f"error: {' and '.join(missing)} {verb} not installed: pip install {package}", file=sys.stderr)
        raise SystemExit(2)
    if is_doctor:
        from ropewalk.doctor import doctor

        try:
            doctor()
            sys.stdout.flush()
        except BrokenPipeError:  # a reader like `head` has enough; what is left goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        return
    from ropewalk.cli import app

    app(prog_name="ropewalk")


if __name__ == "__main__":
    main()
