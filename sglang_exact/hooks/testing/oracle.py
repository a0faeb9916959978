# SPDX-License-Identifier: Apache-2.0
"""The oracle drafter: drafts are a known continuation, wrong at a chosen rate.

Acceptance then is a setting instead of a property of a draft model: every commit
length and every rejection pattern can be reached with random weights. The rule is a
function of (seed, prompt, absolute position) alone, so it does not depend on the
algorithm, on the batch or on how earlier blocks ended. Token values are all it changes:
masks, positions and links stay the drafter's own, so that a tree stays a tree.

Configured by `SGLANG_EXACT_TEST_ORACLE=FILE`, JSON:
    {"rate": 0.8, "seed": 1,
     "continuations": [{"input_ids": [...], "output_ids": [...]}, ...]}
The file is read again when its modification time changes, so one running server can
serve several rates. rate 1.0 keeps every draft, 0.0 makes every draft wrong: a wrong
draft is never the known token. Prompts that are not in the file, and positions beyond
the known continuation, get arbitrary valid tokens.

The tables lie on the device and are indexed by the positions of the verified block,
which are on the device too: no synchronisation per step, and no use of a request's
`output_ids`, which lag behind under overlap scheduling.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_exact.hooks.base import hook

VARIABLE = "SGLANG_EXACT_TEST_ORACLE"

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""Constants of the splitmix64 generator (Steele, Lea and Flood, 2014)."""


@dataclass(frozen=True)
class Continuation:
    """A prompt and the tokens that plain decoding gave for it."""

    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What an oracle file says.

    Attributes:
        rate: part of the drafts that are kept, 0.0 to 1.0.
        seed: of the choice which ones.
        continuations: what is known.
        in_step: the choice depends on the place in the answer alone, so that requests
            which begin together end together.
    """

    rate: float
    seed: int
    continuations: tuple[Continuation, ...]
    in_step: bool = False


def read_plan(path: str | Path) -> Plan:
    """Read an oracle file.

    Raises:
        ValueError: a field is missing, unknown or out of range.
    """
    raw = json.loads(Path(path).read_text())
    unknown = set(raw) - {"rate", "seed", "continuations", "in_step"}
    missing = {"rate", "seed", "continuations"} - set(raw)
    if unknown or missing:
        raise ValueError(
            f"{path}: found unknown {sorted(unknown)}, missing {sorted(missing)}; "
            "expected rate, seed and continuations"
        )
    rate = float(raw["rate"])
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"{path}: found rate {rate}, expected 0.0 to 1.0")
    known = tuple(
        Continuation(tuple(c["input_ids"]), tuple(c["output_ids"]))
        for c in raw["continuations"]
    )
    return Plan(rate, int(raw["seed"]), known, bool(raw.get("in_step")))


def write_plan(
    path: str | Path,
    rate: float,
    continuations: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    seed: int = 1,
    in_step: bool = False,
) -> None:
    """Write an oracle file in one step, with a new modification time.

    Args:
        path: of the file.
        rate, seed, in_step: see `Plan`.
        continuations: (input_ids, output_ids) pairs.
    """
    path = Path(path)
    before = path.stat().st_mtime_ns if path.exists() else 0
    known = [
        {"input_ids": list(prompt), "output_ids": list(output)}
        for prompt, output in continuations
    ]
    plan = {"rate": rate, "seed": seed, "in_step": in_step, "continuations": known}
    text = json.dumps(plan)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    if new.stat().st_mtime_ns <= before:
        os.utime(new, ns=(before + 1, before + 1))
    new.replace(path)


def _mixed(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def draft_row(
    prompt: Sequence[int],
    output: Sequence[int],
    plan: Plan,
    vocab_size: int,
    width: int,
) -> Any:
    """Draft token for every absolute position of one prompt.

    Args:
        prompt, output: token ids; position p holds the p-th of their concatenation.
        plan: rate and seed; its continuations are not used.
        vocab_size: wrong tokens are drawn from 0 to vocab_size - 1.
        width: length of the row; positions past the known ones get arbitrary tokens.

    Returns:
        int64 [width].
    """
    known = np.array([*prompt, *output], dtype=np.int64)[:width]
    salt, first = plan.seed << 32, len(prompt)
    if not plan.in_step:
        salt, first = salt + zlib.crc32(np.asarray(prompt, np.int64).tobytes()), 0
    with np.errstate(over="ignore"):
        start = _mixed(np.array([salt & (2**64 - 1)], dtype=np.uint64))
        places = np.arange(1 - 2 * first, 2 * (width - first) + 1)
        steps = places.astype(np.uint64) * _GOLDEN
        hashes = _mixed(start + steps).reshape(width, 2)
    # 53 bits give a uniform number in [0, 1), so rate 1.0 keeps all and 0.0 none.
    chance = (hashes[:, 0] >> np.uint64(11)).astype(np.float64) / 2.0**53
    offset = 1 + (hashes[:, 1] % np.uint64(vocab_size - 1)).astype(np.int64)
    row = offset.copy()
    n = len(known)
    row[:n] = np.where(chance[:n] < plan.rate, known, (known + offset[:n]) % vocab_size)
    return row


class Oracle:
    """Answers "which drafts for these requests at these positions".

    Args:
        path: the oracle file.
        vocab_size: of the target.
    """

    def __init__(self, path: str | Path, vocab_size: int) -> None:
        self.path = Path(path)
        self.vocab_size = vocab_size
        self._mtime_ns = -1
        self._rows: dict[tuple[int, ...], int] = {}
        self._table: Any = None
        self._on_device: dict[str, Any] = {}
        self._selected: dict[tuple[Any, ...], Any] = {}

    def refresh(self) -> None:
        """Read the file again if it changed."""
        mtime_ns = self.path.stat().st_mtime_ns
        if mtime_ns == self._mtime_ns:
            return
        plan = read_plan(self.path)
        known = plan.continuations
        lengths = [len(c.input_ids) + len(c.output_ids) for c in known]
        # One position more than any known one: what lies beyond is clamped to it.
        width = max(lengths, default=0) + 1
        pairs = [(c.input_ids, c.output_ids) for c in known]
        # The last row is for prompts that are not in the file.
        rows = [
            draft_row(prompt, output, plan, self.vocab_size, width)
            for prompt, output in [*pairs, ((), ())]
        ]
        self._table = np.stack(rows)
        self._rows = {c.input_ids: i for i, c in enumerate(known)}
        self._on_device.clear()
        self._selected.clear()
        self._mtime_ns = mtime_ns

    def rows_of(self, requests: Sequence[Any]) -> tuple[int, ...]:
        """Table row of each request of the host, by its prompt."""
        self.refresh()
        return tuple(self._row_of(request) for request in requests)

    def _row_of(self, request: Any) -> int:
        # A long prompt is looked up once per request, not once per step.
        cached = getattr(request, "_sglang_exact_oracle", None)
        if cached is not None and cached[0] == self._mtime_ns:
            return int(cached[1])
        row = self._rows.get(tuple(request.origin_input_ids), len(self._rows))
        request._sglang_exact_oracle = (self._mtime_ns, row)
        return row

    def drafts(self, rows: tuple[int, ...], positions: Any) -> Any:
        """Draft tokens as a device tensor.

        Args:
            rows: of `rows_of`, length bs.
            positions: int [bs, n], absolute positions, on any device.

        Returns:
            int64 [bs, n] on the device of `positions`.
        """
        import torch

        device = str(positions.device)
        table = self._on_device.get(device)
        if table is None:
            table = torch.from_numpy(self._table).to(positions.device)
            self._on_device[device] = table
        selected = self._selected.get((device, rows))
        if selected is None:
            index = torch.tensor(rows, dtype=torch.int64)
            selected = table[index.to(positions.device)]
            self._selected[(device, rows)] = selected
        last = table.shape[1] - 1
        return selected.gather(1, positions.long().clamp(max=last))

    def drafts_on_host(self, row: int, start: int, count: int) -> Any:
        """int64 [count]: drafts of one row for positions start, start + 1, ..."""
        positions = np.arange(start, start + count)
        return self._table[row][np.minimum(positions, self._table.shape[1] - 1)]


_oracles: dict[str, Oracle] = {}


def oracle(vocab_size: int) -> Oracle:
    """The oracle of this process.

    Raises:
        RuntimeError: no oracle file is configured.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        raise RuntimeError(f"found {VARIABLE} unset, expected the path of a JSON file")
    if path not in _oracles:
        _oracles[path] = Oracle(path, vocab_size)
    return _oracles[path]


def _overwrite(draft_token: Any, positions: Any, batch: Any, vocab_size: int) -> None:
    """Replace the drafts of a block in place; column 0 is a committed token."""
    bs = len(batch.reqs)
    if bs == 0:
        return
    table = oracle(vocab_size)
    tokens = draft_token.view(bs, -1)
    drafts = table.drafts(table.rows_of(batch.reqs), positions.view(bs, -1))
    tokens[:, 1:].copy_(drafts[:, 1:])


@hook(
    "sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose",
    "AROUND",
    name="test_oracle_dspark",
    test=True,
)
def dspark_propose(
    original: Callable[..., Any],
    self: Any,
    *,
    batch: Any,
    draft_input: Any,
    verify_window: Any,
    bs: int,
    device: str,
    target_model: Any,
    sampling_info: Any,
    anchor_prepared: bool = False,
) -> Any:
    """Around DSpark's proposal: it emits these drafts, not those it verified."""
    proposal = original(
        self,
        batch=batch,
        draft_input=draft_input,
        verify_window=verify_window,
        bs=bs,
        device=device,
        target_model=target_model,
        sampling_info=sampling_info,
        anchor_prepared=anchor_prepared,
    )
    table = oracle(target_model.config.vocab_size)
    positions = verify_window.positions_2d[:bs]
    drafts = table.drafts(table.rows_of(batch.reqs), positions)[:, 1:]
    proposal.draft_block.draft_tokens.copy_(drafts)
    if proposal.verify_ids is not None:
        proposal.verify_ids[:, 1:].copy_(drafts)
    return proposal


@hook(
    "sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify",
    "AROUND",
    name="test_oracle_dflash",
    test=True,
)
def dflash_prepare_for_verify(
    original: Callable[..., Any], self: Any, batch: Any, target_worker: Any, **kw: Any
) -> Any:
    """Around the verify input of DFLASH, DFlash2 and DSpark, before it is copied."""
    if self.ragged_verify_layout is not None:
        raise RuntimeError(
            "found a ragged DSpark verify, expected blocks of one width. Fix: export "
            "SGLANG_RAGGED_VERIFY_MODE=static for runs with an oracle."
        )
    if not batch.forward_mode.is_idle():
        vocab_size = target_worker.model_runner.model_config.vocab_size
        _overwrite(self.draft_token, self.positions, batch, vocab_size)
    return original(self, batch, target_worker, **kw)


@hook(
    "sglang.srt.speculative.ngram_worker.NGRAMWorker._prepare_draft_tokens",
    "AROUND",
    name="test_oracle_ngram",
    test=True,
)
def ngram_prepare_draft_tokens(
    original: Callable[..., Any], self: Any, batch: Any
) -> tuple[Any, Any]:
    """Around the n-gram look-up: other tokens in the shape that it found."""
    drafts, mask = original(self, batch)
    vocab_size = self.target_worker.model_runner.model_config.vocab_size
    table = oracle(vocab_size)
    n = self.draft_token_num
    tokens = drafts.reshape(-1, n).copy()
    for i, (row, req) in enumerate(
        zip(table.rows_of(batch.reqs), batch.reqs, strict=True)
    ):
        # Tokens accepted in the last step are in output_ids or, under overlap
        # scheduling, in what the original just staged.
        known = len(req.origin_input_ids) + len(req.output_ids)
        committed = known + self.prev_accept_lens[i]
        tokens[i, 1:] = table.drafts_on_host(row, committed, n - 1)
    return tokens.reshape(drafts.shape), mask


@hook(
    "sglang.srt.speculative.eagle_utils.eagle_prepare_for_verify",
    "AROUND",
    name="test_oracle_eagle",
    test=True,
)
def eagle_prepare_for_verify(
    original: Callable[..., Any],
    verify_input: Any,
    req_to_token_pool: Any,
    batch: Any,
    target_worker: Any,
) -> Any:
    """Around the verify input of EAGLE, EAGLE3 and MTP, before it is copied."""
    if not batch.forward_mode.is_idle():
        if verify_input.topk != 1:
            raise RuntimeError(
                f"found a draft tree (topk {verify_input.topk}), expected a chain. "
                "Fix: pass --speculative-eagle-topk 1 for runs with an oracle."
            )
        vocab_size = target_worker.model_runner.model_config.vocab_size
        _overwrite(verify_input.draft_token, verify_input.positions, batch, vocab_size)
    return original(verify_input, req_to_token_pool, batch, target_worker)
