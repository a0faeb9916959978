# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server, and what came: Case, Request, Options, Sample."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

GENERATE = "/generate"
CHAT = "/v1/chat/completions"


class Prompt(NamedTuple):
    """One prompt: exactly one of `text` and `ids` is set.

    `sampling` holds the user's own sampling parameters, sorted JSON or "".
    """

    id: str
    kind: str
    text: str | None = None
    ids: tuple[int, ...] | None = None
    max_new_tokens: int | None = None
    sampling: str = ""

    def sha256(self) -> str:
        """Hash of what is sent: UTF-8 text, or the decimal ids joined by commas."""
        if self.text is not None:
            return hashlib.sha256(self.text.encode()).hexdigest()
        return hashlib.sha256(",".join(map(str, self.ids or ())).encode()).hexdigest()


class Options(NamedTuple):
    """How a case is asked. None of it may change the answer."""

    logprobs: bool = True
    top: int = 5
    stream: bool = False


class Case(NamedTuple):
    """A prompt with everything that may change the right answer."""

    prompt: Prompt
    max_new_tokens: int
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int | None = None
    # (start, stop, step) of the ids that end the generation.
    stop_ids: tuple[int, int, int] | None = None
    # Further sampling parameters, sorted JSON; they win over those above.
    sampling: str = ""

    def params(self) -> dict[str, Any]:
        """The sampling parameters as they are recorded and hashed."""
        more = {"sampling": orjson.loads(self.sampling)} if self.sampling else {}
        return {
            "max_new_tokens": self.max_new_tokens,
            "ignore_eos": self.ignore_eos,
            "temperature": self.temperature,
            "seed": self.seed,
            "stop_ids": None if self.stop_ids is None else list(self.stop_ids),
            **more,
        }

    def key(self) -> str:
        """Stable name of the case: two runs agree on it if and only if they ask the
        same thing."""
        blob = orjson.dumps(
            [self.prompt.sha256(), self.params()], option=orjson.OPT_SORT_KEYS
        )
        return f"{self.prompt.id}:{hashlib.sha256(blob).hexdigest()[:16]}"

    def path(self) -> str:
        """The endpoint that is asked: ids, streaming and the per-request speculation
        counters come together only there."""
        return GENERATE

    def body(self, options: Options) -> dict[str, Any]:
        """The JSON of the request."""
        params: dict[str, Any] = {
            "temperature": self.temperature,
            "max_new_tokens": self.max_new_tokens,
            "ignore_eos": self.ignore_eos,
        }
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        if self.stop_ids is not None:
            params["stop_token_ids"] = list(range(*self.stop_ids))
        if self.sampling:
            params |= orjson.loads(self.sampling)
        body: dict[str, Any] = {"sampling_params": params, "stream": options.stream}
        if self.prompt.ids is not None:
            body["input_ids"] = list(self.prompt.ids)
        else:
            body["text"] = self.prompt.text
        if options.logprobs:
            # -1: logprobs of the output only, so that the prefix cache stays usable.
            body |= {
                "return_logprob": True,
                "top_logprobs_num": options.top,
                "logprob_start_len": -1,
            }
        return body

    def sent_ids(self) -> int:
        """How many token ids of a prompt are sent, 0 for a text."""
        return len(self.prompt.ids or ())


IDS_ONLY = Options(logprobs=False, top=0, stream=False)
WITH_LOGPROBS = Options(logprobs=True, top=0, stream=False)
STREAMED = Options(logprobs=False, top=0, stream=True)
STREAMED_LOGPROBS = Options(logprobs=True, top=0, stream=True)


@dataclass(frozen=True, slots=True)
class Request:
    """One greedy request: exactly one of `ids`, `text` and `messages` is set.

    A conversation goes to /v1/chat/completions, so that the server applies its own
    chat template; it cannot be streamed. `thinking` switches the template's reasoning
    on or off; None leaves the template's default.
    """

    id: str
    max_new_tokens: int
    ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    min_new_tokens: int | None = None
    ignore_eos: bool = False
    thinking: bool | None = None

    def path(self) -> str:
        """The endpoint that is asked."""
        return GENERATE if self.messages is None else CHAT

    def body(self, options: Options) -> dict[str, Any]:
        """The JSON of the request."""
        if self.messages is not None:
            return self._chat_body(options)
        prompt = Prompt(self.id, "bench", text=self.text, ids=self.ids)
        case = Case(prompt, self.max_new_tokens, ignore_eos=self.ignore_eos)
        body = case.body(options)
        if self.min_new_tokens is not None:
            body["sampling_params"]["min_new_tokens"] = self.min_new_tokens
        return body

    def _chat_body(self, options: Options) -> dict[str, Any]:
        if options.stream:
            raise ValueError("a conversation cannot be streamed with token ids")
        body: dict[str, Any] = {
            "model": "default",
            "messages": list(self.messages or ()),
            "temperature": 0,
            "max_tokens": self.max_new_tokens,
            "ignore_eos": self.ignore_eos,
            "logprobs": options.logprobs,
            "return_token_ids": True,
            "return_meta_info": True,
        }
        if self.min_new_tokens is not None:
            body["min_tokens"] = self.min_new_tokens
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return body

    def sent_ids(self) -> int:
        """How many token ids of a prompt are sent, 0 for anything else."""
        return len(self.ids or ())


@dataclass(frozen=True, slots=True)
class Counters:
    """Per-request speculation counters; None where the server sent none.

    After each of `retractions` a prefill gives a token that no verify step counts.
    """

    verify: int | None = None
    correct: int | None = None
    proposed: int | None = None
    histogram: tuple[int, ...] = ()
    retractions: int | None = None

    def draft_tokens(self) -> int | None:
        """Draft tokens per verify step, the host's count (drafts + 1)."""
        if not self.verify or self.proposed is None:
            return None
        return self.proposed // self.verify + 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer.

    `logprobs` are float32 bit patterns [completion_tokens], `top` per position the
    (bits, id) pairs, highest first and ties by id; both empty if not asked for. `rid`
    is the server's name of the request, which no two answers share. `latency_s` is the
    time of the whole answer; `arrivals` holds, for a streamed one, (tokens so far,
    seconds since it was sent) of every piece that brought tokens.
    """

    ids: tuple[int, ...]
    logprobs: tuple[int | None, ...] = ()
    top: tuple[tuple[tuple[int | None, int], ...], ...] = ()
    finish: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    counters: Counters = field(default_factory=Counters)
    chunks: tuple[int, ...] = ()
    latency_s: float = 0.0
    rid: str = ""
    arrivals: tuple[tuple[int, float], ...] = ()

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first token; None for an answer that was not
        streamed, or whose tokens all came in one piece: that is its whole time."""
        if not self.arrivals:
            return None
        tokens, at = self.arrivals[0]
        return at if len(self.arrivals) > 1 or tokens == 1 else None

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens after the first chunk over the time since it: (n - 1) / (t_last -
        t_first) where the first chunk holds one token, as the prefill's does."""
        if len(self.arrivals) < 2:
            return None
        (first, start), (last, end) = self.arrivals[0], self.arrivals[-1]
        return (last - first) / (end - start) if end > start else None

    def digest(self) -> str:
        """Hash over ids, logprob bits, top lists and finish reason."""
        blob = orjson.dumps([self.ids, self.logprobs, self.top, self.finish])
        return hashlib.sha256(blob).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request; `sample` is None where `error` says why."""

    request: str
    sample: Sample | None
    error: str = ""


class ServerInfo(NamedTuple):
    """What a server says about itself, reduced to the fields that matter here."""

    label: str
    url: str
    fields: dict[str, Any]
    exact: dict[str, Any]
    vocab_size: int | None
    identity: str
    notes: tuple[str, ...] = ()

    def speculative(self) -> bool | None:
        """True or False as the server reports it, None where it says nothing."""
        if "speculative_algorithm" not in self.fields:
            return None
        return bool(self.fields["speculative_algorithm"])
