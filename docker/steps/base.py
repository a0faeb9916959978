#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write down what the base image holds, and later prove that nothing was replaced.

    base.py record FILE --sglang VERSION --cuda 13
    base.py compare FILE

`record` refuses a base that cannot serve exactly: another SGLang, a torch for another
CUDA, a Python that is too old, no nvcc. `compare` fails when a distribution of the base
is gone, moved or has another version; what was added is printed. Standard library only:
the first call comes before this package is installed.

Exit codes: 0 as expected, 1 refused, with every reason.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

MINIMUM_PYTHON = (3, 11)
# The one distribution that is ours to replace, by an image built on an older one of it.
OURS = "sglang-exact"
# Named in the report; every other distribution is compared all the same.
STACK = (
    "torch",
    "triton",
    "sglang",
    "sglang-kernel",
    "sgl-deep-gemm",
    "flashinfer-python",
    "transformers",
    "numpy",
)


class Found(NamedTuple):
    """A distribution: its version and the folder it is installed in."""

    version: str
    folder: str


def say(text: str) -> None:
    """One line of the build's log."""
    sys.stdout.write(f"{text}\n")


def installed(ours: bool = True) -> dict[str, Found]:
    """Every distribution on the search path by normalised name; the first one wins.

    `ours` False leaves this package out.
    """
    found: dict[str, Found] = {}
    for item in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", item.metadata["Name"] or "").lower()
        if name and (name != OURS or ours):
            folder = str(item.locate_file(""))
            found.setdefault(name, Found(item.version, folder))
    return found


def torch_cuda() -> str | None:
    """CUDA version torch was built for, from its version file; None without."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        target, value = "", None
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            target, value = node.target.id, node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            target, value = node.targets[0].id, node.value
        if target == "cuda" and isinstance(value, ast.Constant):
            return None if value.value is None else str(value.value)
    return None


def nvcc() -> str | None:
    """Path of the CUDA compiler, or None."""
    home = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin" / "nvcc"
    return shutil.which("nvcc") or (str(home) if home.is_file() else None)


def base_reasons(sglang: str, cuda: str, found: dict[str, Found]) -> list[str]:
    """Why this base cannot serve exactly."""
    reasons = []
    version = found["sglang"].version if "sglang" in found else "none"
    if version != sglang:
        reasons.append(
            f"found SGLang {version}; expected {sglang}; "
            f"fix: --build-arg BASE_IMAGE with an image of SGLang {sglang}"
        )
    built = torch_cuda() or "none"
    if built.partition(".")[0] != cuda:
        reasons.append(
            f"found torch built for CUDA {built}; expected CUDA {cuda}; "
            f"fix: --build-arg BASE_IMAGE with a CUDA {cuda} image"
        )
    if sys.version_info[:2] < MINIMUM_PYTHON:
        reasons.append(
            f"found Python {sys.version_info[0]}.{sys.version_info[1]}; expected "
            "3.11 or newer; fix: another BASE_IMAGE"
        )
    if nvcc() is None:
        reasons.append(
            "found no nvcc; expected the CUDA compiler (DeepGEMM compiles its kernels "
            "when the server starts); fix: a BASE_IMAGE that has it"
        )
    return reasons


def compare(before: dict[str, Found], after: dict[str, Found]) -> list[str]:
    """What became of the base's distributions, one reason per difference."""
    reasons = []
    for name, was in sorted(before.items()):
        now = after.get(name)
        if now is None:
            reasons.append(f"found no {name}; expected {was.version} as in the base")
        elif now != was:
            reasons.append(
                f"found {name} {now.version} in {now.folder}; expected {was.version} "
                f"in {was.folder} as in the base"
            )
    return reasons


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    record = verbs.add_parser("record")
    record.add_argument("file", type=Path)
    record.add_argument("--sglang", required=True)
    record.add_argument("--cuda", required=True, help="major version")
    verbs.add_parser("compare").add_argument("file", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run one of the two commands."""
    args = parse(argv)
    found = installed(ours=args.verb == "compare")
    if args.verb == "record":
        reasons = base_reasons(args.sglang, args.cuda, found)
        args.file.parent.mkdir(parents=True, exist_ok=True)
        args.file.write_text(json.dumps(found, indent=1, sort_keys=True))
    else:
        read = json.loads(args.file.read_text(encoding="utf-8"))
        before = {name: Found(*item) for name, item in read.items()}
        reasons = compare(before, found)
        added = sorted(f"{n} {found[n].version}" for n in found.keys() - before.keys())
        say(f"added: {', '.join(added) or 'nothing'}")
    for name in STACK:
        if name in found:
            say(f"{args.verb}: {name} {found[name].version}")
    if reasons:
        text = "\n".join(f"  - {reason}" for reason in reasons)
        sys.stderr.write(f"this image cannot be built:\n{text}\n")
        return 1
    say(f"{args.verb}: {len(found)} distributions, as expected")
    return 0


if __name__ == "__main__":
    sys.exit(main())
