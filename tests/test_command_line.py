"""The names of commands and options, which scripts of users hold."""

from typing import Any

import typer

from ropewalk.cli import app

RUN = "--device --output --peers --resume --rounds --list -o"
CHOSEN = f"{RUN} --case --dtype --impl"
OPTIONS = {
    "bench rope": f"{CHOSEN} --mode --only --sweep",
    "bench attention": f"{CHOSEN} --mode --protocol",
    "bench host": f"{CHOSEN} --mode",
    "bench all": CHOSEN,
    "bench training": "--case --device --list --output --precision --rounds -o",
    "bench parallel": f"{RUN} --only --processes --quick",
    "bench compare": "--all --relative --threshold after before",
    "report": "--force --output -o records",
    "doctor": "",
    "draw": "--causal --head --heads --output --tokens --window -o name",
    "build": "--arch --force",
    "demo": "--device --figure --seed --steps --text",
    "experiment length-extrapolation": "--device --figure --lengths --output --preset --seed --steps --text "
    "--train-length -o",
    "experiment bert-positions": "--config --corpus --dataset --device --jobs --output --preset --record --resume "
    "--schemes --seeds --steps -o",
}


def options_of(command: Any, name: str = "") -> dict[str, set[str]]:
    if hasattr(command, "commands"):
        found = [options_of(inner, f"{name} {key}".strip()) for key, inner in command.commands.items()]
        return {key: options for part in found for key, options in part.items()}
    return {name: {option for parameter in command.params for option in parameter.opts}}


def test_commands_and_options_are_those_that_were() -> None:
    found = options_of(typer.main.get_command(app))
    assert found == {name: set(options.split()) for name, options in OPTIONS.items()}
