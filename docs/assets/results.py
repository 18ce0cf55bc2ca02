"""A hook of mkdocs: what lies in results/ is part of the site, so that pages can show it and link to it.

Pages link to it as it lies in the repository, one folder above docs/; on the site it lies beside them.
"""

from pathlib import Path

from mkdocs.structure.files import File

RESULTS = Path(__file__).parents[2] / "results"


def on_files(files, config):
    for path in sorted(path for path in RESULTS.iterdir() if path.is_file()):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    to_docs = "../" * page.file.src_uri.count("/")
    return markdown.replace(f"]({to_docs}../results/", f"]({to_docs}results/")
