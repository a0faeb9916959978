# SPDX-License-Identifier: Apache-2.0
"""Prompts: 24 built in, seeded id prompts, and the user's own JSONL."""

from __future__ import annotations

import random
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from sglang_exact.client.answer import Prompt
from sglang_exact.client.wire import clean

BUILT_IN = 24
# Bad lines of a prompt file that are named one by one.
SHOWN = 20
# Enough room on either side for the special tokens of the usual vocabularies: those
# sit in the first few hundred ids or in the last thousand.
RESERVED_IDS = 1024
SAMPLING_TYPES = {
    "temperature": (int, float),
    "sampling_seed": (int,),
    "ignore_eos": (bool,),
}


class PromptError(ValueError):
    """A prompt file cannot be used; the text says where and why."""


def built_in() -> list[Prompt]:
    """The 24 text prompts that come with the package."""
    raw = resources.files(__package__).joinpath("prompts.jsonl").read_bytes()
    rows = [orjson.loads(line) for line in raw.splitlines()]
    return [Prompt(row["id"], row["kind"], text=row["text"]) for row in rows]


def id_prompt(name: str, length: int, vocab_size: int, seed: int) -> Prompt:
    """A prompt of `length` token ids drawn from the middle of the vocabulary.

    The ids are a function of (name, seed, vocab_size) alone.
    """
    margin = min(RESERVED_IDS, vocab_size // 8)
    # A string seed goes through SHA-512: the same ids on every Python and machine.
    rng = random.Random(f"{name}:{seed}:{vocab_size}")
    ids = tuple(rng.randrange(margin, vocab_size - margin) for _ in range(length))
    return Prompt(name, "ids", ids=ids)


def seeded_ids(vocab_size: int, seed: int, count: int = BUILT_IN) -> list[Prompt]:
    """`count` id prompts of 8 to 119 tokens, every third one with a repeated part."""
    prompts = []
    for index in range(count):
        length = 8 + (index * 37) % 112
        prompt = id_prompt(f"ids-{index:02d}", length, vocab_size, seed)
        if index % 3 == 2 and prompt.ids is not None:
            half = prompt.ids[: length // 2]
            prompt = prompt._replace(ids=(half * 3)[:length])
        prompts.append(prompt)
    return prompts


def load_jsonl(path: Path) -> list[Prompt]:
    """The user's prompts.

    One JSON object per line: `text` (or `prompt`) or `input_ids`, and optionally `id`,
    `kind`, `max_new_tokens`, `sampling_params`. Raises PromptError with every bad line
    at once.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from error
    prompts: list[Prompt] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(orjson.loads(line), number))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    names = Counter(prompt.id for prompt in prompts)
    twice = sorted(name for name, count in names.items() if count > 1)
    if twice:
        problems.append(f"ids used more than once: {', '.join(twice[:SHOWN])}")
    if not prompts and not problems:
        problems.append("holds no prompt")
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise PromptError(f"{path}: " + "; ".join(problems[:SHOWN]) + more)
    return prompts


def _prompt(row: Any, number: int) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError("found no object, expected one with text or input_ids")
    text = row.get("text", row.get("prompt"))
    ids = row.get("input_ids")
    if (text is None) == (ids is None):
        raise ValueError("expected exactly one of text and input_ids")
    if text is not None and (not isinstance(text, str) or not text):
        raise ValueError("text must be a string that is not empty")
    if ids is not None and not (
        isinstance(ids, list)
        and ids
        and all(type(item) is int and item >= 0 for item in ids)
    ):
        raise ValueError("input_ids must be a list of token ids that is not empty")
    length = row.get("max_new_tokens")
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError("max_new_tokens must be a positive integer")
    sampling = row.get("sampling_params") or {}
    if not isinstance(sampling, dict) or {"max_new_tokens", "n"} & set(sampling):
        raise ValueError(
            "sampling_params must be an object without n and max_new_tokens"
        )
    for key, kinds in SAMPLING_TYPES.items():
        if key in sampling and type(sampling[key]) not in kinds:
            raise ValueError(f"sampling_params.{key} is of another type")
    return Prompt(
        clean(str(row.get("id", ""))) or f"user-{number:03d}",
        clean(str(row.get("kind", "user"))),
        text=text,
        ids=None if ids is None else tuple(ids),
        max_new_tokens=length,
        sampling=sampling_json(sampling),
    )


def sampling_json(sampling: dict[str, Any]) -> str:
    """Sampling parameters as sorted JSON, "" for none."""
    if not sampling:
        return ""
    return orjson.dumps(sampling, option=orjson.OPT_SORT_KEYS).decode()
