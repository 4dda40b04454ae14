"""Measure how prose reads: markers of the style rules for 1,000 sentences, and the share of long sentences.

python tests/prose.py [--summary] PATH ...

The paths are Python files (docstrings and comments), Markdown files, and folders of both.
"""

import ast
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG = 25  # words
RULES = {
    "2 subject first": r"^(?:Where|Whose|Of|What)\b(?!.*\?$)|^(?:By|In|To|From|With) what\b",
    "3 repeat the noun": r"\bthat of\b|\bthose (?:of|in|by|from|for|at|with)\b|\bthe (?:others|latter|former)\b"
    r"|\b(?:of|by|from|with|to|on|at|through) which\b"
    r"|\bwhat (?:is|are|was|were|has|had|it|they|no|comes?|goes)\b(?!.*\?$)"
    r"|\bas (?:is|are|has|have|do|does) (?:that|those|the)\b",
    "5 actor and result": r"\brefus\w+|\b(?:is|are) (?:an )?errors?\b|\bask(?:s|ed)?\b",
    "7 return, raise": r"^(?:Say|Refuse|Let|Have|Be|Know|Tell)\b|\bsays? (?:whether|what)\b",
    "9 only, also": r"\balone\b|\bbesides?\b|\blikewise\b|,? too(?=[.,:]?$|,)|\bby (?:it|them)sel(?:f|ves)\b",
    "12 semicolon": r";|(?<!\w)\([^()]*\).*(?<!\w)\([^()]*\)|: .*\w: ",
    "14 modern words": r"\b(?:anew|mend(?:s|ed|ing)?|dear(?:er|est|ly)?|nobody|somebody|whoever|lest|whereby)\b"
    r"|\b(?:go(?:es)? on|going on|went on|comes? of|came of|put down to|in the midst|of one's own|leads? far)\b"
    r"|\b(?:bit for bit|one number|one (?:by|after) (?:one|the other|another)|gradient-equivalents?|read me)\b"
    r"|\b(?:textbook loop|seconds of the processor|judge[sd]?|remed(?:y|ies)|the tape|by rows)\b",
    "15 spelling": r"\b(?:behavio|colo|favo|neighbo|hono|labo)ur\w*|\bhyper-parameters?\b"
    r"|\b(?:normal|initial|regular|optim|minim|maxim|vector|general|summar|organ|recogn|real|penal|stabil|material"
    r"|parametr|factor|quant|linear|synchron|random)is(?:e[ds]?|er|ers|ing|ations?)\b",
}  # fmt: skip
PATTERNS = {rule: re.compile(p, re.I if rule[0] not in "27" else 0) for rule, p in RULES.items()}
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|et al|cf|vs|etc|Eq|Eqs|Fig|Sec|Alg|No|pp|resp|approx)\.")
END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_]*(?:[A-Z0-9`_§]|metagrad\b))")
SECTION = re.compile(r"\s*(?:Args|Returns|Raises|Attributes|Examples?|References|Yields|Warns|Note|Notes):$")
ENTRY = re.compile(r"^\s*\*{0,2}[\w.*, ]{1,60}(?: \([^)]*\))?: (?=\S)")
NEW_BLOCK = re.compile(rf"\s*(?:- |\||\.\. |>>>)|{ENTRY.pattern}")
PRAGMA = re.compile(r"^#!|^#\s*(?:noqa|type:|pyright:|ruff:|fmt:|pragma)")


class Prose:
    """Sentences of a file, each with its line."""

    def __init__(self, path):
        self.sentences = []
        if path.suffix == ".py":
            self._read_docstrings(ast.parse(path.read_text()))
            self._read_comments(path)
        else:
            self._read_markdown(path.read_text().splitlines())
        self.sentences.sort()

    def _add(self, line, text):
        """Split a unit of prose into sentences."""
        text = re.sub(r":\w+:`[^`]*`|``.*?``|`[^`]*`", "X", text)
        for _ in range(2):  # a badge is an image in a link
            text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|<[^>]+>", r"\1", text)
        text = ABBREVIATIONS.sub(r"\1", re.sub(r"\s+", " ", text.replace("&nbsp;", " "))).strip()
        for sentence in END.split(text):
            if len(words(sentence)) > 1:
                self.sentences.append((line, sentence.strip()))

    def _add_cells(self, line, row):
        """Add the cells of a row of a table, each as a unit."""
        for cell in re.split(r"(?<!\\)\|", row.strip(" |")):
            self._add(line, cell)

    def _read_docstrings(self, tree):
        for node in ast.walk(tree):
            value = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                self._read_docstring(value.value.splitlines(), node.lineno)

    def _read_docstring(self, lines, first):
        """Read the blocks of a docstring, without its code, equations and references."""
        block, begin, skipped = [], first, None
        for number, line in enumerate([*lines, ""], first):
            text, indent = line.strip(), len(line) - len(line.lstrip())
            is_section = SECTION.match(line)
            if block and (skipped is not None or not text or is_section or NEW_BLOCK.match(line)):
                self._add(begin, ENTRY.sub("", " ".join(block)))
                block = []
            if is_section:
                skipped = indent if text.startswith(("References", "Example")) else None
            elif text.startswith((".. ", ">>>")) or text.endswith("::"):
                skipped = indent
            elif skipped is not None and text and indent <= skipped and not text.startswith("..."):
                skipped = None
            if text.startswith("|"):
                self._add_cells(number, line)
            elif text and skipped is None and not is_section:
                begin = begin if block else number
                block.append(text.removeprefix("- "))

    def _read_comments(self, path):
        """Read comments. Comments on consecutive lines form one block."""
        with path.open("rb") as file:
            tokens = [t for t in tokenize.tokenize(file.readline) if t.type == tokenize.COMMENT]
        block, begin, last = [], 0, 0
        for token in tokens:
            if PRAGMA.match(token.string):
                continue
            own = not token.line[: token.start[1]].strip()
            if not (own and block and token.start[0] == last + 1):
                self._add(begin, " ".join(block))
                block, begin = [], token.start[0]
            block.append(token.string.lstrip("# "))
            last = token.start[0] if own else 0
        self._add(begin, " ".join(block))

    def _read_markdown(self, lines):
        """Read paragraphs, items and the cells of tables, without code and front matter."""
        block, begin, fence = [], 1, None
        if lines[:1] == ["---"]:
            end = lines.index("---", 1)
            lines = [""] * (end + 1) + lines[end + 1 :]
        for number, line in enumerate([*lines, ""], 1):
            mark = re.match(r"\s*(```+|~~~+)", line)
            if fence or mark:
                fence = None if fence and mark and mark[1].startswith(fence) else fence or mark[1]
                line = ""
            starts = re.match(r"\s*(?:[-*+]|\d+\.) |#|\||:::|!!!|>", line)
            if block and (starts or not line.strip()):
                self._add(begin, " ".join(block))
                block = []
            if line.startswith("|"):
                self._add_cells(number, line)
            elif line.strip() and not line.startswith(("#", ":::")) and (block or line[:4].strip()):
                begin = begin if block else number
                block.append(re.sub(r"^\s*(?:[-*+]|\d+\.|>|!!! \w+) ", "", line))


def words(sentence):
    """Return the words of a sentence."""
    return [word for word in sentence.split() if re.search(r"\w", word)]


def files(path):
    """Return the Python and Markdown files at or below a path, sorted."""
    path = Path(path)
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in {".py", ".md"})


def offenders(path):
    """Return the number of sentences of a file, and each offence as (line, rule, sentence)."""
    sentences = Prose(path).sentences
    found = [(line, rule, s) for line, s in sentences for rule, p in PATTERNS.items() for _ in p.findall(s)]
    long = [(line, "1 long", s) for line, s in sentences if len(words(s)) > LONG]
    return len(sentences), sorted(found + long)


def measure(paths):
    """Return the markers for 1,000 sentences, the share of long sentences in %, and the offences with their files."""
    found, total = [], 0
    for path in paths:
        count, offences = offenders(path)
        total += count
        found += [(path, *offence) for offence in offences]
    long = sum(rule == "1 long" for _, _, rule, _ in found)
    return 1000 * (len(found) - long) / max(total, 1), 100 * long / max(total, 1), total, found


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a != "--summary"]
    markers, long, total, found = measure([file for a in arguments for file in files(a)])
    if "--summary" not in sys.argv:
        for path, line, rule, sentence in found:
            print(f"{path}:{line}: [{rule}] {sentence}")
    print(dict(sorted(Counter(rule for _, _, rule, _ in found).items())))
    print(
        f"{total} sentences, {markers:.1f} markers for 1,000 sentences, {long:.1f} % longer than {LONG} words"
    )
