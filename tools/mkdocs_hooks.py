"""What MkDocs does besides rendering docs/: links into the repository, one table.

Pages link to files of the repository by relative paths, `../results/speed/x.csv`, as a
reader of the repository follows them. Files outside docs/ that some page links to come
into the site under repository/, and the links are rewritten to lead there; Markdown
among them becomes a page, whose own links are followed too. A link to nothing stays as
it is, and `mkdocs build --strict` fails on it.
"""

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parent))
import recipe_table  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
COPIED = "repository"
TABLE = "<!-- recipe table -->"
# A Markdown link or picture: what comes before its target, the target, its anchor.
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")


def _target(page: str, link: str) -> str | None:
    """Path in the repository that a page, itself such a path, links to."""
    if re.match(r"[a-z]+:", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _in_site(path: str) -> str:
    """Where a file of the repository lies in the site's sources."""
    return (
        path.removeprefix("docs/") if path.startswith("docs/") else f"{COPIED}/{path}"
    )


def _in_repository(source: str) -> str:
    """The reverse of `_in_site`."""
    inside = source.startswith(f"{COPIED}/")
    return source.removeprefix(f"{COPIED}/") if inside else f"docs/{source}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to outside docs/."""
    waiting = [f"docs/{file.src_uri}" for file in files if file.is_documentation_page()]
    done = set(waiting)
    while waiting:
        page = waiting.pop()
        for _, link, _ in LINK.findall((ROOT / page).read_text()):
            path = _target(page, link)
            if path is None or path in done or not (ROOT / path).is_file():
                continue
            done.add(path)
            if not path.startswith("docs/"):
                content = (ROOT / path).read_bytes()
                files.append(File.generated(config, _in_site(path), content=content))
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files):
    """Leads links to where the files are in the site, and puts the table in."""
    here = _in_repository(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        path = _target(here, match[2])
        if path is None or not (ROOT / path).is_file():
            return match[0]
        to = posixpath.relpath(_in_site(path), folder or ".")
        return f"{match[1]}{to}{match[3] or ''}"

    if TABLE in markdown:
        markdown = markdown.replace(TABLE, recipe_table.table())
    return LINK.sub(rewritten, markdown)
