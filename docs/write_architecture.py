"""Writes the tree in ARCHITECTURE.md from the modules' own docstrings, so that it cannot say something else than they do.

usage: python docs/write_architecture.py [--check]
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- tree -->\n", "<!-- /tree -->\n"
ROOMS = {
    ".": "",
    "catalog": "hardware, links, models, fleets; data/ holds value, unit, source, date",
    "cli": "one command = load, call one function, print",
    "economics": "money over time",
    "engine": "the split engine",
    "engine/driver": "schedules; torch-free",
    "engine/kernels": "the operations of a forward",
    "engine/kernels/programs": "device code",
    "engine/link": "byte streams between processes",
    "engine/stage": "one stage's process",
    "engine/wire": "messages; torch-free",
    "gateway": "HTTP and text",
    "perf": "step time and serving metrics, fitted to published measurements",
    "planner": "which GPUs, which splits, which traffic where",
    "policy": "pure decisions that engine, gateway and simulator share",
    "simulate": "a plan under a trace, on modelled time",
}


def first_sentence(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = text.split("\n\n")[0].replace("\n", " ").strip()
    return re.split(r"(?<=\w)[.](?: |$)", paragraph)[0]


def tree() -> str:
    package = ROOT / "src" / "bimetal"
    lines = []
    for folder in sorted({f.parent for f in package.rglob("*.py")}):
        room = folder.relative_to(package).as_posix()
        files = [f for f in sorted(folder.glob("*.py")) if f.name != "__init__.py"]
        if not files:
            continue
        name = "bimetal/" if room == "." else f"bimetal/{room}/"
        lines.append(f"{name}  {ROOMS[room]}".rstrip())
        lines += [f"  {f.name:<22} {first_sentence(f)}" for f in files]
    return "```\n" + "\n".join(lines) + "\n```\n"


def main() -> None:
    page = ROOT / "ARCHITECTURE.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    wanted = before + BEGIN + tree() + END + after
    if "--check" in sys.argv:
        sys.exit(
            None
            if wanted == text
            else "ARCHITECTURE.md is out of date: run `python docs/write_architecture.py`"
        )
    page.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
