"""The documentation's pages: their code blocks, links, shell lines, and the commands that those name."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(?P<title>.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text without indentation, and the line of the page that it begins on."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order; those in tabs and admonitions too."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], textwrap.dedent(found["text"]), text.count("\n", 0, found.start()) + 2)
        for found in _FENCE.finditer(text)
    ]


def shell_lines(page: Path) -> Iterator[list[str]]:
    """The words of each line that calls `ropewalk`, in blocks that are not Python and between backticks.

    Lines that end in a backslash go on; what follows a # is a comment; `…` stands for arguments of the reader's.
    """
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(page) if block.language != "python" for line in _joined(block.text)]
    lines += re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))
    for line in lines:
        line = re.sub(r"^(- )?(run: )?(\$ )?([A-Z_]+=\S+ +)*", "", line.strip())
        line = re.sub(r"^(torchrun( --\S+( \d+)?)* -m|python -m|\.venv/bin/python -m) (?=ropewalk\b)", "", line)
        if re.match(r"ropewalk( |$)", line):
            yield shlex.split(line, comments=True)[1:]


def _joined(text: str) -> list[str]:
    return re.sub(r"\\\n\s*", "", text).splitlines()


def check_command(command: Any, words: list[str]) -> str | None:
    """Say what in a call of a click command does not exist; None where all does."""
    path = [command.name or "ropewalk"]
    rest = list(words)
    while rest and hasattr(command, "commands"):
        names = rest[0].split("|")  # “bench rope|attention”
        if names[0].startswith("-"):
            break
        missing = [name for name in names if name not in command.commands]
        if missing:
            return f"{' '.join(path)} has no command {missing[0]}; there are {', '.join(command.commands)}"
        path.append(names[0])
        command = command.commands[names[0]]
        rest = rest[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help"}
    for word in rest:
        if word.startswith("-") and word.strip("[]").split("=")[0] not in known:
            return f"{' '.join(path)} has no option {word}; there are {', '.join(sorted(known))}"
    return None


def links(page: Path) -> Iterator[str]:
    """The targets of a page's links and figures, outside its code."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))
    for found in _LINK.finditer(text):
        yield found["target"]


def check_link(page: Path, target: str) -> str | None:
    """Say what is wrong with a link to a file of this repository; None where nothing is, or it leads elsewhere."""
    if re.match(r"[a-z]+:", target):
        return None
    name, _, anchor = target.partition("#")
    in_site = ROOT / "docs" in page.parents
    place = (page.parent / name).resolve() if name else page
    if not place.exists():
        return f"{target} does not exist"
    if in_site and not {ROOT / "docs", ROOT / "results"} & {place, *place.parents}:
        return f"{target} is outside of docs and results, and not on the site: link to the repository, or name the file"
    if anchor and place.suffix == ".md" and anchor not in _anchors(place):
        return f"{place.name} has no heading {anchor}"
    return None


def cut_items(text: str) -> Iterator[str]:
    """The items of numbered lists that go on counting after a paragraph or a block: the site begins them at 1."""
    in_list = False
    for line in _FENCE.sub(lambda fence: f"{fence['indent']}```", text).splitlines():
        item = re.match(r"(\d+)\. ", line)
        if item and item[1] != "1" and not in_list:
            yield line
        if line.strip():
            in_list = bool(item) or (in_list and line.startswith(" "))


def _anchors(page: Path) -> set[str]:
    titles = (found["title"] for found in _HEADING.finditer(_FENCE.sub("", page.read_text(encoding="utf-8"))))
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}
