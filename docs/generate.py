"""Writes docs/arguments.md from the scripts' own dataclasses: `python -m docs.generate`."""

import ast
import importlib
import io
import tokenize
from dataclasses import MISSING, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in ROOT.glob("ppo_iif*.py"))
LANGUAGE = "ppo_iif_rlhf"
HEAD = """# Arguments

Made from the scripts by `python -m docs.generate`; `python SCRIPT --help` shows the same. Names and meanings are CleanRL's where CleanRL
has them. A boolean is set by `--name` or `--no-name`."""


def arguments(script):
    """{name: (default, what it is)} of a script, from its dataclass and the text under each of its fields or the comment behind."""
    module, source = importlib.import_module(script), (ROOT / f"{script}.py").read_text(encoding="utf-8")
    (body,) = (n.body for n in ast.parse(source).body if getattr(n, "name", "") == "Args")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string[1:].strip() for token in tokens if token.type == tokenize.COMMENT}
    text = {field.target.id: comments.get(field.end_lineno) for field in body if isinstance(field, ast.AnnAssign)}
    for field, after in zip(body, body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text[field.target.id] = " ".join(after.value.value.split())
    found = {}
    for field in fields(module.Args):
        if field.init:
            default = field.default if field.default is not MISSING else field.default_factory()
            default = "the script's name" if default == script else f"`{default}`" if default != "" else "none"
            found[field.name] = default, text[field.name]
    return found


def table(scripts):
    """Markdown; what is not alike in all of the scripts says in which it is."""
    rows, every = [], {script: arguments(script) for script in scripts}
    for name in dict.fromkeys(name for found in every.values() for name in found):
        cells = []
        for i in (0, 1):
            values = {}  # value: the scripts that have it
            for script, found in every.items():
                if name in found:
                    values.setdefault(found[name][i], []).append(script.removeprefix("ppo_iif").lstrip("_") or "vector")
            alike = len(values) == 1 and len(next(iter(values.values()))) == len(scripts)
            if i and len(values) == 1:  # its default says where it is
                alike = True
            cells.append("; ".join(v if alike else f"{v} ({', '.join(where)})" for v, where in values.items()))
        rows.append(f"| `--{name.replace('_', '-')}` | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(["| argument | default | what |\n|---|---|---|", *rows])


def arguments_page():
    classic = [script for script in SCRIPTS if script != LANGUAGE]
    names = ", ".join(f"`{script}.py`" for script in classic)
    parts = [HEAD, f"## {names}", "(vector, continuous, minigrid, atari below.)", table(classic)]
    parts += [f"## `{LANGUAGE}.py`", table([LANGUAGE])]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "arguments.md").write_text(arguments_page(), encoding="utf-8")
    print("written to docs/arguments.md")
