"""Build the wheel and the source distribution of what git tracks: `make dist`.

`make dist URL=https://…` is for a package index: the metadata names that repository, and README's links and figures
lead to its commit, since an index has no files beside the page.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def absolute_links(text: str, url: str, commit: str) -> str:
    """Return a page whose links and figures of the repository are absolute; its code stays."""

    def replace(link: re.Match[str]) -> str:
        target = link["target"]
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({url}/{kind}/{commit}/{target})"

    parts = _FENCED.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)


def with_urls(pyproject: str, url: str) -> str:
    """Return pyproject.toml with the project's URLs."""
    urls = {
        "Repository": url,
        "Documentation": f"{url}/blob/HEAD/docs/index.md",
        "Changelog": f"{url}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    lines = "".join(f'{name} = "{target}"\n' for name, target in urls.items())
    return pyproject.replace("[project.scripts]\n", f"[project.urls]\n{lines}\n[project.scripts]\n", 1)


def copy_tracked(target: Path) -> None:
    """Copy what git tracks, as it is in the work tree."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())


def build(output: Path, url: str | None) -> None:
    """Build both distributions into `output`, with the packages that are here."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_tracked(copy)
        if url is None:
            print("no URL: README's links lead nowhere on a package index; make dist URL=https://… writes them")
        else:
            of_head = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
            head = subprocess.run(of_head, capture_output=True, text=True, check=True)
            readme, pyproject = copy / "README.md", copy / "pyproject.toml"
            text = absolute_links(readme.read_text(encoding="utf-8"), url, head.stdout.strip())
            readme.write_text(text, encoding="utf-8")
            pyproject.write_text(with_urls(pyproject.read_text(encoding="utf-8"), url), encoding="utf-8")
        subprocess.run([*command, str(copy)], check=True)


def main() -> None:
    """Read the command's arguments and build."""
    parser = argparse.ArgumentParser(description="Build the wheel and the source distribution.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="the folder of both")
    parser.add_argument("--url", default="", help="the repository's page, as https://example.org/ropewalk")
    arguments = parser.parse_args()
    url = arguments.url.rstrip("/")
    if url and not re.match(r"https?://[^/]", url):
        parser.error(f"--url is {url!r}, but must begin with https:// or http://")
    build(arguments.output, url or None)


if __name__ == "__main__":
    main()
