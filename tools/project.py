"""Write what the project says of itself: badges, CITATION.cff, BibTeX, and the repository's URL wherever it is shown.

All comes from pyproject.toml and `ropewalk.__version__`. The URL is `url` of `[tool.ropewalk]`: while it is empty,
nothing shows one. `make url URL=https://…` sets it, and the same command writes all again after any other change.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
BADGES = "docs/badges"
# Pages whose first `pip install .` gets a line with the URL above it.
INSTALLS = ("README.md", "docs/index.md", "docs/quickstart.md", "docs/platforms.md")
_URL = re.compile(r'^url = ".*"', re.MULTILINE)
# Letters that mean nothing in TOML, YAML, BibTeX, Markdown and a shell: a host without a user, and a path.
_PAGE = re.compile(r"https?://[a-z0-9.-]+(?::[0-9]+)?(?:/[a-z0-9._~+-]+)+/?", re.IGNORECASE | re.ASCII)
_WIDTHS = {**dict.fromkeys("fijlrtI.,: ", 4.0), **dict.fromkeys("mwMW", 10.0)}  # of letters, in pixels; others have 6.7


class Project(NamedTuple):
    """The fields of pyproject.toml that other files show."""

    name: str
    version: str
    title: str
    license: str
    keywords: tuple[str, ...]
    authors: tuple[str, ...]
    year: str
    requires: dict[str, str]  # Python and the packages that all need, with their least versions
    url: str


def read_project(root: Path) -> Project:
    """Read pyproject.toml, the version and the year of the licence."""
    parsed: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    project = parsed["project"]
    init, terms = ((root / name).read_text(encoding="utf-8") for name in ("src/ropewalk/__init__.py", "LICENSE"))
    least = re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(project["dependencies"]), re.MULTILINE)
    return Project(
        name=project["name"],
        version=_found(r'^__version__ = "(.+)"', init),
        title=project["description"],
        license=project["license"],
        keywords=tuple(project["keywords"]),
        authors=tuple(author["name"] for author in project["authors"]),
        year=_found(r"Copyright.*?(\d{4})", terms),
        requires={"python": project["requires-python"].removeprefix(">="), **dict(least)},
        url=parsed["tool"]["ropewalk"]["url"],
    )


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"no text matches {pattern}")
    return found[1]


# The files that are written from nothing.


def citation(project: Project) -> str:
    """Return CITATION.cff."""
    lines = [
        "cff-version: 1.2.0",
        f"message: To cite {project.name.capitalize()}, use these lines, and name the commit of what you measured.",
        "type: software",
        f'title: "{project.name.capitalize()}: {project.title}"',
        "authors:",
        *(f"  - name: {author}" for author in project.authors),
        f"version: {project.version}",
        f"license: {project.license}",
        *([f"repository-code: {project.url}"] if project.url else []),
        "keywords:",
        *(f"  - {keyword}" for keyword in project.keywords),
    ]
    return "\n".join(lines) + "\n"


def bibtex(project: Project) -> str:
    """Return the entry of versions.md."""
    fields = {
        "author": " and ".join(f"{{{author}}}" for author in project.authors),
        "title": f"{{{project.name.capitalize()}: {project.title}}}",
        "year": project.year,
        "version": project.version,
        **({"url": project.url} if project.url else {}),
    }
    lines = "".join(f"  {key:<7} = {{{value}}},\n" for key, value in fields.items())
    return f"```bibtex\n@software{{{project.name},\n{lines}}}\n```\n"


def badge(label: str, value: str) -> str:
    """Draw two words in boxes beside each other, as SVG."""
    left, right = (round(sum(_WIDTHS.get(letter, 6.7) for letter in text)) + 10 for text in (label, value))
    font = 'font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" fill="#fff" text-anchor="middle"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">'
        f"<title>{escape(label)}: {escape(value)}</title>"
        f'<clipPath id="a"><rect width="{left + right}" height="20" rx="3"/></clipPath>'
        f'<g clip-path="url(#a)"><rect width="{left}" height="20" fill="#444"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="#2a6f97"/></g>'
        f'<g {font}><text x="{left / 2:.1f}" y="14">{escape(label)}</text>'
        f'<text x="{left + right / 2:.1f}" y="14">{escape(value)}</text></g></svg>\n'
    )


def badges(project: Project) -> dict[str, str]:
    """Return the words of the badges: labels and values."""
    return {
        "version": project.version,
        "license": project.license,
        **{name: f"{version}+" for name, version in project.requires.items()},
    }


# The places in files that hold more.


def with_urls(text: str, project: Project) -> str:
    """Return pyproject.toml with the project's URLs, or without any."""
    text = re.sub(r"^\[project\.urls\]\n(?:.+\n)*\n", "", text, flags=re.MULTILINE)
    if not project.url:
        return text
    urls = {
        "Repository": project.url,
        "Documentation": f"{project.url}/blob/HEAD/docs/index.md",
        "Changelog": f"{project.url}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{project.url}/issues",
    }
    lines = "".join(f'{name} = "{target}"\n' for name, target in urls.items())
    return text.replace("[project.scripts]\n", f"[project.urls]\n{lines}\n[project.scripts]\n", 1)


def with_repository(text: str, project: Project) -> str:
    """Return mkdocs.yml with the repository in the site's header, or without it."""
    text = re.sub(r"^repo_(?:url|name): .*\n", "", text, flags=re.MULTILINE)
    lines = f"repo_url: {project.url}\nrepo_name: {project.name}\n" if project.url else ""
    return text.replace("docs_dir:", f"{lines}docs_dir:", 1)


def with_install(text: str, project: Project) -> str:
    """Return a page that installs from the repository too, or only from a clone of it; badges have their words."""
    for label, value in badges(project).items():
        shown = f"[![{label} {value}]({BADGES}/{label}.svg)"
        text = re.sub(rf"\[!\[[^\]]*\]\({BADGES}/{label}\.svg\)", lambda _, shown=shown: shown, text)  # type: ignore[misc]
    text = re.sub(r"^\$ pip install git\+.*\n", "", text, flags=re.MULTILINE)
    line = f"$ pip install git+{project.url}  # no clone needed\n" if project.url else ""
    return text.replace("$ pip install .", f"{line}$ pip install .", 1)


def with_bibtex(text: str, project: Project) -> str:
    """Return versions.md with the entry of today."""
    return re.sub(r"^```bibtex\n.*?^```\n", lambda _: bibtex(project), text, flags=re.MULTILINE | re.DOTALL)


CHANGES: dict[str, Callable[[str, Project], str]] = {
    "pyproject.toml": with_urls,
    "mkdocs.yml": with_repository,
    "docs/versions.md": with_bibtex,
    **dict.fromkeys(INSTALLS, with_install),
}


def make_files(root: Path, project: Project) -> dict[str, str]:
    """Return the text of every file that shows the project, by its path."""
    drawn = {f"{BADGES}/{label}.svg": badge(label, value) for label, value in badges(project).items()}
    written = {"CITATION.cff": citation(project), **drawn}
    changed = {name: make((root / name).read_text(encoding="utf-8"), project) for name, make in CHANGES.items()}
    return {**written, **changed}


def write(root: Path = ROOT, url: str | None = None) -> None:
    """Write those files; a URL is set first."""
    if url is not None:
        if url and not _PAGE.fullmatch(url):
            raise SystemExit(f"the URL is {url!r}, but must be like https://example.org/somebody/ropewalk")
        pyproject, line = root / "pyproject.toml", f'url = "{url.rstrip("/")}"'
        pyproject.write_text(_URL.sub(lambda _: line, pyproject.read_text(encoding="utf-8"), 1), encoding="utf-8")
    for name, text in make_files(root, read_project(root)).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main() -> None:
    """Read the command's arguments and write."""
    parser = argparse.ArgumentParser(description="Write badges, citation and the repository's URL.")
    parser.add_argument("--url", help="the repository's page, as https://example.org/somebody/ropewalk; '' for none")
    write(url=parser.parse_args().url)


if __name__ == "__main__":
    main()
