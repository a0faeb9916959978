#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prove exactness with one GPU: record plain decoding, then verify speculation.

    prove.py --out DIR [--suite quick] -- <the flags of the exact server>

One card cannot hold two servers of a large model, so they run one after the other: the
same flags without --speculative-*, of which a record is made, then the flags as given,
compared with the record. Everything ends up in DIR: plain.jsonl, exact.jsonl (the
records), report.html, result.json, row.json, plain.log, exact.log. What an earlier
proof left there is moved to DIR/earlier-1, -2, ...

Exit status: 0 verified, 1 divergence (and only that), 2 could not run, 130 stopped.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

try:
    from sglang_exact.rehearsal.server import Server
except ImportError as error:
    sys.stderr.write(
        f"prove: found no sglang_exact ({error}); expected it in this Python; fix: "
        "install sglang-exact\n"
    )
    sys.exit(2)

VERIFIED, DIVERGENCE, COULD_NOT_RUN, STOPPED = 0, 1, 2, 130
# The servers of a proof talk to this process alone, on a free port and without a key.
OURS = ("--model-path", "--host", "--port", "--api-key", "--admin-api-key")
LOGS = ("plain.jsonl", "plain.log", "exact.log")
RESULTS = ("exact.jsonl", "report.html", "result.json", "row.json")
FILES = (*LOGS, *RESULTS)


def say(text: str) -> None:
    """One line of progress."""
    sys.stderr.write(f"prove: {text}\n")
    sys.stderr.flush()


def without(flags: Sequence[str], drop: Sequence[str]) -> list[str]:
    """`flags` without those that start with one of `drop`, and without their values."""
    kept, dropping = [], False
    for word in flags:
        if word.startswith("--"):
            name = word.partition("=")[0]
            dropping = any(
                name == item or (item.endswith("-") and name.startswith(item))
                for item in drop
            )
        if not dropping:
            kept.append(word)
    return kept


def value_of(flags: Sequence[str], name: str) -> str | None:
    """The last value of a flag, as `--name value` or `--name=value`."""
    found = None
    for word, after in zip(flags, [*flags[1:], ""], strict=False):
        if word == name:
            found = after
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def set_aside(out: Path, keep: Path | None) -> None:
    """Move what an earlier proof left in `out`, but for the reference `keep`.

    A record is never written over, so a second proof would end with its first answer.
    """
    left = [out / name for name in FILES if (out / name).exists()]
    if keep is not None:
        left = [path for path in left if not path.samefile(keep)]
    if not left:
        return
    number = 1
    while (folder := out / f"earlier-{number}").exists():
        number += 1
    folder.mkdir()
    for path in left:
        path.rename(folder / path.name)
    say(f"what an earlier proof left is in {folder}")


def command(verb: str, url: str, args: argparse.Namespace) -> list[str]:
    """The command line of a client of the server at `url`."""
    line = [sys.executable, "-m", "sglang_exact", verb, "--base-url", url]
    return [*line, "--suite", args.suite, *shlex.split(args.ask)]


def served(
    stage: str, args: argparse.Namespace, flags: Sequence[str], client: Sequence[str]
) -> int:
    """Run a client against a server of these flags; the client's exit status."""
    log = args.out / f"{stage}.log"
    say(f"starting the {stage} server, log in {log}")
    server = Server(
        args.model,
        flags=flags,
        device=args.device,
        log=log,
        start_timeout_s=args.start_timeout,
    )
    began = time.monotonic()
    try:
        with server:
            say(f"ready after {time.monotonic() - began:.0f} s")
            verb, *rest = client
            return subprocess.run(
                [*command(verb, server.url, args), *rest], check=False
            ).returncode
    except (RuntimeError, OSError) as error:
        say(f"the {stage} server cannot be used: {error}")
        return COULD_NOT_RUN


def prove(args: argparse.Namespace) -> int:
    """Both stages; see the module's text."""
    own = without(args.flags, OURS)
    reference = args.reference
    set_aside(args.out, reference)
    if reference is None:
        reference = args.out / "plain.jsonl"
        plain = without(own, ("--speculative-",))
        status = served(
            "plain", args, plain, ["record", "--output-file", str(reference)]
        )
        if status != 0:
            return COULD_NOT_RUN
    files = ("--html", "report.html"), ("--json", "result.json")
    files += (("--submit-row", "row.json"), ("--output-file", "exact.jsonl"))
    written = [x for flag, name in files for x in (flag, str(args.out / name))]
    status = served(
        "exact", args, own, ["verify", "--reference", str(reference), *written]
    )
    if status not in (VERIFIED, DIVERGENCE, STOPPED):
        status = COULD_NOT_RUN
    elif status == DIVERGENCE and not any((args.out / x).exists() for x in RESULTS):
        # It wrote nothing: Python ended before the client compared anything.
        status = COULD_NOT_RUN
    say(f"status {status}; everything is in {args.out}")
    return status


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; refuses flags of which no proof can be made."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", default="quick", choices=("quick", "standard"))
    parser.add_argument("--reference", type=Path, help="an older plain.jsonl")
    parser.add_argument("--ask", default="", help="more options of record and verify")
    parser.add_argument("--start-timeout", type=float, default=3600.0, help="seconds")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    args = parser.parse_args(list(argv))
    try:
        shlex.split(args.ask)
    except ValueError as error:
        parser.error(f"found --ask {args.ask!r} ({error}); expected balanced quotes")
    args.flags = args.flags[1:] if args.flags[:1] == ["--"] else args.flags
    args.model = value_of(args.flags, "--model-path")
    if args.model is None:
        parser.error("found no --model-path; expected -- and the server's flags")
    if value_of(args.flags, "--speculative-algorithm") is None:
        parser.error(
            "found no --speculative-algorithm; expected the flags of the speculative "
            "server (the plain ones are derived from them)"
        )
    if args.reference is not None and not args.reference.is_file():
        parser.error(f"found no file {args.reference}; expected a recorded reference")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.out):
            pass
    except OSError as error:
        parser.error(f"found {error}; expected a folder for --out that can be written")
    return args


def main(argv: Sequence[str]) -> int:
    """The whole proof; what goes wrong here is no divergence."""
    try:
        return prove(parse(argv))
    except OSError as error:
        say(f"could not run: {error}")
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        say("stopped")
        return STOPPED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
