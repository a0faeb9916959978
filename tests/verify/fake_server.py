# SPDX-License-Identifier: Apache-2.0
"""A small SGLang server without a model, which can lie in chosen ways.

The "model" is a hash of the whole context, so an answer depends on the prompt and on
nothing else, as under a batch-invariant engine. Every lie is a name in `Lies.kinds`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import struct
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from sglang_exact.host import VERSION

VOCAB = 512
TOP = 5
EOS = 7


def f32(value: float) -> float:
    """`value` rounded to float32, as the host's logprobs are."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def next_float32(value: float) -> float:
    """The float32 whose bit pattern is one higher."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return struct.unpack("<f", struct.pack("<I", bits + 1))[0]


def distribution(context: list[int]) -> list[tuple[float, int]]:
    """The top of a next-token distribution, highest first."""
    seed = hashlib.sha256(",".join(map(str, context)).encode()).digest()
    rng = random.Random(seed)
    ids = rng.sample(range(VOCAB), TOP)
    weights = sorted((rng.random() + 0.05 for _ in ids), reverse=True)
    total = sum(weights) * 1.1
    return [(f32(math.log(w / total)), i) for w, i in zip(weights, ids, strict=True)]


@dataclass
class Lies:
    """What is wrong with the server.

    `kinds` are on all the time; `position` is where a bit or token goes wrong; `when`
    limits a lie to requests that satisfy it (body, state) -> bool.
    """

    kinds: set[str] = field(default_factory=set)
    position: int = 5
    when: Any = None


@dataclass
class FakeServer:
    """One server; use as an async context manager.

    `speculative` adds the counters, `accept` is the probability that a draft is taken,
    `step_s` the time of one verify step.
    """

    speculative: bool = True
    width: int = 4
    accept: float = 0.6
    lies: Lies = field(default_factory=Lies)
    step_s: float = 0.0
    api_key: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    exact: dict[str, Any] | None = None
    radix: bool = True
    incremental: bool = False
    context_length: int = 10**6
    process: int = 1
    accelerator: Any = None
    requests: int = 0
    running: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)
    _seen: set[tuple[int, ...]] = field(default_factory=set)
    _runner: web.AppRunner | None = None
    port: int = 0

    async def __aenter__(self) -> FakeServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_route("*", "/flush_cache", self.flush)
        app.router.add_post("/generate", self.generate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _denied(self, request: web.Request) -> bool:
        wanted = f"Bearer {self.api_key}"
        return bool(self.api_key) and request.headers.get("Authorization") != wanted

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake-model"})

    async def loads(self, request: web.Request) -> web.Response:
        return web.json_response({"accelerator": self.accelerator, "loads": []})

    async def server_info(self, request: web.Request) -> web.Response:
        if self._denied(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        if "info-garbage" in self.lies.kinds:
            return web.Response(text="\x00{not json", content_type="application/json")
        if "no-info" in self.lies.kinds:
            return web.Response(status=404)
        body = {
            "version": VERSION,
            "model_path": "fake-model",
            "dtype": "bfloat16",
            "tp_size": 1,
            "api_key": self.api_key,
            "launch_command": f"serve --api-key {self.api_key}",
            "disable_radix_cache": not self.radix,
            "speculative_algorithm": "DFLASH" if self.speculative else None,
            "speculative_num_draft_tokens": self.width if self.speculative else None,
            "startup_time": {"process": self.process},
            "internal_states": [{"effective_max_running_requests_per_dp": 64}],
            **self.info,
        }
        if self.exact is not None:
            body["sglang_exact"] = self.exact
        return web.json_response(body)

    async def flush(self, request: web.Request) -> web.Response:
        self._seen.clear()
        return web.Response(text="Cache flushed.")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self._denied(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json()
        self.calls.append(body)
        self.requests += 1
        if 2**31 - 1 in (body.get("token_ids_logprob") or []):
            text = f"out-of-vocabulary token id; valid range is [0, {VOCAB})."
            return web.json_response({"error": {"message": text}}, status=400)
        lying = self.lies.when is None or self.lies.when(body, self)
        kinds = self.lies.kinds if lying else set()
        self.running += 1
        try:
            return await self._answer(request, body, kinds)
        finally:
            self.running -= 1

    async def _answer(
        self, request: web.Request, body: dict[str, Any], kinds: set[str]
    ) -> web.StreamResponse:
        if "error-500" in kinds:
            return web.json_response(
                {"error": {"message": "boom \x1b[31m<script>alert(1)</script>"}},
                status=500,
            )
        if len(self._context(body)) > self.context_length:
            return web.json_response({"error": "longer than the context"}, status=400)
        if "refuse" in kinds:
            return web.json_response({"error": "not under exact mode"}, status=400)
        if "hang" in kinds:
            await asyncio.sleep(3600)
        if "garbage" in kinds:
            return web.Response(body=b"\xff\x00<html>{", content_type="text/html")
        if "other-json" in kinds:
            return web.json_response([1, {"meta_info": 3}])
        answer, steps = self._generate(body, kinds)
        if body.get("stream"):
            return await self._stream(request, answer, steps, kinds)
        await asyncio.sleep(self.step_s * len(steps))
        if "drop" in kinds and request.transport is not None:
            request.transport.close()
        return web.Response(
            body=json.dumps(answer).encode(), content_type="application/json"
        )

    def _context(self, body: dict[str, Any]) -> list[int]:
        if "input_ids" in body:
            return list(body["input_ids"])
        return [byte % VOCAB for byte in body["text"].encode()]

    def _found(self, prompt: list[int]) -> int:
        """Tokens of the prompt that another one began with; the last is computed."""
        same = []
        for seen in self._seen if self.radix else ():
            pairs = enumerate(zip(prompt, seen, strict=False))
            shorter = min(len(prompt), len(seen))
            same.append(next((i for i, (a, b) in pairs if a != b), shorter))
        return min(max(same, default=0), len(prompt) - 1)

    def _generate(
        self, body: dict[str, Any], kinds: set[str]
    ) -> tuple[dict[str, Any], list[int]]:
        params = body["sampling_params"]
        prompt = self._context(body)
        cached = self._found(prompt)
        self._seen.add(tuple(prompt))
        forced = [int(k) for k, v in (params.get("logit_bias") or {}).items() if v > 99]
        picker = _picker({} if "only-greedy" in kinds else params, self.requests)
        # Only the last tokens count, or a long prompt would take minutes.
        context = prompt[-64:] + [len(prompt), *_altered_by(params)]
        ids: list[int] = []
        rows: list[list[tuple[float, int]]] = []
        finish: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        while len(ids) < params["max_new_tokens"]:
            row = distribution(context + ids[-8:] + [len(ids)])
            if forced:
                others = [x for x in row if x[1] != forced[0]]
                row = [(0.0, forced[0]), *others[: len(row) - 1]]
            token = picker(row)
            if len(ids) == self.lies.position and "wrong-token" in kinds:
                token = row[1][1]
            if len(ids) == self.lies.position and "tie" in kinds:
                row = [(row[0][0], row[0][1]), (row[0][0], row[1][1]), *row[2:]]
                token = row[1 if self.speculative else 0][1]
            ids.append(token)
            rows.append(row)
            ends = token in params.get("stop_token_ids", ())
            if ends or (not params["ignore_eos"] and token % 16 == EOS):
                if len(ids) <= params.get("min_new_tokens", 0):
                    continue
                finish = {"type": "stop", "matched": token}
                break
            letter = chr(ord("a") + token % 26)
            if letter in params.get("stop", ()):
                finish = {"type": "stop", "matched": letter}
                break
        chosen = [
            next(value for value, i in row if i == token)
            for row, token in zip(rows, ids, strict=True)
        ]
        self._spoil(chosen, ids, kinds)
        steps = self._steps(len(ids), prompt)
        meta = self._meta(body, ids, rows, chosen, steps, kinds)
        meta |= {
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids) + ("wrong-count" in kinds),
            "cached_tokens": cached,
        }
        if "other-finish" in kinds:
            meta["finish_reason"] = {"type": "stop", "matched": 3}
        return {"text": "", "output_ids": ids, "meta_info": meta}, steps

    def _spoil(self, chosen: list[float], ids: list[int], kinds: set[str]) -> None:
        place = min(self.lies.position, len(chosen) - 1)
        if "logprob-bit" in kinds:
            chosen[place] = next_float32(chosen[place])
        if "drift" in kinds:
            rng = random.Random(ids[0])
            for n in range(self.lies.position, len(chosen)):
                chosen[n] = f32(chosen[n] - rng.random() * 1e-6 * 1.25**n)
        if "nan" in kinds:
            chosen[place] = float("nan")
        if "short" in kinds:
            del ids[-1], chosen[-1]

    def _steps(self, total: int, prompt: list[int]) -> list[int]:
        """Tokens of every step: the prefill's one, then accepted drafts + 1."""
        rng = random.Random(f"{prompt[:8]}:{self.width}")
        steps, left = [1], total - 1
        while left > 0:
            taken = 0
            while taken < self.width - 1 and rng.random() < self.accept:
                taken += 1
            steps.append(min(taken + 1, left) if self.speculative else 1)
            left -= steps[-1]
        return steps

    def _meta(
        self,
        body: dict[str, Any],
        ids: list[int],
        rows: list[list[tuple[float, int]]],
        chosen: list[float],
        steps: list[int],
        kinds: set[str],
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {"id": f"{self.port}-{self.requests}"}
        asked = body.get("return_logprob") or "unasked-logprobs" in kinds
        if asked and "no-logprobs" not in kinds:
            pairs = zip(chosen, ids, strict=True)
            meta["output_token_logprobs"] = [[v, i, None] for v, i in pairs]
            k = body.get("top_logprobs_num", 0)
            meta["output_top_logprobs"] = [
                [[v, i, None] for v, i in row[:k]] for row in rows[: len(ids)]
            ]
        if self.speculative and "no-counters" not in kinds and len(steps) > 1:
            verify = len(steps) - 1
            meta["spec_verify_ct"] = verify
            meta["spec_num_correct_drafts"] = sum(s - 1 for s in steps[1:])
            meta["spec_num_proposed_drafts"] = verify * (self.width - 1)
            if "false-counters" in kinds:
                meta["spec_verify_ct"] = 1
        return meta

    async def _stream(
        self,
        request: web.Request,
        answer: dict[str, Any],
        steps: list[int],
        kinds: set[str],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids, meta = answer["output_ids"], answer["meta_info"]
        sent = 0
        for size in [len(ids)] if "one-piece" in kinds else steps:
            await asyncio.sleep(self.step_s)
            start, sent = sent, min(sent + size, len(ids))
            if "truncated" in kinds and sent > len(ids) // 2:
                return response
            first = start if self.incremental else 0
            last = sent == len(ids)
            part = {**meta, "completion_tokens": sent}
            for key in ("output_token_logprobs", "output_top_logprobs"):
                if key in meta:
                    part[key] = meta[key][first:sent]
            if not last:
                part["finish_reason"] = None
                part = {k: v for k, v in part.items() if not k.startswith("spec_")}
            chunk = {"text": "", "output_ids": ids[first:sent], "meta_info": part}
            if "stream-garbage" in kinds and last:
                await response.write(b"data: {oops\n\n")
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if last:
                break
        await response.write(b"data: [DONE]\n\n")
        return response


def _altered_by(params: dict[str, Any]) -> list[int]:
    """What penalties and bias add to the context; nothing without them."""
    names = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    found = {k: params[k] for k in (*names, "logit_bias") if k in params}
    return list(repr(sorted(found.items())).encode()) if found else []


def _picker(params: dict[str, Any], number: int) -> Any:
    if not params.get("temperature"):
        return lambda row: row[0][1]
    seed = params.get("sampling_seed")
    rng = random.Random(f"{seed}" if seed is not None else f"free {number}")
    return lambda row: rng.choice(row)[1]
