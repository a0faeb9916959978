# SPDX-License-Identifier: Apache-2.0
"""`python -m sglang_exact.verify.continuations RECORD --rate 0.8 > oracle.json`

Turns a record of a plain server into a plan for the oracle drafter (see
docs/rehearsal.md), so that speculation can be verified at any acceptance without a
draft model that was trained for it. A record holds no prompts: they are built again
from its settings, and their hashes compared. The plan is written to stdout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from sglang_exact.verify import plan as planning
from sglang_exact.verify import record
from sglang_exact.verify.plan import Settings


def continuations(path: Path, prompts: Path | None = None) -> list[dict[str, Any]]:
    """{"input_ids", "output_ids"} of every recorded answer to a prompt of ids.

    `prompts`: where the user's own prompts lie now, if not where the record says.
    Raises RecordError if the prompts cannot be built again.
    """
    contents = record.read(path)
    header = contents.header
    own = prompts or (Path(header["prompts"]) if header.get("prompts") else None)
    built = planning.build(
        Settings(
            header["suite"],
            tuple(header["arms"]),
            header.get("repeats") or Settings().repeats,
            header.get("tokens"),
            own,
            header.get("num_prompts"),
            header["seed"],
            max_prompt_tokens=header.get("max_prompt_tokens"),
        ),
        by_ids=bool(header["by_ids"]),
        vocab_size=header["vocab_size"],
    )
    cases = built.cases()
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for key, reference in contents.references.items():
        case = cases.get(key)
        if case is None:
            raise record.RecordError(
                f"{path}: the prompt of {key} cannot be built again; expected the same "
                "version of this tool and the same --prompts file"
            )
        ids = case.prompt.ids
        # Several cases may share a prompt: the oracle knows one answer to each.
        if ids is not None and len(found.get(ids, ())) < len(reference.answer.ids):
            found[ids] = reference.answer.ids
    if not found:
        raise record.RecordError(
            f"{path}: holds no answer to a prompt of ids; record it with "
            "--skip-tokenizer-init"
        )
    return [{"input_ids": list(k), "output_ids": list(v)} for k, v in found.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the plan; 2 if the record cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m sglang_exact.verify.continuations")
    parser.add_argument("record", type=Path)
    parser.add_argument("--rate", type=float, default=0.8, help="drafts that are right")
    parser.add_argument("--seed", type=int, default=1, help="which ones are")
    parser.add_argument("--prompts", type=Path, help="own prompts, if moved")
    given = parser.parse_args(argv)
    try:
        known = continuations(given.record, given.prompts)
    except (ValueError, KeyError, OSError) as error:
        sys.stderr.write(f"sglang-exact cannot run this: {error}\n")
        return 2
    plan = {"rate": given.rate, "seed": given.seed, "continuations": known}
    sys.stdout.buffer.write(orjson.dumps(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
