# SPDX-License-Identifier: Apache-2.0
"""Command lines of the proofs. Reading one needs nothing but Python."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sglang_exact.schemes import BY_NAME as SCHEMES
from tools.proof import arms, prefix_arms, speed_arms, traffic_arms, verifier_arms

EVER = 1e9
"""Seconds of --budget where none is given."""
HOST_BACKENDS = ("own", "own-no-graphs", "same")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _parser(text: str, start_timeout: float, left_out: str) -> argparse.ArgumentParser:
    """What every proof takes, but for --layers, --name and --arms."""
    parser = argparse.ArgumentParser(description=text)
    add = parser.add_argument
    add("--state", required=True, help="kept between calls")
    add("--out", required=True, help="folder for the JSON results")
    add("--start-timeout", type=float, default=start_timeout, help="seconds")
    add("--budget", type=float, default=EVER, help=f"seconds; {left_out}")
    return parser


def _unknown(
    parser: argparse.ArgumentParser,
    what: str,
    asked: Sequence[str],
    known: Sequence[str],
) -> None:
    """End with status 2 if something asked for is not known, or nothing is."""
    if not asked or set(asked) - set(known):
        parser.error(f"found {what} {list(asked)}, expected some of {', '.join(known)}")


def bits(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Of scripts/gpu_proof."""
    parser = _parser(
        "Prove on a GPU that exact speculation equals plain decode.",
        240,
        "later arms are left out",
    )
    add = parser.add_argument
    add("--layers", type=int, default=64, choices=(4, 32, 36, 64))
    add("--arms", default="", help="default: all, or those of a family")
    known = ("", *arms.FAMILIES)
    add("--family", default="", choices=known, help="8B-wide, in a --state of its own")
    schemes = ("", *SCHEMES)
    add("--scheme", default="", choices=schemes, help="quantised, in a --state as well")
    add("--name", default="", help="first part of the results' names; default: proof")
    add("--new", type=int, default=440, help="tokens per prompt")
    add("--context", type=int, default=16384)
    add("--mem-fraction", type=float, default=0.85)
    add("--total-tokens", type=int, default=0, help="KV pool; 0 for what fits")
    add("--requests", type=int, default=0, help="limit every arm's requests in flight")
    add("--tp", type=int, default=1, help="ranks of every server")
    add("--gpus", default="0", help="indices, separated by commas")
    add("--side-by-side", type=int, default=1, help="servers on one GPU")
    add("--profile", default="", help="arms of which a few steps are profiled")
    add("--prefixes", default="2048,8192", help="tokens of prompts of the cache's arms")
    args = parser.parse_args(argv)
    args.prefixes = [int(n) for n in _names(args.prefixes)]
    room = args.context - prefix_arms.MORE
    if max(args.prefixes, default=0) > room:
        parser.error(f"found --prefixes over {room}, expected a larger --context")
    if args.family and args.scheme:
        parser.error("found --family and --scheme, expected one of them")
    every = arms.FAMILY_ARMS if args.family else [arm.name for arm in arms.ARMS]
    args.arms = args.arms or ",".join(every)
    # The tables of evidence are made of the files called proof.
    kind = f"family-{args.family}" if args.family else f"scheme-{args.scheme}"
    args.name = args.name or (kind if args.family or args.scheme else "proof")
    try:
        arms.chosen(args.arms)
    except ValueError as error:
        parser.error(str(error))
    return args


def traffic(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Of scripts/gpu_traffic."""
    parser = _parser(
        "Prove on a GPU that traffic, settings and restarts do not move a bit.",
        300,
        "later arms are left out",
    )
    add = parser.add_argument
    add("--name", default="traffic", help="of the JSON result")
    add("--arms", default="", help="comma-separated; all if empty")
    add("--side-by-side", type=int, default=6, help="servers at once")
    add("--rehearsal", action="store_true", help="on the CPU, with tiny models")
    args = parser.parse_args(argv)
    known = [arm.name for arm in traffic_arms.arms_of(traffic_arms.GPU)]
    args.arms = _names(args.arms) or known
    _unknown(parser, "arms", args.arms, known)
    return args


def verifier(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Of scripts/gpu_verify."""
    names = [arm.name for arm in verifier_arms.ARMS]
    parser = _parser(
        "Prove the verifier's matrix on one GPU, with `sglang-exact verify` itself.",
        300,
        "later calls are left out",
    )
    add = parser.add_argument
    add("--layers", type=int, default=4, choices=(4, 64))
    add("--name", default="", help="of the JSON result; default: verify-LAYERS")
    add("--arms", default=",".join(names), help="default: all")
    add("--asks", default="", help="calls by name; default: all of an arm")
    add("--new", type=int, default=128, help="tokens of an answer")
    add("--repeats", type=int, default=1200)
    add("--long-repeats", type=int, default=50)
    add("--gpu", default="0", help="index")
    add("--rehearsal", action="store_true", help="on the CPU, with tiny models")
    args = parser.parse_args(argv)
    args.arms, args.asks = _names(args.arms), _names(args.asks)
    _unknown(parser, "arms", args.arms, names)
    asks = {ask.name for arm in verifier_arms.ARMS for ask in arm.phases}
    if args.asks:
        _unknown(parser, "asks", args.asks, sorted({*asks, verifier_arms.START}))
    return args


def prefill_graphs(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Of scripts/gpu_prefill_graphs."""
    parser = _parser(
        "Prove on a GPU that a prefill graph has the bits of the step without it.",
        240,
        "later arms are left out",
    )
    known = ("exact", "rows-planted", "tables-stale", "default-mode")
    add = parser.add_argument
    add("--name", default="prefill-graphs", help="of the JSON result")
    add("--layers", type=int, default=4, choices=(4, 64))
    add("--arms", default=",".join(known), help="default: all")
    add("--rehearsal", action="store_true", help="on the CPU, with tiny models")
    args = parser.parse_args(argv)
    args.arms = _names(args.arms)
    _unknown(parser, "arms", args.arms, known)
    return args


def speed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Of scripts/gpu_bench; with its roles, stages and scale."""
    parser = argparse.ArgumentParser(
        description="Measure the overlay against the host on one GPU, without a model "
        "and without a hub."
    )
    add = parser.add_argument
    add("--out", required=True, help="records, logs, report; kept between calls")
    every = [name for name in speed_arms.STAGES if name != speed_arms.PREFIX]
    add("--only", default=",".join(every), help=f"stages; also {speed_arms.PREFIX}")
    add("--arms", default="", help="default: all that the stages need")
    add("--rehearsal", action="store_true", help="tiny model on the CPU")
    add("--layers", type=int, default=64, choices=(4, 64))
    add("--width", type=int, default=8, help="tokens per verify step")
    add("--widths", default="3,4,16", help="further ones, for stage widths")
    add("--acceptance", type=float, default=5.46, help="acceptance length at --width")
    add("--contexts", default="", help="prompt tokens; default 64,2048,131072")
    add("--new-tokens", type=int, default=0, help="of every answer; default 256")
    add("--prefixes", default="", help="prompts asked again; default 30000,131072")
    add("--questions", type=int, default=0, help="behind one prefix; default 200")
    add("--mem-fraction", type=float, default=0.85)
    add("--host-backends", choices=HOST_BACKENDS, default="own")
    add("--bandwidth", type=float, help="GB/s for the cost model; default: NVML")
    add("--gpu-index", type=int, help="the one in use, if there are several")
    add("--start-timeout", type=float, default=240, help="seconds for each server")
    add("--request-timeout", type=float, default=300, help="seconds for one answer")
    add("--budget", type=float, default=EVER, help="seconds; a stage is cut at its end")
    add("--again", action="store_true", help="also what an earlier call measured")
    add("--note", action="append", default=[], help="kept in every record")
    args = parser.parse_args(argv)
    only = _names(args.only)
    _unknown(parser, "stages", only, speed_arms.STAGES)
    # In their own order: memory is that of a server that was asked nothing yet.
    args.stages = [stage for stage in speed_arms.STAGES if stage in only]
    if not 1 <= args.acceptance <= args.width:
        parser.error(f"found --acceptance {args.acceptance}, expected 1 to --width")
    widths = tuple(int(width) for width in _names(args.widths))
    scale = speed_arms.REHEARSAL if args.rehearsal else speed_arms.GPU
    scale = speed_arms.scaled(scale, args.contexts, args.new_tokens)
    args.scale = speed_arms.behind(scale, args.prefixes, args.questions)
    roles = speed_arms.roles(args.width, widths, max(c for c, _ in scale.load))
    names = [role.arm.name for role in roles]
    wanted = _names(args.arms) or [n for n in names if n not in speed_arms.IF_NAMED]
    _unknown(parser, "arms", wanted, names)
    args.roles = [role for role in roles if role.arm.name in wanted]
    return args


def steps(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Of scripts/profile_steps."""
    parser = argparse.ArgumentParser(
        description="Show what one steady decode or verify step does on the GPU: "
        "waits, allocations, code loads, graph launches and the costliest kernels."
    )
    add = parser.add_argument
    add("--url", required=True)
    add("--traces", required=True, help="folder for the host's traces")
    add("--out", required=True, help="JSON file")
    add("--in-flight", type=int, default=1)
    add("--steps", type=int, default=20)
    add("--settle", type=float, default=0.6, help="seconds until all requests decode")
    add("--new", type=int, default=600, help="tokens per request")
    add("--vocab", type=int, default=arms.VOCAB)
    add("--ids", help="JSON file with lists of token ids")
    add("--timeout", type=float, default=120.0, help="seconds to wait for the trace")
    return parser.parse_args(argv)


def demo(argv: Sequence[str]) -> argparse.Namespace:
    """Of scripts/demo; `argv` is kept for the record."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="What stock speculation changes and exact speculation does not, on "
        "this machine.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--json", help="write the result here")
    add("--layers", type=int, choices=(4, 64), help="run on the GPU")
    add("--new-tokens", type=int, help="per prompt")
    add("--work", help="keep models and logs here")
    add("--trained", metavar="FOLDER", help="trained weights, as scripts/smollm2 has")
    add("--html", help="with --trained: the texts as a page")
    args = parser.parse_args(argv)
    if args.html and not args.trained:
        parser.error("found --html without --trained, expected both")
    if args.trained and args.layers:
        parser.error("found --trained and --layers, expected one of them")
    args.argv = list(argv)
    return args
