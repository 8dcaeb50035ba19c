"""How Sphinx builds the pages: `make docs`."""

import os.path
import re
from importlib.metadata import version as version_of
from pathlib import Path

from pygments.lexers.python import PythonLexer
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent

project = "Lockstep"
author = "The Lockstep authors"
copyright = author
version = release = version_of("lockstep-jax")

extensions = ["myst_nb"]
exclude_patterns = ["_build"]
nitpicky = True
smartquotes = False  # quotes are part of what a config or a message says

# MyST: `#a-heading` links to a heading of the page, `page.md#a-heading` to one of another page.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# The notebook is executed by the build, without the outputs that a file may contain.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

html_theme = "sphinx_book_theme"
html_title = "Lockstep"
html_static_path = ["_static"]
html_css_files = ["lockstep.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "navbar_persistent": [],  # the search is above the list of pages
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}


LINK = re.compile(r"\[([^\[\]]*)\]\(([^()#\s:]+)(#[^()\s]*)?\)")


def files_elsewhere() -> dict[Path, str]:
    """Returns the files outside of docs/ that are pages, such as README.md, with their pages.

    The first line of such a page is a link to the file, and nothing else.
    """
    pages = {}
    for page in DOCS.rglob("*.md"):
        with page.open(encoding="utf-8") as lines:
            if link := LINK.fullmatch(next(lines, "").strip()):
                pages[(page.parent / link[2]).resolve()] = page.relative_to(DOCS).as_posix()
    return pages


def relinked(text: str, origin: Path, page: str, elsewhere: dict[Path, str]) -> str:
    """Returns the text of a file with links that hold on a page.

    Links between the files of the repository become links between pages. Files that are not pages
    are copied beside them, to be downloaded.

    Args:
        text: the text.
        origin: the folder of the file, from which its links go out.
        page: the name of the page, without its suffix.
        elsewhere: the files outside of docs/ that are pages.
    """

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        file = (origin / target).resolve()
        if not file.is_file():
            return match[0]  # Sphinx reports a link to a file that does not exist
        start = DOCS / Path(page).parent
        file = DOCS / elsewhere.get(file, file)
        path = os.path.relpath(file, start)
        if file.suffix == ".md" and DOCS not in file.parents:
            return f"{{download}}`{words} <{path}>`"
        return f"[{words}]({path}{anchor})"

    return LINK.sub(link, text)


def read_source(app: Sphinx, page: str, content: list[str]) -> None:
    """Puts the file into a page that links to it in its first line, and makes all links hold.

    Args:
        app: the build.
        page: the name of the page, without its suffix.
        content: its text, which is replaced.
    """
    if app.env.doc2path(page).suffix != ".md":
        return
    elsewhere = files_elsewhere()
    head, _, rest = content[0].partition("\n")
    origin = (DOCS / page).parent
    if first := LINK.fullmatch(head.strip()):
        file = (origin / first[2]).resolve()
        whole = file.read_text(encoding="utf-8")
        content[0] = relinked(whole, file.parent, page, elsewhere)
        content[0] += relinked(rest, origin, page, elsewhere)
    else:
        content[0] = relinked(content[0], origin, page, elsewhere)


def setup(app: Sphinx) -> None:
    """Reads the pages, and colors languages that Pygments does not have.

    Diagrams of mermaid, which the site of a repository draws, are shown as their text: drawing
    them on a page would need a script from a network.

    Args:
        app: the build.
    """
    app.connect("source-read", read_source)
    app.add_lexer("mermaid", TextLexer)
    app.add_lexer("gin", PythonLexer)
