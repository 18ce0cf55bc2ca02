"""The names of commands and options, which scripts of users hold. `bench` and `report` are in their own tests."""

from typing import Any

import typer

from ropewalk.cli import app

OPTIONS = {
    "doctor": "",
    "build": "--arch --force",
    "demo": "--device --figure --seed --steps --text",
    "experiment length-extrapolation": "--device --figure --lengths --output --seed --steps --text --train-length -o",
    "experiment bert-positions": "--config --corpus --dataset --device --jobs --output --preset --record --resume "
    "--schemes --seeds --steps -o",
}


def options_of(command: Any, name: str = "") -> dict[str, str]:
    if hasattr(command, "commands"):
        found = [options_of(inner, f"{name} {key}".strip()) for key, inner in command.commands.items()]
        return {key: options for part in found for key, options in part.items()}
    return {name: " ".join(sorted(option for parameter in command.params for option in parameter.opts))}


def test_commands_and_options_are_those_that_were() -> None:
    found = options_of(typer.main.get_command(app))
    assert {name: options for name, options in found.items() if name.split()[0] not in ("bench", "report")} == OPTIONS
    assert {"report", "bench rope", "bench attention", "bench training", "bench all"} <= set(found)
