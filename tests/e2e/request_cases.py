# SPDX-License-Identifier: Apache-2.0
"""Requests of every kind, and how to ask a server for all of them."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from traffic import prompt

from sglang_exact.client.bits import float32_bits
from sglang_exact.client.blocking import Completion
from sglang_exact.rehearsal.server import Server
from sglang_exact.rehearsal.tokenizer import piece

TOKENS = 10
CHILD_SERVER = Path(__file__).parents[1] / "launch" / "child_server.py"


class TextServer(Server):
    """A server with a tokenizer, which stop strings and grammars need.

    It gets more time to start: other tests may share the machine.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"start_timeout_s": 400.0, **options})

    def command(self) -> list[str]:
        line = [x for x in super().command() if x != "--skip-tokenizer-init"]
        return [*line, "--enable-custom-logit-processor"]


class ChildServer(TextServer):
    """Served from a child process of another program, by the plugin alone."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, mode="plugin", **options)

    def command(self) -> list[str]:
        python, _, _, *rest = super().command()
        return [python, str(CHILD_SERVER), *rest]


class OverlapServer(TextServer):
    """Prepares the next step while the last result is still on its way."""

    def command(self) -> list[str]:
        return [x for x in super().command() if x != "--disable-overlap-schedule"]


class Case(NamedTuple):
    """One request. `control` says that the host alone answers otherwise."""

    name: str
    sampling: Mapping[str, Any]
    extra: Mapping[str, Any] = {}
    control: bool = False


_FOLLOW = """
import dill

class Follow:
    def __call__(self, logits, params):
        for row, given in enumerate(params):
            emitted = given["__req__"].output_ids
            if len(emitted):
                logits[row, (emitted[-1] + 7) % logits.shape[-1]] += 9.0
        return logits

print(dill.dumps(Follow).hex())
"""
"""A custom logit processor that makes the token 7 after the last one likely."""


@functools.cache
def follow() -> str:
    """The processor as the host's API takes it.

    Pickled in a program of its own: only classes of `__main__` go by value.
    """
    ran = subprocess.run(
        [sys.executable, "-c", _FOLLOW], capture_output=True, text=True, check=True
    )
    return json.dumps({"callable": ran.stdout.strip()})


LIKELY = {"17": 6.0, "23": 5.5}
"""Makes two tokens repeat, so that penalties bite within a few tokens."""

GREEDY = (
    Case("greedy", {}),
    Case("bias", {"logit_bias": {"17": 3.0, "40": -2.0}}),
    Case("frequency", {"frequency_penalty": 1.5, "logit_bias": LIKELY}, control=True),
    Case("presence", {"presence_penalty": 2.0, "logit_bias": LIKELY}, control=True),
    Case("repetition", {"repetition_penalty": 1.9, "logit_bias": LIKELY}, control=True),
    Case(
        "min_new_tokens",
        {
            "min_new_tokens": 7,
            "stop_token_ids": [17],
            "logit_bias": LIKELY,
            "ignore_eos": False,
        },
        control=True,
    ),
    Case("grammar", {"regex": "([a-f][a-z]){4,20}"}),
    Case(
        "processor",
        {"custom_params": {"any": 1}},
        {"custom_logit_processor": None},
        control=True,
    ),
    Case("top_logprobs", {}, {"top_logprobs_num": 5, "logprob_start_len": 0}),
    Case("token_ids_logprob", {}, {"token_ids_logprob": [3, 50, 500]}),
    Case("silent", {}, {"return_logprob": False}),
)
SAMPLED = (
    Case("seeded", {"temperature": 1.0, "sampling_seed": 7}, control=True),
    Case("top_p", {"temperature": 1.3, "sampling_seed": 8, "top_p": 0.8}, control=True),
    Case("top_k", {"temperature": 1.5, "sampling_seed": 9, "top_k": 20}, control=True),
    Case("min_p", {"temperature": 1.5, "sampling_seed": 9, "min_p": 0.05}),
    Case("no_seed", {"temperature": 1.1}, control=True),
    Case(
        "seeded_penalty",
        {"temperature": 0.8, "sampling_seed": 3, "frequency_penalty": 2.0},
        control=True,
    ),
)


def stop_cases(ids: Sequence[int]) -> tuple[Case, ...]:
    """Stops inside the blocks ids[1:5], ids[5:9] of a greedy continuation."""
    p = [piece(token) for token in ids]
    end = {"ignore_eos": False}
    return (
        Case("list_order", {"stop": [p[8], p[6]]}, control=True),
        Case(
            "end_before_string",
            {"stop_token_ids": [ids[5]], "stop": [p[7]], **end},
            control=True,
        ),
        Case("across_blocks", {"stop": [p[4][1] + p[5][0]]}),
        Case("inside_a_piece", {"stop": [p[6][0]]}),
        Case("regex", {"stop_regex": [p[6] + ".." + p[8]]}),
        Case("stop_token", {"stop_token_ids": [ids[7]], **end}),
        Case("budget", {"max_new_tokens": 7}),
        Case("budget_before_string", {"max_new_tokens": 6, "stop": [p[7]]}),
    )


def prompt_of(case: Case) -> list[int]:
    """Every case has a prompt of its own, so that the oracle can tell them apart."""
    names = [c.name for c in (*GREEDY, *SAMPLED)]
    return prompt(100 + names.index(case.name), 6 + names.index(case.name))


def ask(server: Server, case: Case, ids: Sequence[int]) -> Completion:
    """One request; the case's own length wins over TOKENS."""
    sampling = dict(case.sampling)
    count = sampling.pop("max_new_tokens", TOKENS)
    extra = dict(case.extra)
    if "custom_logit_processor" in extra:
        extra["custom_logit_processor"] = follow()
    logprob = extra.pop("return_logprob", True)
    found: Completion = server.client.generate(
        ids, count, return_logprob=logprob, extra=extra, **sampling
    )
    return found


def ask_all(
    server: Server, cases: Sequence[Case], prompts: Sequence[Sequence[int]]
) -> list[Completion]:
    """All at once: every request has neighbours of every other kind."""
    with ThreadPoolExecutor(max_workers=len(cases)) as pool:
        return list(
            pool.map(lambda pair: ask(server, *pair), zip(cases, prompts, strict=True))
        )


def _bits(entries: Any) -> Any:
    """Logprob entries [value, id, text], nested, with float32 bits for the value."""
    if not entries:
        return []
    if isinstance(entries[0], float) or entries[0] is None:
        value = entries[0]
        return [None if value is None else float32_bits(value), *entries[1:]]
    return [_bits(entry) for entry in entries]


def answer(found: Completion) -> dict[str, Any]:
    """Everything that has to be equal: ids, text, end, every logprob's bits."""
    meta = found.raw["meta_info"]
    kinds = ("token", "top", "token_ids")
    logprobs = {
        f"{side}_{kind}": _bits(meta.get(f"{side}_{kind}_logprobs"))
        for side in ("input", "output")
        for kind in kinds
    }
    return {
        "ids": found.ids,
        "text": found.raw.get("text"),
        "end": meta["finish_reason"],
        **logprobs,
    }
