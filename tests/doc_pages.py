"""README.md and docs/*.md as a reader uses them: blocks of code, code between words, links, headings.

A block of bash is run by the tests, unless the line before it says why not:

    <!-- not run: needs SLURM -->             the whole block is left out
    <!-- not run (sbatch, srun): needs SLURM -->    only what these programs would do

A block of output is compared with what the block above it prints, if the line before it is

    <!-- compared -->
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CODE_OF_CONDUCT.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]
#: Pages that a newcomer reads in the first week, in this order: later ones need the runs of earlier ones.
WEEK = ("README.md", "laptop.md", "own_data.md", "own_model.md", "debug.md", "export.md", "mixed_precision.md")

_FENCE = re.compile(
    r"(?:^<!-- (?:not run(?: \((?P<programs>[\w, -]+)\))?: (?P<reason>.+?)|(?P<compared>compared)) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(
    r"-m (?:dtrain|benchmarks)\.|\b(?:scripts|slurm)/\w+\.(?:py|sh|sbatch)"
    r"|(?:^|\s)dtrain (?:train|evaluate|export|predict|pack|launch|report|doctor|completion)(?=\s|$)"
)
_STARTS = re.compile(r"^\s*(?:python|dtrain|torchrun|srun|sbatch|pip|bash|wandb) ", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """Code between fences.

    Attributes:
        page: Its file.
        line: Of the opening fence, from 1.
        language: ``bash``, ``python``, ``yaml``, or ``""``.
        text: What is between the fences.
        reason: Why it is not run, or not all of it; None if it is.
        programs: Those that are left out; empty with a reason: everything.
        is_compared: Whether it is output that a test compares.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str | None
    programs: tuple[str, ...]
    is_compared: bool

    @property
    def runs(self) -> bool:
        """Whether at least a part of it is run."""
        return self.reason is None or bool(self.programs)

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The blocks of a page, in their order; those of one language where one is given."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        programs = tuple(re.split(r",\s*", match["programs"])) if match["programs"] else ()
        found.append(
            Block(page, line, match["language"], match["text"], match["reason"], programs, bool(match["compared"]))
        )
    return [block for block in found if language in (None, block.language)]


def run_in_the_week(page: Path) -> Iterator[tuple[Block, list[Block]]]:
    """The blocks of a page of ``WEEK`` that test_doc_outputs runs, up to the last compared output; each with its outputs."""
    found: list[tuple[Block, list[Block]]] = []
    for block in blocks(page):
        if block.language in ("bash", "python"):
            found.append((block, []))
        elif block.is_compared:
            found[-1][1].append(block)
    last = max((number for number, (_, outputs) in enumerate(found) if outputs), default=-1)
    yield from (
        (code, outputs) for code, outputs in found[: last + 1] if outputs or (code.runs and code.language == "bash")
    )


def unfenced_commands(page: Path) -> list[str]:
    """Commands in blocks that are not marked as bash, and in indented ones: nobody would run these."""
    unmarked = [block.text for block in blocks(page, "")]
    indented = re.findall(r"(?:^(?: {4}|\t).*\n)+", _prose(page), re.MULTILINE)
    # Output may show a command, but does not begin with one.
    return [text for text in [*unmarked, *indented] if _STARTS.match(text)]


def commands(page: Path) -> Iterator[list[str]]:
    """Command lines of dtrain, its benchmarks and scripts on a page, as words; placeholders are taken out.

    Those of blocks that are run as they are do not count.
    """
    for block in blocks(page):
        if block.language == "bash" and block.reason is None:
            continue
        if block.language in ("bash", ""):
            for line in block.text.replace("\\\n", " ").splitlines():
                if _COMMAND.search(line) and (block.language == "bash" or _STARTS.match(line)):
                    yield from (words for words in _words(line) if _COMMAND.search(shlex.join(words)))
    for code in inline_code(page):
        if _COMMAND.search(code) and " " in code:
            yield from _words(code)


def inline_code(page: Path) -> list[str]:
    """What stands between backticks in sentences and tables."""
    return [code.replace("\\|", "|") for code in re.findall(r"`([^`\n]+)`", _prose(page))]


def links(page: Path) -> list[str]:
    """Targets of links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", _prose(page)))


def anchors(page: Path) -> set[str]:
    """What ``#...`` may name on a page, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_placeholder(word: str) -> bool:
    """Whether a word stands for what a reader puts there: ``DIR``, ``KEY=VALUE``, ``run.dir=DIR``, ``...``, ``[more]``."""
    value = word.rpartition("=")[2].strip("'\"")
    return "..." in word.replace("}..{", "") or word.startswith("[") or bool(re.fullmatch(r"[A-Z][A-Z0-9_]*", value))


def _prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def _words(line: str) -> Iterator[list[str]]:
    words: list[str] = []
    for word in shlex.split(line, comments=True):
        if word in ("&&", "||", ";", "|", ">"):
            yield words
            words = []
        elif not is_placeholder(word):
            words.append(word)
    yield words
