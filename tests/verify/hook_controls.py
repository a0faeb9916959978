# SPDX-License-Identifier: Apache-2.0
"""What the verifier has to say about a server with one hook off, hook by hook.

Every hook of `sglang_exact.hooks.ALL` is in `CONTROLS`, either with the traffic that
shows on the CPU engine that it is off, or with the reason why the CPU cannot show it.
Whatever the traffic shows, such a server is never "verified": it attests what is off.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_exact.rehearsal.tokenizer import piece

DIVERGED = "diverged"
# The overlay's other hooks notice and refuse to answer.
COULD_NOT_RUN = "could not run"
# Equal answers; the attestation alone stands against them.
ATTESTED = "not exercised"
# The launcher refuses the name: without it nothing would refuse anything.
REFUSED = "refused to start"
# Nothing that runs on the CPU calls it.
GPU = "gpu only"

TOKENS = 6
LIKELY = {"17": 6.0, "23": 5.5}


def ids(seed: int, length: int) -> list[int]:
    """Ids of the tiny model without the special ones, other ones for every seed."""
    return [3 + (seed * 37 + 7 * i * i + seed * i) % 500 for i in range(length)]


class Control(NamedTuple):
    """One hook off, and what shows it.

    `prompts` are names in PROMPTS, `arms` those of the verifier; `server` is "skip"
    (no tokenizer), "text" or "overlap"; `also` are further hooks that must be off
    because they are a second lock on the same door; `flags` are for the server and
    `options` for the verifier. `why` is the reason for anything but DIVERGED; `gpu`
    the command that shows it on a GPU.
    """

    ends: str
    prompts: tuple[str, ...] = ("greedy-a",)
    arms: str = "speculation"
    drafter: str | None = "dflash"
    server: str = "skip"
    rate: float = 0.7
    flags: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    meanwhile: str = ""
    why: str = ""
    gpu: str = ""


PROMPTS: dict[str, dict[str, Any]] = {
    "greedy-a": {"input_ids": ids(1, 8)},
    "greedy-b": {"input_ids": ids(2, 11)},
    # Longer than one key tile of 256: below it decode and verify attention agree.
    "long": {"input_ids": ids(3, 260)},
    "frequency": {
        "input_ids": ids(4, 9),
        "sampling_params": {"frequency_penalty": 1.5, "logit_bias": LIKELY},
    },
    "two-penalties": {
        "input_ids": ids(5, 10),
        "max_new_tokens": 20,
        # Six tokens again and again, and sums that float32 has to round.
        "sampling_params": {
            "frequency_penalty": 0.13,
            "presence_penalty": 0.27,
            "logit_bias": {str(17 + 6 * n): 9.1 - 0.1 * n for n in range(6)},
        },
    },
    "seeded": {
        "input_ids": ids(6, 7),
        "sampling_params": {"temperature": 1.0, "sampling_seed": 7},
    },
    "top-p": {
        "input_ids": ids(7, 12),
        "sampling_params": {"temperature": 1.3, "sampling_seed": 8, "top_p": 0.8},
    },
    "only-likeliest": {
        "input_ids": ids(8, 13),
        "sampling_params": {"temperature": 0.5, "sampling_seed": 9, "top_k": 1},
    },
    **{f"chunk-{n}": {"input_ids": ids(10 + n, 90 + 7 * n)} for n in range(4)},
    **{
        f"pool-{n}": {
            "input_ids": ids(20 + n, 16),
            "max_new_tokens": 24,
            "sampling_params": {"ignore_eos": False},
        }
        for n in range(4)
    },
    "long-answer": {"input_ids": ids(30, 9), "max_new_tokens": 48},
    "near-the-end": {"input_ids": ids(31, 390), "max_new_tokens": 24},
}
STOPS = ("stop-order", "stop-token-first")


def stop_prompts(answer: list[int]) -> dict[str, dict[str, Any]]:
    """Two ends inside the block answer[5:9] of the greedy answer to "greedy-b"."""
    words = [piece(token) for token in answer]
    same = {"input_ids": PROMPTS["greedy-b"]["input_ids"], "max_new_tokens": 10}
    return {
        "stop-order": {**same, "sampling_params": {"stop": [words[8], words[6]]}},
        "stop-token-first": {
            **same,
            "sampling_params": {
                "stop": [words[7]],
                "stop_token_ids": [answer[5]],
                "ignore_eos": False,
            },
        },
    }


_START = Control(REFUSED, why="it is the refusal itself, or what a rank needs to start")
_POOL = ("pool-0", "pool-1", "pool-2", "pool-3")
_CHUNKS = ("chunk-0", "chunk-1", "chunk-2", "chunk-3")
_SMALL_CHUNKS = ("--context-length", "512", "--chunked-prefill-size", "128")
_SMALL_POOL = (
    *("--context-length", "64", "--max-total-tokens", "100"),
    *("--schedule-conservativeness", "0.1"),
)

CONTROLS: dict[str, Control] = {
    **dict.fromkeys(
        (
            *("fill_arguments", "check_arguments", "attest_ranks", "check_rank"),
            *(
                "attest_engine",
                "self_test",
                "attestation",
                "commit_guard",
                "mask_embedding",
            ),
        ),
        _START,
    ),
    "gdn_verify": Control(DIVERGED),
    "gdn_records": Control(
        COULD_NOT_RUN, why="gdn_verify refuses a buffer of states in place of records"
    ),
    "gdn_commit": Control(
        COULD_NOT_RUN, why="the host's commit refuses records in place of states"
    ),
    **dict.fromkeys(
        ("gdn_records_room", "gdn_records_sized"),
        Control(ATTESTED, why="about the size of the KV pool"),
    ),
    "attention_verify": Control(DIVERGED, ("long",)),
    "prefill_attention": Control(
        GPU,
        why="the interpreter gives the host's kernel and ours the same sums here",
        gpu="answers differ: the kernels sum keys in other tiles",
    ),
    "decode_attention": Control(DIVERGED, ("long",), drafter=None),
    "decode_attention_scratch": Control(
        GPU,
        why="called when CUDA graphs are captured, which a rehearsal switches off",
        gpu="capture fails: 'attention rows during graph capture'",
    ),
    "small_m_gemm": Control(
        GPU,
        why="wraps DeepGEMM, which no CPU runs; it is faster and has the same bits",
        gpu="answers stay equal",
    ),
    "autotune": Control(
        GPU,
        why="every tile holds the tiny model's head_dim of 32, so none cuts its sums",
        gpu="answers differ where two processes time different tiles",
    ),
    "prefill_grid": Control(
        DIVERGED, _CHUNKS, "in-flight-8", drafter=None, flags=_SMALL_CHUNKS
    ),
    "prefill_grid_ignore_eos": Control(
        COULD_NOT_RUN,
        _CHUNKS,
        "in-flight-8",
        drafter=None,
        flags=_SMALL_CHUNKS,
        why="prefill_grid_first ends a server that cuts off less than a chunk",
    ),
    "prefill_grid_first": Control(
        ATTESTED, why="looks whether prefill_grid did its work, which it did"
    ),
    "prefill_grid_next": Control(
        ATTESTED, why="looks whether prefill_grid did its work, which it did"
    ),
    "reservation": Control(
        DIVERGED,
        _POOL,
        "in-flight-8",
        drafter=None,
        flags=_SMALL_POOL,
        also=("retraction", "preemption"),
    ),
    "preemption": Control(
        DIVERGED,
        _POOL,
        "in-flight-8",
        drafter=None,
        flags=_SMALL_POOL,
        also=("retraction", "reservation"),
    ),
    "preemption_room": Control(
        ATTESTED, why="without host memory a request reserves all it may need"
    ),
    "preemption_return": Control(
        COULD_NOT_RUN,
        _POOL,
        "in-flight-8",
        drafter=None,
        flags=_SMALL_POOL,
        options=("--request-timeout", "60"),
        why="who is away never comes back",
    ),
    **dict.fromkeys(
        ("preemption_live", "preemption_idle"),
        Control(ATTESTED, why="for aborts, updates and flushes while one is away"),
    ),
    "preemption_counts": Control(ATTESTED, why="it counts, and decides nothing"),
    "reservation_pool": Control(
        COULD_NOT_RUN,
        ("near-the-end",),
        drafter=None,
        flags=("--context-length", "512", "--max-total-tokens", "400"),
        options=("--request-timeout", "60"),
        why="the host lets a request wait for room that its pool never has",
    ),
    "retraction": Control(
        DIVERGED,
        _POOL,
        "in-flight-8",
        drafter=None,
        flags=_SMALL_POOL,
        also=("reservation", "preemption"),
    ),
    "retraction_pause": Control(
        DIVERGED, ("long-answer",), drafter=None, meanwhile="retract"
    ),
    "retraction_pause_rank": Control(
        ATTESTED, why="second lock behind retraction_pause, which answers first"
    ),
    "live_changes": Control(
        DIVERGED, ("long-answer",), drafter=None, meanwhile="weights"
    ),
    "live_changes_check": Control(
        DIVERGED, ("long-answer",), drafter=None, meanwhile="reset"
    ),
    "live_changes_ipc": Control(
        ATTESTED, why="weights through CUDA memory handles: there is no CPU path"
    ),
    "live_changes_session": Control(
        ATTESTED, why="opens the update of weights from another process's GPUs"
    ),
    "live_changes_session_end": Control(
        ATTESTED, why="as live_changes_session, which answers first"
    ),
    **dict.fromkeys(
        ("prefix_snapshot", "prefix_snapshot_asked"),
        Control(
            ATTESTED,
            why="the tiny model forgets roundings: see test_rounded_state_differs",
        ),
    ),
    **dict.fromkeys(
        ("gdn_prefill_graph", "gdn_prefill_graph_extend", "gdn_prefill_graph_left"),
        Control(
            ATTESTED, why="CUDA graphs: test_tables_of_another_step_differ, on a GPU"
        ),
    ),
    "prefix_insert": Control(
        ATTESTED, why="second lock behind prefix_interval: decode keeps no states"
    ),
    "prefix_interval": Control(
        ATTESTED, why="prefix_insert leaves out the states that decode then keeps"
    ),
    "prefix_match": Control(
        ATTESTED, why="second lock behind prefix_insert: nothing off the grid is kept"
    ),
    "prefix_room": Control(ATTESTED, why="sizes pools, which moves no bits"),
    "live_changes_state": Control(
        ATTESTED, why="the thresholds it guards belong to a sampler that is replaced"
    ),
    "requests_check": Control(
        DIVERGED, ("only-likeliest", "greedy-a"), "sampled-neighbours", drafter=None
    ),
    "requests_arrive": Control(
        ATTESTED, why="refuses what has no reference answer: other inputs, cut prompts"
    ),
    "request_fields": Control(
        ATTESTED, why="refuses values that have no answer, or end the scheduler"
    ),
    "request_fields_detokenize": Control(ATTESTED, why="refuses ids that no token has"),
    "control_requests": Control(
        ATTESTED, why="refuses messages that end the scheduler, and answer nothing"
    ),
    "control_requests_async": Control(
        ATTESTED, why="as control_requests, for messages that nobody waits for"
    ),
    "requests_understood": Control(
        ATTESTED, why="corrects what /model_info says, on which no answer depends"
    ),
    "requests_sampler": Control(
        ATTESTED, why="about requests that generate nothing; the verifier's all do"
    ),
    "requests_beams": Control(
        ATTESTED, why="refuses beams, for which there is no reference answer"
    ),
    "stop_token_by_token": Control(DIVERGED, STOPS, server="text", rate=1.0),
    "stop_reasoning_count": Control(
        ATTESTED, why="counts for a reasoning parser, which the verifier's servers lack"
    ),
    "stop_grammar": Control(
        ATTESTED,
        why="about grammars that end before the request; the verifier has none",
    ),
    "stop_stream": Control(
        ATTESTED, why="about text of a stop regex in a stream; the verifier sends none"
    ),
    "stop_passed_on": Control(
        ATTESTED, why="about a stop string across the 50th token; answers are shorter"
    ),
    **dict.fromkeys(
        (
            *("ollama_chat", "ollama_generate", "ollama_options", "ollama_length"),
            *("ollama_whole_chat", "ollama_whole_generate"),
            *("ollama_stream_chat", "ollama_stream_generate"),
            *("text_chat", "text_completions", "text_rerank"),
            *("text_tokenize", "text_detokenize"),
            *("streamed_responses", "streamed_chat", "streamed_reasoning"),
            *("streamed_tools", "streamed_tools_end"),
        ),
        Control(ATTESTED, why="about endpoints that the verifier does not use"),
    ),
    "penalties_order": Control(DIVERGED, ("two-penalties",), drafter=None),
    "penalties_last_token": Control(
        DIVERGED, ("frequency",), drafter=None, server="overlap"
    ),
    "penalties_ngram": Control(
        ATTESTED,
        drafter="ngram",
        server="overlap",
        why="it moves drafts, and they are verified",
    ),
    "penalties_count": Control(DIVERGED, ("frequency",)),
    "penalties_emitted": Control(DIVERGED, ("two-penalties",)),
    "sampling_greedy_ids": Control(
        COULD_NOT_RUN,
        ("greedy-a",),
        "sampled-neighbours",
        drafter=None,
        why="sampling_draw refuses a mixed batch without them",
    ),
    "sampling_draw": Control(
        COULD_NOT_RUN,
        ("top-p",),
        drafter=None,
        why="the host compiles its sampler, which cannot hold an interpreted kernel",
        gpu="answers with top-p differ",
    ),
    "sampling_custom_processor": Control(
        ATTESTED, why="a processor is a program, which the verifier does not send"
    ),
    "serial_requests": Control(
        COULD_NOT_RUN, why="acceptance refuses a batch without its notes"
    ),
    "accept_dflash": Control(DIVERGED, ("seeded",)),
    "accept_dflash_adjust": Control(DIVERGED, ("frequency",)),
    "accept_dspark": Control(DIVERGED, ("seeded",), drafter="dspark"),
    "accept_dspark_fold": Control(
        GPU,
        why="asked only where CUDA graphs hold the acceptance",
        gpu="penalised answers differ",
    ),
    "accept_dspark_graph": Control(
        GPU,
        why="asked only where CUDA graphs hold the sampler",
        gpu="seeded answers differ",
    ),
    "accept_eagle": Control(
        COULD_NOT_RUN,
        ("seeded",),
        drafter="ngram",
        why="the host accepts sampled drafts with a CUDA kernel",
        gpu="seeded answers differ",
    ),
    **dict.fromkeys(
        ("copies_count", "copies_seed", "copies_best_of"),
        Control(ATTESTED, why="about n above 1; the verifier asks for one answer"),
    ),
    "request_limit": Control(
        ATTESTED, why="keeps batches within a limit that the verifier's stay below"
    ),
    "context_end": Control(
        ATTESTED, why="about requests at the end of the context; the verifier's are not"
    ),
    "context_end_rows": Control(
        ATTESTED, why="from 9 draft tokens on, at the end of the context"
    ),
    "context_end_drafts": Control(
        ATTESTED, why="makes room; what is missing is a draft's, at the context's end"
    ),
    "ngram_chain": Control(
        COULD_NOT_RUN, drafter="ngram", why="the trie's trees are refused in verify"
    ),
    "ngram_chain_corpus": Control(
        COULD_NOT_RUN, drafter="ngram", why="ngram_chain takes one token at a time"
    ),
    "external_corpus": Control(
        ATTESTED, why="a corpus has no share of a block (--speculative-ngram-*)"
    ),
    "verify_chain_ngram": Control(
        ATTESTED, why="second lock behind ngram_chain, which brings no trees"
    ),
    **dict.fromkeys(
        ("verify_chain_eagle", "verify_chain_dflash"),
        Control(ATTESTED, why="second lock behind the refusal of topk at start-up"),
    ),
    "vocab_parallel": Control(
        ATTESTED, why="acts where ranks share the vocabulary; a rehearsal has one rank"
    ),
    "logprobs_top_k": Control(
        ATTESTED, why="orders exact ties, which the comparison leaves free"
    ),
    "logprobs_prompt_top_k": Control(
        ATTESTED, why="orders exact ties, which the comparison leaves free"
    ),
}
