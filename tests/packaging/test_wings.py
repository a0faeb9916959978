# SPDX-License-Identifier: Apache-2.0
"""Three wings, one direction: who may import whom, read from the source.

Served is what a server runs, asking is what talks to one over HTTP, the workshop is the
rehearsal and the scripts. Asking never imports what serves, what serves imports neither
of the others, and kernels import nothing of ours.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_exact import served

ROOT = Path(__file__).resolve().parents[2]

# Wing -> modules and packages; a package stands for everything in it.
WINGS = {
    "served": tuple(f"sglang_exact.{name}" for name in served.NAMES),
    "kernels": (served.KERNELS,),
    "asking": (
        "sglang_exact.bench",
        "sglang_exact.client",
        "sglang_exact.verify",
        "sglang_exact.view",
    ),
    # The command line: asks, and its doctor looks at what would be served.
    "cli": ("sglang_exact.__main__", "sglang_exact.cli"),
    "workshop": ("sglang_exact.rehearsal", "scripts"),
    # The version alone.
    "root": ("sglang_exact",),
}
MAY_IMPORT = {
    "served": {"served", "kernels", "root"},
    "kernels": {"kernels"},
    "asking": {"asking", "root"},
    "cli": {"cli", "asking", "served", "root"},
    "workshop": set(WINGS),
    "root": set(),
}
# What is still as it should not be, file -> what it imports. Take away, never add.
LEFT = {
    "sglang_exact/cli/doctor.py": {"sglang_exact.rehearsal"},
}
HEAVY = {"torch", "sglang", "triton", "numpy", "transformers"}
# Layers of the asking wing: each imports only what stands before it.
LAYERS = ("client", "view", "verify", "bench")


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    relative = path.relative_to(ROOT).with_suffix("")
    parts = relative.parts[1:] if relative.parts[0] == "kernels" else relative.parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def wing_of(module: str) -> str | None:
    """The wing of one of our modules, by its longest name in WINGS; None for others."""
    known = {name: wing for wing, names in WINGS.items() for name in names}
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in known and (name != "sglang_exact" or end == len(parts)):
            return known[name]
    return None


def sources() -> list[Path]:
    found = [p for f in ("sglang_exact", "kernels") for p in (ROOT / f).rglob("*.py")]
    return sorted(p for p in found if "__pycache__" not in p.parts)


def imports(source: str) -> Iterator[str]:
    """Every module that a file imports, also inside its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                full = f"{node.module}.{name.name}"
                # A name of a package may be a module of it.
                yield full if _is_module(full) else node.module


def _is_module(name: str) -> bool:
    if name.split(".")[0] not in ("sglang_exact", "sglang_exact_kernels", "scripts"):
        return False
    base = ROOT / "kernels" if name.startswith("sglang_exact_kernels") else ROOT
    path = base.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def wrong(module: str, source: str) -> set[str]:
    """What a module imports and may not."""
    own = wing_of(module)
    assert own is not None, f"{module} stands in no wing: name it in WINGS"
    found = set()
    for name in imports(source):
        other = wing_of(name)
        heavy = own == "asking" and name.split(".")[0] in HEAVY
        if heavy or (other is not None and other not in MAY_IMPORT[own]):
            found.add(name)
    return found


def test_every_file_stands_in_a_wing_and_imports_downwards() -> None:
    found: dict[str, set[str]] = {}
    for path in sources():
        apart = wrong(module_of(path), path.read_text(encoding="utf-8"))
        name = str(path.relative_to(ROOT))
        left = LEFT.get(name, set())
        apart = {a for a in apart if not any(a.startswith(known) for known in left)}
        if apart:
            found[name] = apart
    assert found == {}


@pytest.mark.parametrize("name", sorted(LEFT))
def test_what_is_left_is_still_there(name: str) -> None:
    """A line of LEFT that is no longer needed goes."""
    path = ROOT / name
    if not path.exists():
        pytest.fail(f"{name} has gone: take it out of LEFT")
    apart = wrong(module_of(path), path.read_text(encoding="utf-8"))
    for known in LEFT[name]:
        assert any(a.startswith(known) for a in apart), f"take {known} out of LEFT"


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("sglang_exact.verify.x", "import torch", {"torch"}),
        ("sglang_exact.bench.x", "from sglang.srt import y", {"sglang.srt"}),
        ("sglang_exact.client.x", "from sglang_exact import scope",
         {"sglang_exact.scope"}),
        ("sglang_exact.view.x", "from sglang_exact import __version__", set()),
        ("sglang_exact.verify.x", "def f():\n  from sglang_exact.hooks import base",
         {"sglang_exact.hooks.base"}),
        ("sglang_exact.hooks.x", "from sglang_exact.client.bits import show",
         {"sglang_exact.client.bits"}),
        ("sglang_exact.bench.x", "import sglang_exact.rehearsal.server",
         {"sglang_exact.rehearsal.server"}),
        ("sglang_exact_kernels.x", "from sglang_exact import reasons",
         {"sglang_exact.reasons"}),
        ("sglang_exact.rehearsal.x", "from sglang_exact import scope", set()),
    ],
)  # fmt: skip
def test_a_wrong_import_is_found(module: str, source: str, found: set[str]) -> None:
    assert wrong(module, source) == found


def circles(imported: dict[str, set[str]]) -> list[str]:
    """Modules that import themselves by way of others."""
    found = []
    for start in sorted(imported):
        seen: set[str] = set()
        new = set(imported[start])
        while new:
            seen |= new
            new = {n for m in new for n in imported.get(m, ())} - seen
        found += [start] * (start in seen)
    return found


def test_what_serves_imports_in_no_circle() -> None:
    served = {
        module_of(path): set(imports(path.read_text(encoding="utf-8")))
        for path in sources()
        if wing_of(module_of(path)) == "served"
    }
    assert circles(served) == []
    # Control: the self-test asks the list of hooks what is on.
    served["sglang_exact.attestation"].add("sglang_exact.hooks")
    assert "sglang_exact.hooks.rank" in circles(served)


def test_the_asking_wing_has_floors() -> None:
    """client and view know neither verify nor bench, verify does not know bench."""
    apart = []
    for place, layer in enumerate(LAYERS):
        above = LAYERS[place + 1 :]
        for path in (ROOT / "sglang_exact" / layer).rglob("*.py"):
            found = set(imports(path.read_text(encoding="utf-8")))
            apart += [
                f"{path.relative_to(ROOT)}: {name}"
                for name in found
                if name.startswith(above)
            ]
    assert apart == []


def test_no_private_name_crosses_a_room() -> None:
    apart = []
    for layer in LAYERS:
        for path in (ROOT / "sglang_exact" / layer).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module:
                    room = node.module.split(".")[:2] == ["sglang_exact", layer]
                    apart += [
                        f"{path.name}: {node.module}.{name.name}"
                        for name in node.names
                        if name.name.startswith("_")
                        and not name.name.startswith("__")
                        and not room
                    ]
    assert apart == []


# What a server's process loads beside the served wing, and should not.
REST = {
    # The test hooks, and what says whether this is a rehearsal.
    "sglang_exact.rehearsal",
    "sglang_exact.rehearsal.environment",
}


@pytest.mark.host
def test_a_server_loads_nothing_of_the_other_wings() -> None:
    code = (
        "import sys\n"
        "from sglang_exact import launch_server, plugin\n"
        "try:\n    plugin.register()\nexcept SystemExit:\n    pass\n"
        "print(*sorted(m for m in sys.modules if m.startswith(('sglang_exact', "
        "'scripts'))))"
    )
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "sglang_exact.plugin" in loaded and "sglang_exact.hooks" in loaded
    other = {m for m in loaded if wing_of(m) not in ("served", "kernels", "root")}
    assert other <= REST, other - REST
