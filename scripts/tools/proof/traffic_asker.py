# SPDX-License-Identifier: Apache-2.0
"""How a server of the traffic proof is asked: every request alone, and all at once.

Requests have names; the plain server answers each alone, and every other answer to
the same name is compared with that one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from sglang_exact.client.bits import float32_bits
from sglang_exact.client.blocking import Completion, completion_of
from sglang_exact.rehearsal.server import Server
from tools.proof import arms as proof_arms
from tools.proof.traffic_arms import Shape


class Kind(NamedTuple):
    """One kind of request: sampling parameters and top-level fields."""

    name: str
    sampling: dict[str, Any]
    extra: dict[str, Any] = {}


LOGPROBS = {"top_logprobs_num": 5, "logprob_start_len": 0}
KINDS = (
    Kind("greedy", {}),
    Kind("frequency", {"frequency_penalty": 1.5}),
    Kind("presence", {"presence_penalty": 2.0}),
    Kind("repetition", {"repetition_penalty": 1.9}),
    Kind("seeded", {"temperature": 1.0, "sampling_seed": 7}),
    Kind("top_p", {"temperature": 1.3, "sampling_seed": 8, "top_p": 0.8}),
    Kind("top_k", {"temperature": 1.5, "sampling_seed": 9, "top_k": 20}),
    Kind("min_p", {"temperature": 1.5, "sampling_seed": 9, "min_p": 0.05}),
    Kind("no_seed", {"temperature": 1.1}),
    Kind("both", {"temperature": 0.8, "sampling_seed": 3, "frequency_penalty": 2.0}),
    Kind("bias", {"logit_bias": {"17": 3.0, "40": -2.0}}),
    Kind("top_logprobs", {}, LOGPROBS),
    Kind("token_ids_logprob", {}, {"token_ids_logprob": [3, 50, 500]}),
    Kind("silent", {}, {"return_logprob": False}),
)


def make_prompt(seed: int, length: int, vocab: int) -> list[int]:
    """Seeded token ids without the special ones."""
    rng = random.Random(seed)
    # The last ids of the large vocabulary are special ones.
    last = vocab - 500 if vocab > 1000 else vocab
    return [rng.randrange(3, last) for _ in range(length)]


def said(found: Completion) -> list[Any]:
    """All that has to be equal, as JSON: ids, and float32 bits of every logprob."""

    def bits(value: Any) -> Any:
        if isinstance(value, float):
            return float32_bits(value)
        if isinstance(value, (list, tuple)):
            return [bits(entry) for entry in value]
        return value

    meta = found.raw["meta_info"]
    sides = [
        bits(meta.get(f"{side}_{kind}_logprobs") or [])
        for side in ("input", "output")
        for kind in ("token", "top", "token_ids")
    ]
    return [list(found.ids), found.finish_reason, *sides]


def finite(found: Completion) -> bool:
    """Whether every chosen logprob is a number: one that is none proves nothing."""
    pairs = found.raw["meta_info"].get("output_token_logprobs") or []
    return all(value is not None for value, *_ in pairs)


class Asker:
    """The requests of a run, and how a server is asked for them.

    Args:
        server: running.
        shape: sizes.
    """

    def __init__(self, server: Server, shape: Shape) -> None:
        self.server, self.shape = server, shape
        self.prompts = {
            f"prompt-{n}": make_prompt(n, n, shape.vocab) for n in shape.lengths
        }
        self.kinds = {
            f"kind-{kind.name}": make_prompt(1000 + i, 30 + i, shape.vocab)
            for i, kind in enumerate(KINDS)
        }

        rows = proof_arms.make_repeated_prompts(
            shape.repeats[0], shape.vocab, shape.lengths[:6]
        )
        self.repeats = {f"repeats-{i}": ids for i, ids in enumerate(rows)}
        self.crowded = {
            f"crowd-{i}": make_prompt(2000 + i, 8 + i, shape.vocab)
            for i in range(shape.crowd[0])
        }

    @property
    def everything(self) -> dict[str, list[int]]:
        """Every prompt by its name."""
        return {**self.prompts, **self.kinds, **self.repeats, **self.crowded}

    def greedy(self, name: str) -> tuple[str, Completion]:
        """One prompt by its name."""
        return name, self.server.generate(self.prompts[name], self.shape.new)

    def kind(self, kind: Kind, name: str = "") -> tuple[str, Completion]:
        """One request of a kind; of the prompt of that name, or of the kind's own."""
        name, extra = name or f"kind-{kind.name}", dict(kind.extra)
        logprob = extra.pop("return_logprob", True)
        found = self.server.generate(
            self.everything[name],
            self.shape.new,
            return_logprob=logprob,
            extra=extra,
            **kind.sampling,
        )
        return name, found

    def repeat(self, name: str) -> tuple[str, Completion]:
        """One repetitive prompt: every second one greedy, the others of each kind."""
        number = int(name.removeprefix("repeats-"))
        few = Kind("few", proof_arms.few_tokens(self.shape.vocab))
        kinds = (KINDS[0], few, KINDS[0], KINDS[1 + number // 4 % (len(KINDS) - 1)])
        return self.kind(kinds[number % 4], name)

    def repeats_alone(self) -> list[tuple[str, Completion]]:
        """Every repetitive prompt by itself."""
        return [self.repeat(name) for name in self.repeats]

    def repeats_mixed(self, in_flight: int = 8) -> list[tuple[str, Completion]]:
        """Every repetitive prompt many times over, at random times."""
        rng = random.Random(6)
        count = self.shape.repeats[1] // len(self.repeats)
        asked = [*self.repeats] * count
        rng.shuffle(asked)
        with ThreadPoolExecutor(in_flight) as pool:
            answers = []
            for name in asked:
                time.sleep(rng.expovariate(1 / 0.02))
                answers.append(pool.submit(self.repeat, name))
            return [answer.result() for answer in answers]

    def alone(self) -> list[tuple[str, Completion]]:
        """Every prompt by itself."""
        return [self.greedy(name) for name in self.prompts]

    def kinds_alone(self) -> list[tuple[str, Completion]]:
        """Every kind by itself."""
        return [self.kind(kind) for kind in KINDS]

    def kinds_together(self) -> list[tuple[str, Completion]]:
        """Every kind at once."""
        with ThreadPoolExecutor(len(KINDS)) as pool:
            return list(pool.map(self.kind, KINDS))

    def rows(self) -> list[tuple[str, Completion]]:
        """Batches of 1, 2, 3, ... requests that reach the scheduler at once."""
        found: list[tuple[str, Completion]] = []
        names = list(self.prompts)
        for count in range(1, self.shape.rows + 1):
            asked = [names[(count + i) % len(names)] for i in range(count)]
            body = {
                "input_ids": [self.prompts[name] for name in asked],
                "sampling_params": {
                    "temperature": 0,
                    "ignore_eos": True,
                    "max_new_tokens": self.shape.new,
                },
                "return_logprob": True,
            }
            answers = self.server.client.request("/generate", body)
            found += zip(asked, map(completion_of, answers), strict=True)
        return found

    def flow(self, in_flight: int = 8) -> list[tuple[str, Completion]]:
        """Twice every prompt at random times; long ones between; one aborted."""
        rng = random.Random(5)
        asked = [*self.prompts, *self.prompts]
        rng.shuffle(asked)
        victim = {"rid": f"victim-{time.monotonic_ns()}"}
        first = self.prompts[f"prompt-{self.shape.lengths[0]}"]
        with ThreadPoolExecutor(in_flight + 1) as pool:
            lost = pool.submit(
                self.server.generate, first, 40 * self.shape.new, extra=victim
            )
            answers = []
            for i, name in enumerate(asked):
                time.sleep(rng.expovariate(1 / 0.02))
                answers.append(pool.submit(self.greedy, name))
                if i == len(asked) // 2:
                    self.server.client.request("/abort_request", victim)
            found = [answer.result() for answer in answers]
            try:
                end = lost.result().finish_reason
            except RuntimeError as error:
                # Aborted before it ran.
                end = "abort" if "Aborted by AbortReq" in str(error) else str(error)
        if end != "abort":
            raise RuntimeError(f"found the victim's end {end!r}, expected 'abort'")
        return found

    def long(self, name: str) -> tuple[str, Completion]:
        """One of the crowd: greedy, with a penalty, seeded, or both.

        With ignore_eos the host would reserve its whole answer.
        """
        number = int(name.removeprefix("crowd-"))
        kind = [KINDS[i] for i in (0, 1, 4, 9)][number % 4]
        ids, tokens = self.crowded[name], self.shape.crowd[1]
        found = self.server.generate(ids, tokens, ignore_eos=False, **kind.sampling)
        return name, found

    def crowd_alone(self) -> list[tuple[str, Completion]]:
        """Every one of the crowd by itself."""
        return [self.long(name) for name in self.crowded]

    def crowd(self) -> list[tuple[str, Completion]]:
        """The crowd twice, all at once: together they need several pools."""
        with ThreadPoolExecutor(2 * len(self.crowded)) as pool:
            return list(pool.map(self.long, [*self.crowded, *self.crowded]))

    def preempted(self) -> int:
        """How many requests this server has sent to host memory so far."""
        state = self.server.client.info()["internal_states"][0]
        return int(state["sglang_exact_preemption"]["preempted"])

    def many(self) -> list[tuple[str, Completion]]:
        """As many requests in flight as the server runs."""
        return self.flow(self.shape.many)


PHASES: dict[str, Callable[[Asker], list[tuple[str, Completion]]]] = {
    "alone": Asker.alone,
    "kinds_alone": Asker.kinds_alone,
    "repeats_alone": Asker.repeats_alone,
    "repeats": Asker.repeats_mixed,
    "crowd_alone": Asker.crowd_alone,
    "crowd": Asker.crowd,
    "kinds": Asker.kinds_together,
    "rows": Asker.rows,
    "flow": Asker.flow,
    "many": Asker.many,
}
