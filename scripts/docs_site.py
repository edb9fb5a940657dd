"""The site of docs/ (``make docs``): its navigation, and the pages that lie elsewhere in the repository.

README is the first page; learn/ and the pages and plots of benchmarks/results are there under the same path. Links
that lead out of docs/ or into it, as they have to on GitHub, are led to them. The pages of learn/ end with the code
that they explain. A page that is in no section of ``SECTIONS`` is put under the last one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent

SECTIONS = {
    "Start": ["index.md", "with-your-library.md"],
    "Use": [
        "controls.md",
        "streaming.md",
        "sessions.md",
        "logprobs.md",
        "samplers.md",
        "grammars.md",
        "caches.md",
        "speculation.md",
        "optimize.md",
        "exact.md",
        "inspect.md",
    ],
    "Serve, run, evaluate": [
        "engine.md",
        "serving.md",
        "batch-jobs.md",
        "scale.md",
        "evaluate.md",
        "training.md",
    ],
    "Extend": ["architecture.md", "write-a-strategy.md"],
    "Rely on it": [
        "differences.md",
        "versions.md",
        "releasing.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
    ],
    "More": [],
}

LEARN = ROOT / "learn"

#: Page of the site → file of the repository, of those that are not in docs/.
ELSEWHERE = {"index.md": "README.md"} | {
    name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
}

#: Pages and code of learn/ in order, under the same path but for the first page.
LESSONS = {"learn/index.md": "learn/README.md"} | {
    f"learn/{path.name}": f"learn/{path.name}"
    for pattern in ("[0-9]*.md", "*.diff", "*.py")
    for path in sorted(LEARN.glob(pattern))
}


#: Tables of values, whose first column is code: on a phone, it gets a line of its own.
STYLE = """
.md-typeset table[data-values] :is(th, td) { padding: .5em .9em; min-width: 0; }
@media (max-width: 44em) {
  .md-typeset table[data-values] tr { display: flex; flex-wrap: wrap; }
  .md-typeset table[data-values] :is(th, td) { flex: 1 1 0; }
  .md-typeset table[data-values] :is(th, td):first-child { flex-basis: 100%; padding-bottom: 0; }
  .md-typeset table[data-values] td:not(:first-child) { border-top: 0; }
}
"""


def results() -> list[str]:
    """Paths of the pages and plots of benchmarks, in the repository as on the site."""
    files = sorted((ROOT / "benchmarks" / "results").iterdir())
    return [path.relative_to(ROOT).as_posix() for path in files if path.suffix in (".md", ".png")]


def navigation(pages: list[str]) -> list[dict[str, list[str]]]:
    """The sections with those of ``pages`` that there are; the last one has what is in no other."""
    listed = {page for section in SECTIONS.values() for page in section}
    sections = {name: [p for p in section if p in pages] for name, section in SECTIONS.items()}
    sections["More"] += sorted(set(pages) - listed)
    return [{name: section} for name, section in sections.items() if section]


def linked(text: str, page: str) -> str:
    """The Markdown of ``page`` with links that hold on the site."""
    if page in ELSEWHERE:
        return re.sub(r"\]\(docs/", "](", text).replace("](learn/README.md", "](learn/index.md")
    if page.startswith("benchmarks/"):
        return text
    if page in LESSONS:
        code = LEARN / Path(page).with_suffix(".diff").name
        code = code if code.exists() else LEARN / "generate.py"
        kind = code.suffix.replace("py", "python").removeprefix(".")
        text += f"\n## {code.name}\n\n```{kind}\n{code.read_text(encoding='utf-8')}```\n"
        return text.replace("](README.md", "](index.md").replace("](../docs/", "](../")
    return re.sub(r"\]\(\.\./", "](", text).replace("](README.md", "](index.md")


def on_config(config: Any) -> Any:
    pages = [path.name for path in Path(config.docs_dir).glob("*.md")]
    measured = [path for path in results() if path.endswith(".md")]
    lessons = [page for page in LESSONS if page.endswith(".md")]
    config.nav = [*navigation([*pages, *ELSEWHERE]), {"Learn": lessons}, {"Measured": measured}]
    return config


def on_files(files: Any, config: Any) -> Any:
    for page, path in (ELSEWHERE | LESSONS | {path: path for path in results()}).items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "learn/style.css", content=STYLE))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri in LESSONS:
        page.meta["hide"] = ["toc"]  # room for lines of a hundred characters
    return linked(markdown, page.file.src_uri)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    is_lesson = page.file.src_uri in LESSONS
    head = "<table>\n<thead>\n<tr>\n<th><code>"
    return html.replace(head, head.replace("<table", "<table data-values")) if is_lesson else html
