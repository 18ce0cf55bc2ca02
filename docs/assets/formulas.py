"""A hook of mkdocs: blocks of the language `math` are LaTeX, and become MathML, which browsers typeset themselves."""

from latex2mathml.converter import convert


def on_config(config):
    fence = {"name": "math", "class": "formula", "format": typeset}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def typeset(source, language, css_class, options, md, **_):
    return f'<div class="{css_class}" tabindex="0">{convert(source, display="block")}</div>'
