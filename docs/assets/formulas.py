"""A hook of mkdocs: blocks of the language `math` are LaTeX, and become MathML, which browsers typeset themselves."""

import html
import logging
import re

from latex2mathml.converter import convert

LOG = logging.getLogger("mkdocs.hooks.formulas")  # what is logged there fails a strict build
_WORDS = re.compile(r"(?<=<mtext>).*?(?=</mtext>)", re.DOTALL)


def on_config(config):
    fence = {"name": "math", "class": "formula", "format": typeset}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def typeset(source, language, css_class, options, md, **_):
    try:
        formula = convert(source, display="block")
    except Exception as error:  # superfences would pass over it, and show the block as code
        LOG.error("a formula is no LaTeX that latex2mathml reads (%s): %s", type(error).__name__, source)
        return f"<pre>{html.escape(source)}</pre>"
    return f'<div class="{css_class}" tabindex="0">{_WORDS.sub(_escape, formula)}</div>'


def _escape(words):
    """Escape the words of `\\text`, which latex2mathml puts in as they are, but for its spaces."""
    return html.escape(words[0].replace("&#x000A0;", "\xa0"), quote=False)
