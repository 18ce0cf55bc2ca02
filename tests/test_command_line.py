"""The names of commands and options, which scripts of users hold."""

import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ropewalk import cli
from ropewalk.cli import app, bench
from ropewalk.experiments.bert_positions.config import PRESETS, SCHEMES
from ropewalk.experiments.gallery import PICTURES, RELATIVE

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


def test_each_option_has_a_sentence() -> None:
    tables = (cli._DEMO, cli._DRAW, cli._EXTRAPOLATION, cli._POSITIONS, cli._BUILD, bench.OPTIONS, bench.REPORT)
    sentences = [text for table in (*tables, bench._COMPARE) for _, _, text, *_ in table.values()]
    assert len(sentences) > 40
    for text in sentences:
        assert text.endswith("."), text
        assert not re.match(r"(What|Of|By|Which|How|Where)\b", text), text
        assert not re.search(r"\. (What|Of|By|Which|How|Where)\b", text), text


def pages_of_help(command: Any, *path: str) -> list[tuple[tuple[str, ...], Any]]:
    inner = [page for key, each in getattr(command, "commands", {}).items() for page in pages_of_help(each, *path, key)]
    return [(path, command), *inner]


@pytest.mark.parametrize(("path", "command"), pages_of_help(typer.main.get_command(app)), ids=str)
def test_the_help_prints_each_extra(path: tuple[str, ...], command: Any) -> None:
    """What is between brackets would be markup to rich."""
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "400"})
    printed = " ".join(result.stdout.split())
    assert "extra ." not in printed
    assert "\\[" not in printed
    texts = [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]
    assert all(name in printed for text in texts for name in re.findall(r"\[[a-z]+\]", text))


def test_the_extra_of_bert_positions_is_in_its_help() -> None:
    for path in ([], ["experiment"], ["experiment", "bert-positions"]):
        printed = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "400"}).stdout
        assert "extra [train]." in " ".join(printed.split()), path


def test_the_help_lists_what_there_is() -> None:
    for name in (*PICTURES, RELATIVE):
        assert re.search(rf"(^|[ ,]){name}[,;]", cli._GALLERY), name
    for name in SCHEMES:
        assert f" {name}: " in cli._SCHEMES, name
    presets = cli._POSITIONS["preset"][2]
    assert all(name in presets for name in PRESETS)
