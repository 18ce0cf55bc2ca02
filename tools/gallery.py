"""Draw the pictures of docs/gallery.md, and write its sections: `python tools/gallery.py`.

Both are of `ropewalk.experiments.gallery`, whose pictures read all their numbers off `attention`.
"""

from __future__ import annotations

from pathlib import Path

from ropewalk.experiments.gallery import BLOCKS, LONG, MASKS, PICTURES, RELATIVE, SCHEMES, Picture, draw

DOCS = Path(__file__).parents[1] / "docs"
PAGE, FIGURES = DOCS / "gallery.md", DOCS / "figures"
BEGIN, END = "<!-- pictures: begin -->", "<!-- pictures: end -->"


def figure_path(name: str) -> Path:
    return FIGURES / f"gallery-{name}.svg"


def show(name: str, title: str) -> list[str]:
    """Return the lines that put a picture on a page."""
    return [f"![{title}](figures/{figure_path(name).name})", ""]


def section(name: str, picture: Picture) -> list[str]:
    """Return the lines of a picture: its sentence, its call, its command and itself."""
    packed = "thd" in picture.call
    tensors = ", ".join(f"{x}[0]" if packed else x for x in "qkv")
    code = [f"attention({tensors}, {picture.call})"]
    if len(code[0]) > 120:
        code = ["attention(", f"    {tensors}, {picture.call}", ")"]
    lines = [f"### {picture.title}", "", picture.sentence, "", f"`ropewalk draw {name}` draws this call:", ""]
    return [*lines, "```python", *code, "```", "", *show(name, picture.title)]


def sections() -> str:
    """Return all sections of the page."""
    lines = ["## Schemes", ""]
    for name, picture in SCHEMES.items():
        lines += section(name, picture)
    title = "Relative position against distance"
    lines += [f"### {title}", ""]
    lines += [
        "Beyond a window ReRoPE holds the relative position, leaky ReRoPE and Self-Extend let it grow slowly.",
        "",
    ]
    lines += [f"`ropewalk draw {RELATIVE}` draws them beside RoPE's:", "", *show(RELATIVE, title)]
    lines += ["## Masks", ""]
    for name, picture in MASKS.items():
        lines += section(name, picture)
    lines += ["## Lists of blocks", "", "[Sparse attention](sparse.md) has all constructors of lists.", ""]
    lines += ["```python", f"q = k = v = torch.randn(1, {LONG}, 4, 64)", "```", ""]
    for name, picture in BLOCKS.items():
        lines += section(name, picture)
    return "\n".join(lines)


def write_page(text: str) -> str:
    """Return the page with its sections written anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{sections()}\n{END}{after}"


def main() -> None:
    for name in (*PICTURES, RELATIVE):
        figure_path(name).write_text(draw(name), encoding="utf-8")
    PAGE.write_text(write_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{len(PICTURES) + 1} pictures, {PAGE.name}")


if __name__ == "__main__":
    main()
