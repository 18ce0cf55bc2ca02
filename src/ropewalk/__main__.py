"""`python -m ropewalk` and `torchrun -m ropewalk`: the `ropewalk` command."""

from ropewalk.cli import app

if __name__ == "__main__":
    app(prog_name="ropewalk")
