# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids, so that every server of a run gets the very same ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

import orjson

from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.servers import Served
from sglang_exact.client.answer import GENERATE, Prompt
from sglang_exact.client.http import Client, Failed, Lost, Refused
from sglang_exact.verify.prompts import built_in, id_prompt

DEFAULT = "chat-cat-tetris"
"""Of the verifier's 24: long code, and public as one that diverges early."""


def digest(ids: tuple[int, ...]) -> str:
    """Hash of a prompt: the decimal ids joined by commas."""
    return Prompt("", "", ids=ids).sha256()


def read(path: Path) -> str | tuple[int, ...]:
    """A prompt file: text, or a JSON list of token ids (or `input_ids` of one).

    Raises ValueError.
    """
    try:
        raw = path.read_bytes()
        if path.suffix not in (".json", ".jsonl"):
            return raw.decode("utf-8")
        found = orjson.loads(raw)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as a prompt: {error}") from error
    if isinstance(found, dict):
        found = found.get("input_ids", found.get("text", found.get("prompt")))
    if isinstance(found, str) and found:
        return found
    if isinstance(found, list) and found and all(type(i) is int for i in found):
        return tuple(found)
    raise ValueError(
        f"{path}: found neither text nor token ids; expected a list of ids, or an "
        "object with input_ids or text"
    )


async def one(
    served: Served, file: Path | None, name: str | None, seed: int
) -> tuple[str, tuple[int, ...]]:
    """What the prompt is called, and its ids.

    From `file`, or the verifier's prompt `name`, or seeded ids where the server has no
    tokenizer.

    Raises CannotRun, ValueError.
    """
    if file is not None:
        found = read(file)
        ids = found if isinstance(found, tuple) else await _text(served, found)
        return file.name, ids
    if served.by_ids and name is None:
        return f"64 ids of seed {seed}", of_length(served, 64, seed)
    texts = {p.id: p.text for p in built_in()}
    name = name or DEFAULT
    if name not in texts:
        raise CannotRun(
            f"found --prompt {name!r}; expected one of {', '.join(texts)}, or a file "
            "given as --prompt-file"
        )
    return name, await _text(served, texts[name] or "")


async def _text(served: Served, text: str) -> tuple[int, ...]:
    if served.by_ids:
        raise CannotRun(
            f"server {served.name}: found --skip-tokenizer-init and a prompt as text; "
            "expected token ids; fix: give --prompt-file with a JSON list of ids"
        )
    return await ids_of_text(served.client, text)


async def ids_of_text(client: Client, text: str) -> tuple[int, ...]:
    """The server's token ids of a text, as its /generate reads it.

    Raises CannotRun if the server does not give them.
    """
    body = {
        "text": text,
        "sampling_params": {
            "max_new_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
        },
        "return_prompt_token_ids": True,
    }
    try:
        answer = await client.post_json(GENERATE, body)
    except (Refused, Failed, Lost) as error:
        raise CannotRun(f"server {client.url}: {error}") from error
    ids = answer.get("prompt_token_ids") if isinstance(answer, dict) else None
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise CannotRun(
            f"server {client.url}: found no prompt_token_ids in its answer; expected "
            "the pinned SGLang; fix: give the prompt as token ids"
        )
    return tuple(ids)


def of_length(served: Served, length: int, seed: int) -> tuple[int, ...]:
    """`length` seeded ids from the middle of the server's vocabulary.

    Raises CannotRun where the vocabulary size is not known.
    """
    size = served.info.vocab_size
    if size is None:
        raise CannotRun(
            f"server {served.name}: found no vocabulary size; expected it in "
            "/server_info; fix: give --prompt-file"
        )
    ids = id_prompt(f"bench-{length}", length, size, seed).ids
    return ids or ()


async def text_of_length(
    served: Served, length: int, seed: int, text: str | None = None
) -> tuple[str, tuple[int, ...]]:
    """What a prompt of exactly `length` tokens is made of, and its ids.

    The text is `text`, or the verifier's prompts one after the other, over and over
    until it is long enough; seeded ids where the server has no tokenizer.
    """
    if served.by_ids and text is None:
        return f"ids of seed {seed}", of_length(served, length, seed)
    joined = text or "\n".join(p.text or "" for p in built_in())
    ids = await _text(served, joined)
    times = -(-length // len(ids))
    name = "given text" if text else "the verifier's prompts"
    short = hashlib.sha256(joined.encode()).hexdigest()[:16]
    return f"{name}, sha256 {short}", (ids * times)[:length]
