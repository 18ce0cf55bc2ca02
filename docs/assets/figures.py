"""A hook of mkdocs: a drawing is part of the page that shows it, so that its lines and text have the page's colours."""

import re
from pathlib import Path

_DRAWING = re.compile(r"^!\[[^\]]*\]\((?:\.\./)?(figures/[\w-]+\.svg)\)$", re.MULTILINE)


def on_page_markdown(markdown, config, **_):
    return _DRAWING.sub(lambda found: draw(Path(config.docs_dir) / found[1]), markdown)


def draw(path):
    return f'<figure markdown="0">\n{path.read_text(encoding="utf-8")}</figure>'
