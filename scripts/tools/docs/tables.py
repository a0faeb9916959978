# SPDX-License-Identifier: Apache-2.0
"""Write the tables in docs/ that follow from the source: messages, refusals, hooks.

    scripts/docs_tables [--check]

A table stands between `<!-- table: NAME -->` and `<!-- table: end -->`. Messages are
found by reading the source, not by running it. --check only compares.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from tools import ROOT
from tools.docs.messages import SECTIONS, anchor, messages, section

MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- table: end -->)", re.S)


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`" if text else "-"


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;")


def table(head: tuple[str, ...], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def message_tables() -> dict[str, str]:
    """One table for each section, with an anchor for each message."""
    rows: dict[str, list[tuple[str, ...]]] = {name: [] for name in SECTIONS}
    seen: dict[str, int] = {}
    for message in messages():
        name = anchor(message)
        seen[name] = seen.get(name, 0) + 1
        name += f"-{seen[name]}" if seen[name] > 1 else ""
        link = f'<a id="{name}"></a>'
        rows[section(message.source)].append(
            (
                link + _code(message.found),
                _code(message.expected),
                _cell(message.fix) or "-",
            )
        )
    head = ("message", "expected", "what to do")
    return {
        name: table(head, found) if found else "None." for name, found in rows.items()
    }


def _flag(field: str) -> str:
    return "`--" + field.replace("_", "-") + "`"


def _values(allowed: Sequence[object]) -> str:
    shown = ["not given" if x in (None, [], {}, "") else f"`{x}`" for x in allowed]
    return " or ".join(dict.fromkeys(shown))


def scope_tables() -> dict[str, str]:
    """What is filled in and what is refused at start-up."""
    from sglang_exact import scope, scope_arguments, scope_families, variables

    why = getattr(scope, "WHY", {})
    arguments = {
        name: table(
            ("flag", "served", "why nothing else"),
            [
                (_flag(field), _values(allowed), _cell(why.get(field, "-")))
                for field, allowed in fields.items()
            ],
        )
        for name, fields in (
            ("arguments", scope.ALLOWED),
            ("arguments-speculative", scope.ALLOWED_SPECULATIVE),
        )
    }
    filled = [(_flag(f.field), f"`{f.value}`", _cell(f.why)) for f in scope.FILLS]
    ngram = scope.NGRAM_FILL
    filled.append((_flag(ngram.field), f"`{ngram.value}`", _cell(ngram.why)))
    left: dict[str, list[str]] = {}
    for name, reason in scope_arguments.LEFT_ALONE.items():
        left.setdefault(reason, []).append(_flag(name))
    known = variables.tables()
    families = [
        (
            f.title,
            ", ".join(f"`{name}`" for name in f.architectures),
            ", ".join(f.drafters),
            str(f.grid),
        )
        for f in scope_families.FAMILIES
    ]
    return {
        "families": table(
            ("models", "architectures", "drafters", "prompts cut at"), families
        ),
        **arguments,
        "arguments-left-alone": table(
            ("flags", "why"),
            [(", ".join(flags), _cell(why)) for why, flags in left.items()],
        ),
        "arguments-filled": table(("flag", "set to", "why"), filled),
        "environment": table(
            ("variable", "served"),
            [(f"`{n}`", _values(v)) for n, v in known.settled.items()],
        ),
        "environment-harmless": _names_table(known.harmless),
        "environment-refused": _names_table(known.refused),
    }


def _names_table(groups: dict[str, list[str]]) -> str:
    """Variables by the reason that a table gives for them."""
    rows = [(why, ", ".join(f"`{n}`" for n in names)) for why, names in groups.items()]
    return table(("what they are about", "variables"), rows)


def request_table() -> str:
    """How each sampling parameter is served."""
    from sglang_exact.hooks import requests

    rows = [
        ("full speed", requests.PARALLEL),
        ("full speed; each row has what the drafts before it make", requests.FOLLOWING),
        ("refused with status 400", requests.REFUSED),
    ]
    return table(
        ("served", "sampling parameters"),
        [(how, ", ".join(f"`{n}`" for n in sorted(names))) for how, names in rows],
    )


def ollama_table() -> str:
    """What becomes of each option and field of an Ollama request."""
    from sglang_exact.hooks import ollama

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in sorted(names))

    neutral = [f"{name} {value}" for name, value in ollama.NEUTRAL.items()]
    rows = [
        ("options that are served", listed(ollama.SERVED)),
        ("options that are the server's, and ignored", listed(ollama.IGNORED)),
        ("options that are taken at this value alone", listed(neutral)),
        ("fields that are refused with status 400", listed(ollama.REFUSED)),
    ]
    return table(("what", "names"), rows)


def settings_table() -> str:
    """The variables of the overlay."""
    from sglang_exact import settings

    rows = [(f"`{n}`", _cell(text)) for n, text in settings.VARIABLES.items()]
    return table(("variable", "what it does"), rows)


def hooks_table() -> str:
    """The hooks, one line per file, in the order in which they are registered."""
    from sglang_exact import hooks

    files: dict[str, list[str]] = {}
    for hook in hooks.ALL:
        module = hook.replacement.__module__.rpartition(".")[2]
        files.setdefault(module, []).append(f"`{hook.name}`")
    rows = []
    for module, names in files.items():
        path = ROOT / "sglang_exact" / "hooks" / f"{module}.py"
        if not path.is_file():
            continue
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = " ".join(doc.split("\n\n")[0].split())
        link = f"[{module}.py](../sglang_exact/hooks/{module}.py)"
        rows.append((link, _cell(first), ", ".join(names)))
    return table(("file", "what it settles", "hooks"), rows)


def host_tables() -> dict[str, str]:
    """What other hosts changed, as `scripts/pin_host --record` found it."""
    found = {}
    for path in sorted((ROOT / "docs" / "data").glob("sglang-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        rows = []
        for change in record["changes"]:
            hooks = ", ".join(f"`{n}` ({how})" for n, how in change["hooks"].items())
            where = ", ".join(f"`{p}`" for p in change["elsewhere"])
            state = change["kind"] + (f"; now at {where}" if where else "")
            rows.append((f"`{change['target']}`", state, hooks or "-"))
        found[f"changes-{record['host']}"] = table(
            ("function", "found", "hooks it concerns"), rows
        )
    return found


def tables() -> dict[str, Callable[[], str]]:
    """Every table by name."""
    found: dict[str, Callable[[], str]] = {
        "requests": request_table,
        "ollama": ollama_table,
        "settings": settings_table,
        "hooks": hooks_table,
    }
    for group in (message_tables(), scope_tables(), host_tables()):
        found |= {name: partial(str, text) for name, text in group.items()}
    return found


def filled(text: str, made: dict[str, Callable[[], str]], where: str) -> str:
    """A document with its tables; raises ValueError on a name nobody makes."""

    def fill(match: re.Match[str]) -> str:
        if match[2] not in made:
            raise ValueError(
                f"found table {match[2]} in {where}; expected one of "
                f"{', '.join(sorted(made))}; fix: correct the name"
            )
        return f"{match[1]}{made[match[2]]()}\n{match[3]}"

    return MARK.sub(fill, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    made, used, stale = tables(), set(), []
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        used |= {match[2] for match in MARK.finditer(text)}
        new = filled(text, made, path.name)
        if new == text:
            continue
        stale.append(path.name)
        if not check:
            path.write_text(new, encoding="utf-8")
    unused = sorted(set(made) - used)
    if unused:
        print(f"found no place for the tables {', '.join(unused)}; expected one each")
        return 1
    state = "stale" if check else "written"
    print(f"{state}: {', '.join(stale) or 'nothing'}")
    return 1 if check and stale else 0
