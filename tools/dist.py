"""Build the wheel and the source distribution of what git tracks: `make dist`.

With the repository's URL, which pyproject.toml or `make dist URL=https://…` has, they are for a package index: the
metadata names it, and README's links and figures lead to its commit, since an index has no files beside the page.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import project

ROOT = Path(__file__).parents[1]
_BADGE = re.compile(r"\[!\[([^\]]*)\]\([^)\s]+\.svg\)\]\(")
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def absolute_links(text: str, url: str, commit: str) -> str:
    """Return a page whose links and figures of the repository are absolute; its code stays, its badges become text."""

    def replace(link: re.Match[str]) -> str:
        target = link["target"]
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({url}/{kind}/{commit}/{target})"

    parts = _FENCED.split(text)
    return "".join(x if x.startswith("```") else _LINK.sub(replace, _BADGE.sub(r"[\1](", x)) for x in parts)


def copy_tracked(target: Path) -> None:
    """Copy what git tracks, as it is in the work tree."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())


def is_dirty() -> bool:
    """Whether tracked files differ from HEAD's commit."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]
    return bool(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def build(output: Path, url: str | None) -> None:
    """Build both distributions into `output` with the packages that are here; a URL goes before pyproject.toml's."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_tracked(copy)
        project.write(copy, url)
        if not (shown := project.read_project(copy).url):
            print("no URL: README's links lead nowhere on a package index; make dist URL=https://… writes them")
        else:
            of_head = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
            head = subprocess.run(of_head, capture_output=True, text=True, check=True)
            readme = copy / "README.md"
            text = absolute_links(readme.read_text(encoding="utf-8"), shown, head.stdout.strip())
            readme.write_text(text, encoding="utf-8")
            if is_dirty():
                print("tracked files differ from HEAD, to whose commit README's links lead: commit them first")
        subprocess.run([*command, str(copy)], check=True)


def main() -> None:
    """Read the command's arguments and build."""
    parser = argparse.ArgumentParser(description="Build the wheel and the source distribution.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="the folder of both")
    parser.add_argument("--url", help="the repository's page, in place of that of pyproject.toml")
    arguments = parser.parse_args()
    build(arguments.output, arguments.url)


if __name__ == "__main__":
    main()
