"""A hook of mkdocs: a line of code has its indentation, which site.css gives to the rest of it where it breaks."""

import re

_INDENTED_LINE = re.compile(r'(<span id="line-[\d-]+")>(?=(?:<span class="w">)?( +))')


def on_page_content(html, **_):
    return _INDENTED_LINE.sub(lambda line: f'{line[1]} style="--indent: {len(line[2])}ch">', html)
