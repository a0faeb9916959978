# SPDX-License-Identifier: Apache-2.0
"""Print what a host changed against its pins, by function and file; write pins.

    scripts/pin_host [--site PATH] [--against VERSION] [--against-site PATH]
                     [--json] [--record FILE] [--write] [--device-run FOLDER]

Without --site the installed SGLang is read; PATH is a site-packages folder, an
unzipped wheel or a checkout of SGLang. Status 0: as pinned, or written; 1: something
changed or is missing; 2: could not run. New pins also need a run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sglang_exact import hooks
from sglang_exact.host import compat
from sglang_exact.host import files as host_files
from tools import ROOT
from tools.pins import changes as host_changes
from tools.pins.changes import Change, HostTree

PINS = ROOT / "sglang_exact" / "host" / "pins"
NAMES = 16


def latest_pins() -> str:
    """The newest pinned release."""
    from packaging.version import Version

    return max(compat.pinned_versions(), key=Version)


def pinned_source(site: Path | None, version: str) -> HostTree | None:
    """The source that the pins were made from, if it is at hand."""
    try:
        tree = host_changes.find_tree(site)
    except ValueError:
        if site is not None:
            raise
        return None
    if tree.version == version:
        return tree
    if site is None:
        return None
    raise ValueError(
        f"found SGLang {tree.version} in {site}; expected {version}; fix: pass the "
        "source of the release that --against names"
    )


def describe(change: Change, most: int) -> list[str]:
    """The lines of the report for one change, at most `most` of its diff (0: all)."""
    lines = [f"{change.kind:<10} {change.target}"]
    if change.hooks:
        named = ", ".join(f"{name} ({how})" for name, how in change.hooks.items())
        lines.append(f"           hooks: {named}")
    for path, how in change.elsewhere.items():
        lines.append(f"           now at: {path} ({how})")
    if change.kind == host_changes.SIGNATURE:
        lines.append(f"           pinned: {', '.join(change.expected)}")
        lines.append(f"           found:  {', '.join(change.found)}")
    diff = change.diff[2:]
    shown = diff[:most] if most else diff
    lines += [f"           | {line}".rstrip() for line in shown]
    if len(shown) < len(diff):
        more = len(diff) - len(shown)
        lines.append(f"           | ... {more} more lines (--diff-lines 0 shows all)")
    return lines


def record(pins: compat.Pins, tree: HostTree, changes: list[Change]) -> dict[str, Any]:
    """The report as JSON types."""
    names = hooks.pinned_names()
    off = {c.target for c in changes}
    files = host_changes.file_changes(pins, tree)
    # What a host can be asked for stands in its files: as pinned while they are.
    asked = host_changes.inventory(tree) if files else pins.inventory
    return {
        "host": tree.version,
        "path": str(tree.package),
        "against": pins.version,
        "targets": len(names),
        "as_pinned": len([n for n in names if n not in off]),
        "counts": {
            kind: sum(c.kind == kind for c in changes) for kind in host_changes.KINDS
        },
        "hooks_concerned": sorted({name for c in changes for name in c.hooks}),
        "hooks": len(hooks.ALL),
        "stack": host_changes.stack_changes(pins, tree),
        "changes": [c._asdict() for c in changes],
        "names": host_changes.inventory_changes(pins.inventory, asked),
        "files": files,
    }


def show(found: dict[str, Any], changes: list[Change], most: int) -> None:
    """Print the report for people."""
    print(f"SGLang {found['host']} ({found['path']})")
    counts = ", ".join(f"{n} {kind}" for kind, n in found["counts"].items() if n)
    print(
        f"against the pins of {found['against']}: {found['targets']} targets, "
        f"{found['as_pinned']} as pinned{', ' + counts if counts else ''}"
    )
    for change in changes:
        print()
        print("\n".join(describe(change, most)))
    named = {**found["names"], "files": found["files"]}
    for kind, names in named.items():
        for how, which in names.items():
            more = f" and {len(which) - NAMES} more (--json)" if which[NAMES:] else ""
            if which:
                print(f"\n{how:<10} {kind}: {', '.join(which[:NAMES])}{more}")
    for name, (pinned, now) in found["stack"].items():
        print(f"\nstack      {name} {now}, pinned {pinned}")
    if changes:
        concerned = found["hooks_concerned"]
        print(f"\nhooks concerned: {len(concerned)} of {found['hooks']}")


def save(found: dict[str, Any], path: Path) -> None:
    """Write the report for docs/data/: no folders of this machine, no source."""
    changes = [{k: v for k, v in c.items() if k != "diff"} for c in found["changes"]]
    kept = {**found, "changes": changes}
    del kept["path"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def device_run(folder: str, version: str) -> str:
    """`folder` if its results prove this host release, else ValueError."""
    proven = []
    for path in sorted((ROOT / folder).glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("versions", {}).get("sglang") != version:
            continue
        if "rows" not in result:  # a measurement of speed or steps
            continue
        if result.get("failed") or not result["rows"]:
            raise ValueError(
                f"found failures or no rows in {path}; expected a run that passed; "
                "fix: read it, and run scripts/gpu_proof again"
            )
        proven.append(path)
    if not proven:
        raise ValueError(
            f"found no result for SGLang {version} in {ROOT / folder}; expected one; "
            "fix: run scripts/gpu_proof --out " + folder
        )
    return folder


def write(tree: HostTree, run: str, folder: Path) -> Path:
    """Write the pins file of a host that has every target."""
    found, missing = host_changes.collect(tree, hooks.pinned_names())
    if missing:
        raise ValueError(
            f"found {len(missing)} targets missing, first {missing[0]}; expected all; "
            "fix: port the hooks that this command names"
        )
    data = {
        "version": tree.version,
        "device_run": run,
        "stack": tree.stack,
        "inventory": host_changes.inventory(tree),
        "targets": {
            name: {"params": list(item.params), "sha256": item.sha256}
            for name, item in sorted(found.items())
        },
    }
    path = folder / f"sglang-{tree.version}.json"
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    known = host_files.pinned(tree.version) or host_files.pinned(latest_pins())
    files = host_files.collect(tree.package, known)
    beside = folder / f"files-{tree.version}.json"
    beside.write_text(json.dumps(files, indent=0) + "\n", encoding="utf-8")
    return path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--site", type=Path, help="folder that holds the host")
    parser.add_argument("--version", help="name of a host that does not tell it")
    parser.add_argument(
        "--against", metavar="VERSION", help="pins to compare with (default: newest)"
    )
    parser.add_argument(
        "--against-site", type=Path, help="source of that release, for the diffs"
    )
    parser.add_argument("--diff-lines", type=int, default=16, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--record", type=Path, help="file for the report, as JSON")
    parser.add_argument("--write", action="store_true", help="write the pins file")
    parser.add_argument("--out", type=Path, default=PINS, help="folder for --write")
    parser.add_argument(
        "--device-run", metavar="FOLDER", help="results that prove this host on a GPU"
    )
    return parser.parse_args()


def run(args: argparse.Namespace) -> int:
    """Compare, and write if asked to; raises ValueError where it cannot."""
    tree = host_changes.find_tree(args.site, args.version)
    against = args.against or latest_pins()
    pins = compat.load(against)
    if pins is None:
        raise ValueError(
            f"found no pins of SGLang {against}; expected one of "
            f"{', '.join(compat.pinned_versions())}; fix: correct --against"
        )
    old = pinned_source(args.against_site, against)
    changes = host_changes.compare(pins, tree, hooks.ALL, old)
    found = record(pins, tree, changes)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        show(found, changes, args.diff_lines)
    if args.record:
        save(found, args.record)
    if not args.write:
        return 1 if changes or found["names"] or found["files"] else 0
    known = compat.load(tree.version)
    proven = known.device_run if known else ""
    if args.device_run:
        proven = device_run(args.device_run, tree.version)
    path = write(tree, proven, args.out)
    print(f"wrote {path} with {len(hooks.pinned_names())} targets", file=sys.stderr)
    if not proven:
        print(
            "these pins are refused until --device-run names a run on a GPU "
            "(docs/upgrading.md)",
            file=sys.stderr,
        )
    return 0


def main() -> int:
    try:
        return run(arguments())
    except (ValueError, OSError) as error:
        print(f"pin_host: {error}", file=sys.stderr)
        return 2
