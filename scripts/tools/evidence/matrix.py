# SPDX-License-Identifier: Apache-2.0
"""The rows of the report that this project began with, ours beside the stock host's.

A part of `scripts/evidence`, which puts them into docs/evidence.md. Each cell is equal
answers of compared ones, with the layers they were made with. A cell without a file
stays empty: nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tools.evidence.rows import different, load

COLUMNS = ("ours", "stock, deterministic", "stock, default")
LONG = ("long-2k", "long-8k", "long-32k", "long-128k")


class Found(NamedTuple):
    """Equal answers of compared ones at a number of layers."""

    equal: int
    compared: int
    layers: int
    cut_off: bool = False

    def __str__(self) -> str:
        cut = ", cut off" * self.cut_off
        return f"{self.equal:,}/{self.compared:,} ({self.layers} layers{cut})"


def verified(server: str, *arms: str) -> list[Found]:
    """What the verifier found of a server, in the named arms of it."""
    return [
        Found(
            a["compared"] - a["different"],
            a["compared"],
            found["layers"],
            a["state"] == "not reached",
        )
        for found in load("gpu/verify-*.json")
        for row in found["rows"]
        for a in row["arms"]
        if row["arm"] == server and a["arm"] in arms and not row.get("planted")
    ]


def proved(arm: str, **wanted: Any) -> list[Found]:
    """Passes of the proof on one GPU; ids and, where asked, logprobs are equal."""
    rows = [
        (row, proof["layers"])
        for proof in load("gpu/proof-*.json")
        for row in proof.get("rows", ())
        if proof.get("tp", 1) == 1 and row["arm"] == arm and row["tally"] is not None
    ]
    return [
        Found(row["tally"]["logprobs_equal"], row["tally"]["compared"], layers)
        for row, layers in rows
        if row["tally"]["logprobs_equal"] is not None
        and all(row[key] == value for key, value in wanted.items())
    ]


def older(arm: str) -> str:
    """Answers of an arm whose proof is older than the newest one, or ""."""
    proofs = [proof for proof in load("gpu/proof-*.json") if proof.get("rows")]
    newest = max(proof["date"] for proof in proofs)
    return " and ".join(
        f"{row['tally']['compared']} answers of {proof['date']}"
        for proof in proofs
        for row in proof["rows"]
        if row["arm"] == arm
        and (row["tally"] or {}).get("logprobs_equal") is not None
        and proof["date"] < newest
    )


def traffic(*arms: str) -> list[Found]:
    """Passes under traffic."""
    return [
        Found(
            row["tally"]["compared"] - different(row),
            row["tally"]["compared"],
            found["layers"],
        )
        for found in load("gpu/traffic*.json")
        for row in found["rows"]
        if row["arm"] in arms
    ]


def benched(name: str, server: str, **wanted: Any) -> list[Found]:
    """Rows of the bench at 64 layers; ids alone are compared there."""
    return [
        Found(row["exactness"]["ids_equal"], row["exactness"]["compared"], 64)
        for found in load(f"bench/{name}.json")
        for row in found["rows"]
        if row["server"] == server
        and row["exactness"]["compared"]
        and all(row[key] == value for key, value in wanted.items())
    ]


def _added(found: Iterable[Found]) -> str:
    """One number for each number of layers, the widest model first."""
    sums: dict[int, Found] = {}
    for one in found:
        old = sums.get(one.layers, Found(0, 0, one.layers))
        sums[one.layers] = Found(
            old.equal + one.equal,
            old.compared + one.compared,
            one.layers,
            old.cut_off or one.cut_off,
        )
    return ", ".join(str(sums[layers]) for layers in sorted(sums, reverse=True))


def rows() -> list[tuple[str, ...]]:
    """Name of the row, then a cell for each of COLUMNS."""
    made: list[tuple[str, list[Found], list[Found], list[Found]]] = [
        (
            "speculation on against off, one at a time",
            verified("dflash", "speculation") + proved("dflash8", concurrency=1),
            verified("stock", "speculation"),
            verified("stock-default", "speculation"),
        ),
        (
            "8 in flight",
            verified("dflash", "in-flight-8")
            + proved("dflash8", concurrency=8, rate=0.8),
            verified("stock", "in-flight-8") + proved("stock", concurrency=8),
            verified("stock-default", "in-flight-8"),
        ),
        (
            "every draft rejected",
            verified("dflash", "rejected") + proved("dflash8", rate=0.0),
            verified("stock", "rejected"),
            verified("stock-default", "rejected"),
        ),
        (
            "at most 1 and 32 running requests",
            traffic("running-1", "running-many"),
            [],
            [],
        ),
        (
            "plain against plain, another batch",
            verified("plain", "plain-in-flight-8")
            + proved("plain", concurrency=1)
            + proved("plain-32", concurrency=32),
            verified("stock-plain", "plain-in-flight-8"),
            verified("stock-default-plain", "plain-in-flight-8")
            + benched("accept", "host-plain", concurrency=32),
        ),
        (
            "prompts of 2k to 128k",
            verified("dflash", *LONG)
            + benched("decode-table", "exact-dflash2", prompt_tokens=2048)
            + benched("decode-table", "exact-dflash2", prompt_tokens=131072),
            verified("stock", *LONG),
            verified("stock-default", *LONG),
        ),
        (
            "1,200 to 3,000 requests, 8 in flight",
            verified("dflash", "repeats"),
            verified("stock", "repeats"),
            verified("stock-default", "repeats"),
        ),
        (
            "one prompt of 60,000 tokens, 50 times",
            verified("dflash", "long-repeat"),
            verified("stock", "long-repeat"),
            verified("stock-default", "long-repeat"),
        ),
        (
            "three starts with empty caches",
            traffic("restart-1", "restart-2", "restart-3"),
            [],
            [],
        ),
    ]
    return [(name, *map(_added, cells)) for name, *cells in made]
