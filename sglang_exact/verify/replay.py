# SPDX-License-Identifier: Apache-2.0
"""A record as the reference: what it must be before anything is compared with it.

A file can be cut, edited, or be the record of something else; compared with less than
it promises, an answer would be equal without having been looked at.
"""

from __future__ import annotations

from pathlib import Path

from sglang_exact.client.answer import Case
from sglang_exact.verify import record
from sglang_exact.verify.arms import REFERENCE
from sglang_exact.verify.model import Reference
from sglang_exact.verify.plan import Plan

SHOWN = 3


def given_reference(path: Path | None) -> record.Contents | None:
    """The record to compare with, None if no file was given.

    Raises RecordError if it holds no answers of a plain server.
    """
    if path is None:
        return None
    contents = record.read(path)
    problems = _not_plain(contents)
    if problems:
        raise record.RecordError(
            f"{path}: {'; '.join(problems)}. Record a server without --speculative-* "
            "with sglang-exact record"
        )
    return contents


def _not_plain(contents: record.Contents) -> list[str]:
    if not contents.references:
        return ["holds no reference answer"]
    servers = [info for info in contents.servers if info.label == REFERENCE]
    if not servers:
        return ["holds a server's own answers: there was no plain reference"]
    problems = []
    said = [info.fields.get("speculative_algorithm") for info in servers]
    steps = sum(r.answer.counters.verify or 0 for r in contents.references.values())
    if any(said) or steps:
        problems.append(f"the recorded reference speculates ({steps} verify steps)")
    changed = (contents.end or {}).get("changed")
    if changed:
        problems.append(f"the server changed while it was recorded: {changed}")
    return problems


def check_answers(plan: Plan, answers: dict[str, Reference]) -> None:
    """Raise RecordError where a recorded answer is not one to the plan's question."""
    wrong = [
        f"{key}: {problem}"
        for key, case in plan.cases().items()
        if key in answers and (problem := _wrong(case, answers[key], plan.settings.top))
    ]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise record.RecordError(
            f"the record was changed after it was written: {'; '.join(wrong[:SHOWN])}"
            f"{more}; record again"
        )


def _wrong(case: Case, found: Reference, top: int) -> str:
    answer = found.answer
    length = len(answer.ids)
    if found.sha256 != case.prompt.sha256() or found.params != case.params():
        return "found an answer to another prompt or other parameters"
    if length > case.max_new_tokens:
        return f"found {length} tokens, expected {case.max_new_tokens} at most"
    if len(answer.logprobs) != length or None in answer.logprobs:
        return f"found {len(answer.logprobs)} logprobs, expected {length} finite ones"
    if len(answer.top) != length or any(len(row) != top for row in answer.top):
        return f"found top lists of other lengths than {length} times {top}"
    return ""
