"""A hook of mkdocs: files outside of docs/ that a page links to become part of the site.

A Markdown file becomes a page, any other file a text. Links between them and the pages of docs/
are rewritten. A link to a file that does not exist stays as it is, and mkdocs reports it.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FOLDER = "repository"  # of the site, for files from outside of docs/
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's pages, and every other file that a page links to."""
    for name in PAGES:
        _add(ROOT / name, files, config)
    for file in list(files.documentation_pages()):
        for match in LINK.finditer(file.content_string):
            target = _source(file).parent.joinpath(match.group(1)).resolve()
            if target.is_file() and not target.is_relative_to(DOCS):
                _add(target, files, config)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links as the site needs them."""
    source = _source(page.file)

    def rewrite(match: re.Match[str]) -> str:
        target = source.parent.joinpath(match.group(1)).resolve()
        if not target.is_file() or not target.is_relative_to(ROOT):
            return match.group()
        start = PurePosixPath(page.file.src_uri).parent
        return f"]({os.path.relpath(_site_path(target), start)}{match.group(2) or ''})"

    return LINK.sub(rewrite, markdown)


def _source(file: File) -> Path:
    """Return where a file of the site lies in the repository."""
    parts = PurePosixPath(file.src_uri).parts
    return ROOT.joinpath(*parts[1:]) if parts[0] == FOLDER else DOCS.joinpath(*parts)


def _site_path(path: Path) -> str:
    """Return the path in the site of a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = f"{FOLDER}/{path.relative_to(ROOT).as_posix()}"
    return name if path.name in PAGES else f"{name}.txt"


def _add(path: Path, files: Files, config: MkDocsConfig) -> None:
    name = _site_path(path)
    if files.get_file_from_path(name) is None:
        files.append(File.generated(config, name, content=path.read_text()))
