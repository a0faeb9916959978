# SPDX-License-Identifier: Apache-2.0
"""The arms of the GPU traffic proof: which servers are started, what each is asked.

Requests have names; the plain server answers each alone, and every other answer to
the same name is compared with that one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from sglang_exact.rehearsal import proof_arms
from sglang_exact.rehearsal.client import Completion, completion_of, float32_bits
from sglang_exact.rehearsal.server import Server

REQUEST_HOOKS = "accept_dflash,accept_dflash_adjust,penalties_count"
"""Without them the host drops penalties and draws seeded tokens by coins."""


class Shape(NamedTuple):
    """Sizes of prompts and servers: `chunks` are the sizes that arms set.

    `repeats` are the repetitive prompts and how many requests are made of them.
    """

    lengths: tuple[int, ...]
    vocab: int
    new: int
    context: int
    rows: int
    chunks: tuple[int, int]
    many: int
    repeats: tuple[int, int]


GPU = Shape(
    (37, 64, 65, 200, 256, 257, 511, 700, 1023, 1500, 2049, 3100),
    proof_arms.VOCAB, 48, 8192, 16, (512, 2048), 32, (30, 300),
)  # fmt: skip
REHEARSAL = Shape((12, 70, 140), 512, 5, 512, 2, (64, 128), 4, (6, 12))


class Arm(NamedTuple):
    """One server; `equal` False marks a control, which must differ.

    Attributes:
        name: of the arm.
        title: for readers; goes into its results.
        drafter: of `draft_flags`; None for plain decoding.
        flags: further flags, after and over the shared ones.
        phases: names of `PHASES`.
        fresh: start with empty caches.
        overlap: overlap scheduling; on is the host's default.
        disable: hooks to leave out.
        requests: --max-running-requests; 0 for the shared size.
        equal: what is expected.
        oracle: drafts are the oracle's; without it the drafter's own.
    """

    name: str
    title: str
    drafter: str | None = None
    flags: tuple[str, ...] = ()
    phases: tuple[str, ...] = ("flow",)
    fresh: bool = False
    overlap: bool = True
    disable: str = ""
    requests: int = 0
    equal: bool = True
    oracle: bool = True


def arms_of(shape: Shape) -> list[Arm]:
    """Every arm, the reference first."""
    small, large = (str(x) for x in shape.chunks)
    captured = ("--cuda-graph-bs-decode", *(str(n + 1) for n in range(shape.rows)))
    chunk = "--chunked-prefill-size"
    settings = (
        "--enable-metrics", "--log-requests", "--log-level", "info",
        "--mem-fraction-static", "0.9", "--decode-log-interval", "1",
        "--context-length", str(shape.context // 2),
    )  # fmt: skip
    return [
        Arm("plain", "plain decoding", phases=(*ALONE, "flow", "kinds")),
        Arm(
            "restart-1",
            "plain, started with empty caches",
            fresh=True,
            phases=("flow",),
        ),
        Arm(
            "restart-2",
            "plain, started with empty caches again",
            fresh=True,
            phases=("flow",),
        ),
        Arm(
            "restart-3",
            "DFLASH, started with empty caches",
            "dflash",
            fresh=True,
            phases=("flow",),
        ),
        Arm("dflash", "DFLASH", "dflash", phases=("flow", "kinds")),
        Arm(
            "rows-plain",
            "plain, batches of 1, 2, ... 16, a graph for each",
            flags=captured,
            phases=("rows",),
        ),
        Arm(
            "rows-dflash",
            "DFLASH, batches of 1, 2, ... 16, a graph for each",
            "dflash",
            flags=captured,
            phases=("rows",),
        ),
        Arm("chunk-small-plain", "plain, chunks of 512", flags=(chunk, small)),
        Arm("chunk-small", "DFLASH, chunks of 512", "dflash", flags=(chunk, small)),
        Arm("chunk-large", "DFLASH, chunks of 2,048", "dflash", flags=(chunk, large)),
        Arm("chunk-off-plain", "plain, prompts in one piece", flags=(chunk, "-1")),
        Arm("chunk-off", "DFLASH, prompts in one piece", "dflash", flags=(chunk, "-1")),
        Arm("running-1", "DFLASH, 1 running request", "dflash", requests=1),
        Arm(
            "running-many",
            "DFLASH, 32 running requests",
            "dflash",
            requests=shape.many,
            phases=("many",),
        ),
        Arm(
            "settings",
            "DFLASH, metrics, logs, memory, context length",
            "dflash",
            flags=settings,
        ),
        Arm(
            "no-overlap",
            "DFLASH, no overlap scheduling",
            "dflash",
            overlap=False,
            phases=("flow", "kinds"),
        ),
        Arm(
            "no-graphs",
            "DFLASH, no CUDA graphs",
            "dflash",
            flags=("--disable-cuda-graph",),
        ),
        Arm("mtp", "MTP (EAGLE, topk 1)", "mtp", phases=("flow", "kinds")),
        Arm("ngram", "NGRAM", "ngram", phases=("flow", "kinds")),
        Arm(
            "ngram-tries",
            "NGRAM, real tries, no oracle",
            "ngram",
            oracle=False,
            phases=("repeats",),
        ),
        Arm(
            "control-chain",
            "control: NGRAM's draft trees taken for chains",
            "ngram",
            disable=proof_arms.OLD_NGRAM,
            equal=False,
            oracle=False,
            phases=("repeats",),
        ),
        Arm(
            "control-grid",
            "control: chunk grid off",
            flags=(chunk, small),
            disable="prefill_grid",
            equal=False,
            phases=("flow",),
        ),
        Arm(
            "control-requests",
            "control: hooks of penalties and seeds off",
            "dflash",
            disable=REQUEST_HOOKS,
            equal=False,
            phases=("kinds",),
        ),
    ]


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


ALONE = ("alone", "kinds_alone", "repeats_alone")
"""Phases in which the plain server answers what all others are compared with."""


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

    @property
    def everything(self) -> dict[str, list[int]]:
        """Every prompt by its name."""
        return {**self.prompts, **self.kinds, **self.repeats}

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

    def many(self) -> list[tuple[str, Completion]]:
        """As many requests in flight as the server runs."""
        return self.flow(self.shape.many)


PHASES: dict[str, Callable[[Asker], list[tuple[str, Completion]]]] = {
    "alone": Asker.alone,
    "kinds_alone": Asker.kinds_alone,
    "repeats_alone": Asker.repeats_alone,
    "repeats": Asker.repeats_mixed,
    "kinds": Asker.kinds_together,
    "rows": Asker.rows,
    "flow": Asker.flow,
    "many": Asker.many,
}
