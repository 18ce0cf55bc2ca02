"""The `ropewalk` command. Nothing here imports torch until a command needs it."""

from __future__ import annotations

import time
from typing import Annotated

import typer

import ropewalk
from ropewalk.cli import bench, experiment
from ropewalk.cli.doctor import doctor
from ropewalk.cli.options import Option, command, user_errors

app = typer.Typer(
    help="Position encodings for transformers as fast, differentiable GPU kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.add_typer(bench.app, name="bench")
app.add_typer(experiment.app, name="experiment")
command(app, "demo", experiment.DEMO)(experiment.demo)
app.command()(doctor)
command(app, "report", bench.REPORT)(bench.report)

_ARCH = "A compute capability, as 90, 9.0 or sm_90; repeat for more. By default the visible GPUs'."
_BUILD: dict[str, Option] = {
    "arch": (list[str] | None, None, _ARCH),
    "force": (bool, False, "Compile in any case.", "--force"),
}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ropewalk {ropewalk.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Position encodings for transformers as fast, differentiable GPU kernels."""


@command(app, "build", _BUILD)
def build(arch: list[str] | None, force: bool) -> None:
    """Compile the native extension ahead of its first use."""
    from ropewalk.ops.rope.cuda import build as native_build

    with user_errors(native_build.BuildError):
        chosen = {native_build.parse_architecture(text) for text in arch or native_build.visible_architectures()}
        architectures = sorted(chosen, key=int)
        if not architectures:
            raise ValueError(
                "PyTorch finds no NVIDIA GPU of compute capability 8.0 or more: say with --arch which to compile for, "
                "as in --arch 90"
            )
        library = None if force else native_build.find_library(architectures)
        if library is not None:
            typer.echo("the native extension is there already; --force compiles it again")
        else:
            names = ", ".join(f"sm_{architecture}" for architecture in architectures)
            typer.echo(f"compiling the native extension for {names} ...")
            start = time.perf_counter()
            library = native_build.build(architectures, force=force)
            typer.echo(f"done in {time.perf_counter() - start:.1f} s")
        typer.echo(f"{library} ({library.stat().st_size / 2**20:.1f} MiB)")
