# SPDX-License-Identifier: Apache-2.0
"""What differs between the pins of one host release and the source of another.

Reads source files only: any site-packages folder, wheel that was unzipped, or
checkout of SGLang will do, and nothing of it is imported.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from sglang_exact.hooks.base import Hook
from sglang_exact.host import compat
from sglang_exact.host import files as host_files
from sglang_exact.host import source as host
from sglang_exact.host import variables as host_variables

MISSING, SIGNATURE, SOURCE, UNPINNED, UNUSED = KINDS = (
    "missing",
    "signature",
    "source",
    "unpinned",
    "unused",
)
"""missing: the host lacks the target; signature: other parameters; source: other
code; unpinned: the pins lack the target; unused: a pin that no hook names."""


# What a host can be asked for beside its variables: a kind of name -> the files that
# declare it, and the class in them (None: every class).
DECLARED = {
    "server arguments": ("srt/arg_groups/fields/*.py", None),
    "sampling parameters": ("srt/sampling/sampling_params.py", "SamplingParams"),
}
VARIABLES = "variables"
INVENTORY = (*DECLARED, VARIABLES)


class HostTree(NamedTuple):
    """Source of a host release.

    `package` is the folder `sglang` itself. `stack` maps the distributions of
    `host.STACK` to the version this host asks for, or that lies beside it.
    """

    version: str
    package: Path
    stack: dict[str, str]


class Change(NamedTuple):
    """One target that is not as pinned.

    `expected` and `found` are parameter lists; `elsewhere` are dotted paths where a
    missing name is defined now, with "same source" or "other source"; `diff` holds
    the lines of a unified diff, empty where the pinned source is not at hand.
    """

    target: str
    kind: str
    hooks: dict[str, str]
    expected: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    elsewhere: dict[str, str] = {}
    diff: tuple[str, ...] = ()


def _package(site: Path) -> Path:
    for folder in (site / "sglang", site / "python" / "sglang", site):
        if (folder / "srt").is_dir():
            return folder.resolve()
    raise ValueError(
        f"found no sglang/srt in {site}; expected a site-packages folder, an unzipped "
        "wheel or a checkout of SGLang; fix: pass its path with --site"
    )


def _described(checkout: Path) -> str | None:
    """Version of a checkout, from its tags: 1.2.3, or 1.2.3-12-gabc0123."""
    try:
        ran = subprocess.run(
            ["git", "-C", str(checkout), "describe", "--tags", "--match", "v[0-9]*"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return ran.stdout.strip().removeprefix("v") if ran.returncode == 0 else None


def _version(package: Path, metadata: importlib.metadata.Distribution | None) -> str:
    if metadata is not None:
        return metadata.version
    file = package / "_version.py"
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        found = re.search(r"^__version__ = .*?['\"]([^'\"]+)['\"]$", text, re.M)
        if found:
            return found[1]
    described = _described(package)
    if described is None:
        raise ValueError(
            f"found no version of the host in {package}; expected sglang-*.dist-info "
            "beside it, _version.py in it, or git tags; fix: pass --version"
        )
    return described


def _required(
    package: Path, metadata: importlib.metadata.Distribution | None
) -> list[str]:
    if metadata is not None:
        return metadata.requires or []
    project = package.parent / "pyproject.toml"
    if not project.is_file():
        return []
    data = tomllib.loads(project.read_text(encoding="utf-8"))
    found: list[str] = data.get("project", {}).get("dependencies", [])
    return found


def _stack(required: Iterable[str], beside: Mapping[str, str]) -> dict[str, str]:
    """Versions of `host.STACK`: what the host pins, else what lies beside it."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    pinned: dict[str, str] = {}
    for text in required:
        try:
            needs = Requirement(text)
        except InvalidRequirement:
            continue
        exact = [s.version for s in needs.specifier if s.operator == "=="]
        if exact and needs.marker is None:
            pinned[canonicalize_name(needs.name)] = exact[0]
    found = {name: pinned.get(name) or beside.get(name) for name in host.STACK}
    return {name: version for name, version in found.items() if version}


def find_tree(site: Path | None = None, version: str | None = None) -> HostTree:
    """The host below `site`, or the installed one if None.

    Raises ValueError when there is none, or nothing tells its version.
    """
    from packaging.utils import canonicalize_name

    if site is None:
        installed = host.root()
        if installed is None:
            raise ValueError(
                "found no SGLang installed; expected one; fix: pip install sglang, or "
                "pass --site"
            )
        site = installed.parent
    package = _package(site)
    beside = {
        canonicalize_name(d.name): d
        for d in importlib.metadata.distributions(path=[str(package.parent)])
        if d.name
    }
    metadata = beside.get(canonicalize_name("sglang"))
    return HostTree(
        version or _version(package, metadata),
        package,
        _stack(
            _required(package, metadata),
            {name: dist.version for name, dist in beside.items()},
        ),
    )


def concerned(target: str, hooks: Iterable[Hook]) -> dict[str, str]:
    """Hooks that a target concerns: name -> "target" or "relied on"."""
    return {
        hook.name: "target" if target == hook.target else "relied on"
        for hook in hooks
        if target in (hook.target, *hook.relies_on)
    }


def collect(
    tree: HostTree, names: Iterable[str]
) -> tuple[dict[str, host.Fingerprint], list[str]]:
    """Fingerprints of the targets that a host has, and the targets it lacks."""
    found, missing = {}, []
    for name in names:
        try:
            found[name] = host.fingerprint(name, tree.package)
        except host.TargetMissing:
            missing.append(name)
    return found, missing


def compare(
    pins: compat.Pins,
    tree: HostTree,
    hooks: Iterable[Hook],
    old: HostTree | None = None,
) -> list[Change]:
    """Every difference between the pins and a host, missing targets first.

    `old` is the source that the pins were made from; with it, changes carry a diff.
    """
    hooks = list(hooks)
    names = sorted({n for hook in hooks for n in (hook.target, *hook.relies_on)})
    found, missing = collect(tree, names)
    changes = [
        Change(
            name,
            MISSING,
            concerned(name, hooks),
            elsewhere=elsewhere(name, tree, pins.targets.get(name)),
        )
        for name in missing
    ]
    for name, new in found.items():
        pin = pins.targets.get(name)
        if pin == new:
            continue
        kind = SIGNATURE if pin and pin.params != new.params else SOURCE
        changes.append(
            Change(
                name,
                kind if pin else UNPINNED,
                concerned(name, hooks),
                pin.params if pin else (),
                new.params,
                diff=_diff(name, old, tree) if pin and old else (),
            )
        )
    changes += [
        Change(name, UNUSED, {}) for name in sorted(set(pins.targets) - set(names))
    ]
    return sorted(changes, key=lambda c: (KINDS.index(c.kind), c.target))


def _diff(target: str, old: HostTree, new: HostTree) -> tuple[str, ...]:
    try:
        before = host.source_lines(target, old.package)
    except host.TargetMissing:
        return ()
    after = host.source_lines(target, new.package)
    return tuple(
        difflib.unified_diff(before, after, old.version, new.version, "", "", 2, "")
    )


def elsewhere(
    target: str, tree: HostTree, pin: host.Fingerprint | None
) -> dict[str, str]:
    """Where in the host a missing name is defined, and whether as pinned."""
    name = target.rpartition(".")[2]
    word = re.compile(rf"^\s*(?:async def|def|class) {re.escape(name)}\b", re.M)
    places = {}
    for file in sorted((tree.package / "srt").rglob("*.py")) + sorted(
        (tree.package / "kernels").rglob("*.py")
    ):
        text = file.read_text(encoding="utf-8")
        if not word.search(text):
            continue
        module = ".".join(file.relative_to(tree.package.parent).with_suffix("").parts)
        for path in _paths(ast.parse(text).body, name):
            where = f"{module}.{path}"
            same = pin is not None and host.fingerprint(where, tree.package) == pin
            places[where] = "same source" if same else "other source"
    return places


def inventory(tree: HostTree) -> dict[str, list[str]]:
    """Names of what a host can be asked for; no pin of a function sees a new one.

    Variables stand with the default that the host gives them: `NAME = False`.
    """
    read = host_variables.read(tree.package)
    found = {
        VARIABLES: sorted(
            f"{name} = {default}" if default else name
            for name, defaults in read.items()
            for default in defaults or {""}
        )
    }
    for kind, (files, owner) in DECLARED.items():
        names: set[str] = set()
        for file in tree.package.glob(files):
            body = ast.parse(file.read_text(encoding="utf-8")).body
            for node in body:
                if isinstance(node, ast.ClassDef) and owner in (None, node.name):
                    names.update(_declared(node))
        found[kind] = sorted(names)
    return found


def _declared(node: ast.ClassDef) -> Iterator[str]:
    """Public names that a class body assigns or annotates."""
    for item in node.body:
        targets: list[ast.expr] = []
        if isinstance(item, ast.AnnAssign):
            targets = [item.target]
        elif isinstance(item, ast.Assign):
            targets = item.targets
        for target in targets:
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                yield target.id


def inventory_changes(
    pinned: Mapping[str, list[str]], found: Mapping[str, list[str]]
) -> dict[str, dict[str, list[str]]]:
    """Per kind of name the new and the gone ones; kinds that are equal are left out."""
    changes = {}
    for kind in INVENTORY:
        before, now = set(pinned.get(kind, ())), set(found.get(kind, ()))
        if kind in pinned and before != now:
            changes[kind] = {"new": sorted(now - before), "gone": sorted(before - now)}
    return changes


def _paths(body: Iterable[ast.stmt], name: str) -> Iterator[str]:
    """Dotted paths of the definitions of `name`, in functions not looked into."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{path}" for path in _paths(node.body, name))
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if isinstance(node, kinds) and node.name == name:
            yield name


def file_changes(pins: compat.Pins, tree: HostTree) -> dict[str, list[str]]:
    """Whole files that are changed, gone or new; kinds without any are left out."""
    pinned = host_files.pinned(pins.version)
    if not pinned:
        return {}
    found = host_files.changes(pinned, tree.package)._asdict()
    return {kind: names for kind, names in found.items() if names}


def stack_changes(pins: compat.Pins, tree: HostTree) -> dict[str, tuple[str, str]]:
    """Packages under the host whose version differs: name -> (pinned, now)."""
    return {
        name: (pins.stack.get(name, "none"), tree.stack.get(name, "unknown"))
        for name in host.STACK
        if pins.stack.get(name) != tree.stack.get(name)
    }
