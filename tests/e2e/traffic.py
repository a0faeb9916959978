# SPDX-License-Identifier: Apache-2.0
"""Traffic patterns against one server: together, staggered, aborted."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_exact.client.blocking import Completion, completion_of
from sglang_exact.rehearsal import models, tokenizer
from sglang_exact.rehearsal.server import Server

Bits = tuple[tuple[int, ...], tuple[int, ...]]
FEW_HEADS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}


def small_models(folder: Path, heads: Mapping[str, int] = FEW_HEADS) -> Path:
    """`target`, one layer of each kind, with a tokenizer, and a draft of every kind.

    Interpreted kernels cost time per layer and head, and traffic is about neither.
    `heads` is what differs from the heads of the tiny target.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, count in heads.items():
            patch.setitem(models._TINY, name, count)
        patch.setattr(models, "FULL_ATTENTION_INTERVAL", 2)
        tokenizer.make_tokenizer(models.make_target(folder / "target", 2))
        for kind in models.DRAFT_KINDS:
            models.make_draft(folder / kind, kind, target_layers=2)
    # The host gives a draft the output of every target layer but the last.
    for kind in models.DRAFT_KINDS:
        config = folder / kind / "config.json"
        values = json.loads(config.read_text())
        if "dflash_config" in values:
            values["dflash_config"]["target_layer_ids"] = [0]
            config.write_text(json.dumps(values))
    return folder


def prompt(seed: int, length: int, vocab_size: int = 512) -> list[int]:
    """`length` token ids without the special ones."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(length)]


def bits(completion: Completion) -> Bits:
    """What has to be equal: token ids and float32 bits of their logprobs."""
    return completion.ids, completion.logprobs


def together(
    server: Server, prompts: Sequence[Sequence[int]], tokens: int, **sampling: Any
) -> list[Completion]:
    """One HTTP request with every prompt, so that they reach the scheduler at once."""
    parameters = {"temperature": 0, "ignore_eos": True, **sampling}
    body = {
        "input_ids": [list(p) for p in prompts],
        "sampling_params": {**parameters, "max_new_tokens": tokens},
        "return_logprob": True,
    }
    return [completion_of(x) for x in server.client.request("/generate", body)]


def staggered(
    server: Server,
    requests: Sequence[tuple[Sequence[int], int]],
    pause_s: float,
) -> list[Completion]:
    """(prompt, tokens) pairs, one after `pause_s` seconds each, not waiting."""
    with ThreadPoolExecutor(max_workers=len(requests)) as pool:
        futures: list[Future[Completion]] = []
        for ids, tokens in requests:
            futures.append(pool.submit(server.client.generate, ids, tokens))
            time.sleep(pause_s)
        return [future.result() for future in futures]


def outcome(server: Server, ids: Sequence[int], tokens: int, **kw: Any) -> Any:
    """A Completion, or the text of the server's refusal."""
    try:
        return server.client.generate(ids, tokens, **kw)
    except RuntimeError as error:
        return str(error)


def outcomes(
    server: Server, prompts: Sequence[Sequence[int]], tokens: int, **kw: Any
) -> list[Any]:
    """`outcome` of every prompt, all in flight at once."""
    with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
        return list(pool.map(lambda ids: outcome(server, ids, tokens, **kw), prompts))


def speak_json(folder: Path) -> None:
    """Give a model folder a chat template, and pieces that JSON can be made of.

    The last ids become the printable characters of ASCII, one each.
    """
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    vocab = values["model"]["vocab"]
    by_id = {token: text for text, token in vocab.items()}
    characters = [chr(code) for code in range(32, 127)]
    by_id |= {len(by_id) - 1 - i: text for i, text in enumerate(characters)}
    values["model"]["vocab"] = {text: token for token, text in sorted(by_id.items())}
    path.write_text(json.dumps(values))
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    values["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path.write_text(json.dumps(values))


class Background:
    """A request in flight; it can be aborted by its id."""

    def __init__(
        self, server: Server, ids: Sequence[int], tokens: int, **sampling: Any
    ) -> None:
        self.server, self.rid = server, f"background-{threading.get_ident()}-{id(self)}"
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._future = self._pool.submit(
            outcome, server, ids, tokens, extra={"rid": self.rid}, **sampling
        )

    def abort(self) -> Any:
        """Abort it and wait for its end."""
        self.server.client.request("/abort_request", {"rid": self.rid})
        return self.result()

    def result(self) -> Any:
        """Wait for its end."""
        result = self._future.result()
        self._pool.shutdown()
        return result
