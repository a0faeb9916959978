# SPDX-License-Identifier: Apache-2.0
"""The arms of the GPU proof of the verifier: servers, and what is asked of each.

An arm is one server; an ask is one call of `sglang-exact verify` on it. Plain servers
are recorded first (`sglang-exact record`), in groups: a record is the reference of
its asks and the plan of the oracle, which knows one answer to each prompt.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_exact.hooks.testing.deep_gemm_default import SWITCH
from sglang_exact.rehearsal.drafters import DRAFTERS
from tools.proof.arms import VOCAB, Arm

RATE = 0.8

EQUAL, DIFFERS, REFUSED, NOTED = "equal", "differs", "not verified", "noted"
NO_START = "refused to start"
"""What is expected of an ask. REFUSED: a difference, or equal answers that do not count
since the server attests a hook off. NOTED expects nothing. NO_START: of a server."""
START = "start"
"""Name of the ask of a server that shall refuse to start: its start."""

GROUPS = {
    "short": ("speculation", "repeats", "stops"),
    "seeds": ("seeds",),
    "requests": ("speculation",),
    "long": ("long-2k", "long-8k", "long-32k", "long-128k", "long-repeat"),
}
"""Group of a record -> the verifier's arms whose cases it holds."""

# A second or two for each of some: they are there for their kind, not their length.
_FEW_TOKENS = 64


class Scale(NamedTuple):
    """Sizes of a run.

    Attributes:
        new: tokens of an answer to a short prompt.
        repeats, long_repeats: the verifier's options of these names.
        vocab: ids of the target.
        context: tokens that a server takes.
        num_prompts, max_prompt: the verifier's --num-prompts and --max-prompt-tokens;
            0 for its own.
        rehearsal: on the CPU: what is cut too short to count is no failure.
    """

    new: int = 128
    repeats: int = 1200
    long_repeats: int = 50
    vocab: int = VOCAB
    # 131,072-token prompts, their answers, and room for blocks of drafts.
    context: int = 132 * 1024
    num_prompts: int = 0
    max_prompt: int = 0
    rehearsal: bool = False

    def tokens(self, group: str) -> int:
        """Tokens of an answer of a group."""
        return self.new if group == "short" else min(self.new, _FEW_TOKENS)

    def options(self, group: str) -> list[str]:
        """Options of record and verify, which have to agree in them."""
        words = ["--vocab-size", str(self.vocab)]
        words += ["--max-new-tokens", str(self.tokens(group))]
        if group == "requests":
            return [*words, "--prompts", "requests.jsonl"]
        if self.num_prompts:
            words += ["--num-prompts", str(self.num_prompts)]
        if self.max_prompt:
            words += ["--max-prompt-tokens", str(self.max_prompt)]
        return words


# Longer than one tile of 256 keys: below it two orders of sums may agree.
REHEARSAL = Scale(6, 16, 2, 512, 512, 2, 264, True)


class Ask(NamedTuple):
    """One call of the verifier on a server.

    Attributes:
        name: of the call within its arm.
        arms: of the verifier.
        group: of the record that is its reference.
        expect: EQUAL, DIFFERS, REFUSED or NOTED.
        rate: of the oracle: drafts that are right.
        planted: through a proxy that flips one bit.
    """

    name: str
    arms: tuple[str, ...]
    group: str = "short"
    expect: str = EQUAL
    rate: float = RATE
    planted: bool = False

    def options(self, scale: Scale, url: str) -> list[str]:
        """Options of `sglang-exact verify`, but for servers and files."""
        words = ["--arms", ",".join(self.arms), *scale.options(self.group)]
        if "repeats" in self.arms:
            words += ["--repeats", str(scale.repeats)]
        if "long-repeat" in self.arms:
            words += ["--long-repeats", str(scale.long_repeats)]
        if "rejected" in self.arms:
            words += ["--server", f"reject-all={url}"]
        if self.planted and not scale.num_prompts:
            words += ["--num-prompts", "2"]
        return words


_BOTH = ("speculation", "in-flight-8")
_PLAIN = ("plain-repeat", "plain-in-flight-8")
_SHORT = (Ask("speculation", _BOTH),)
_LONG = ("long-2k", "long-8k", "long-32k", "long-128k")
_DFLASH = (
    Ask("speculation", (*_BOTH, "without-logprobs", "streaming", "stops")),
    Ask("repeats", ("repeats",)),
    Ask("rejected", ("rejected",), rate=0.0),
    Ask("planted-bit", ("speculation",), expect=DIFFERS, planted=True),
    Ask("neighbours", ("sampled-neighbours", "prefill-neighbours")),
    Ask("seeds", ("seeds",), "seeds"),
    Ask("requests", _BOTH, "requests"),
    Ask("long", _LONG, "long"),
    Ask("long-repeat", ("long-repeat",), "long"),
)
_STOCK = (
    Ask("speculation", _BOTH, expect=DIFFERS),
    Ask("repeats", ("repeats",), expect=DIFFERS),
    Ask("rejected", ("rejected",), expect=NOTED, rate=0.0),
    Ask("long", _LONG, "long", NOTED),
    Ask("long-repeat", ("long-repeat",), "long", NOTED),
)
# The host chooses another backend by itself where nothing speculates.
_TRITON = ("--attention-backend", "triton")
ARMS = (
    Arm(
        "plain",
        "plain decode",
        phases=(Ask("plain", _PLAIN),),
        records=tuple(GROUPS),
    ),
    *(
        Arm(
            one.name,
            f"{one.title}, {one.tokens} draft tokens",
            one.name,
            one.tokens,
            phases=_DFLASH if one.name == "dflash" else _SHORT,
        )
        for one in DRAFTERS.values()
    ),
    Arm(
        "gdn-hook-off",
        "control: GDN hook off",
        "dflash",
        phases=(Ask("speculation", ("speculation",), expect=DIFFERS),),
        disable="gdn_verify",
    ),
    Arm(
        "attention-hook-off",
        "control: attention hook off",
        "dflash",
        phases=(
            Ask("long-2k", ("long-2k",), "long", DIFFERS),
            # Short prompts may lie in one tile of keys, where nothing differs.
            Ask("speculation", ("speculation",), expect=NOTED),
        ),
        disable="attention_verify",
    ),
    *(
        Arm(
            f"{hook.replace('_', '-')}-hook-off",
            f"control: hook {hook} off",
            "dflash",
            phases=(Ask("speculation", _BOTH, expect=REFUSED),),
            disable=hook,
        )
        for hook in ("prefill_attention", "small_m_gemm")
    ),
    Arm(
        "decode-attention-hook-off",
        "control: hook decode_attention off",
        "dflash",
        disable="decode_attention",
        # By the hook of verify, when graphs are captured.
        refusal="expected the hook decode_attention",
    ),
    Arm(
        "deep-gemm-default",
        "control: DeepGEMM without its deterministic algorithms",
        "dflash",
        phases=(Ask("speculation", _BOTH, expect=DIFFERS),),
        env=((SWITCH, "1"),),
    ),
    Arm(
        "stock-plain",
        "stock deterministic mode, plain decode",
        phases=(Ask("plain", _PLAIN, expect=NOTED),),
        records=("short", "long"),
        reference="stock-plain",
        mode="stock",
    ),
    Arm(
        "stock",
        "control: stock deterministic mode",
        "dflash",
        phases=_STOCK,
        reference="stock-plain",
        mode="stock",
    ),
    Arm(
        "stock-default-plain",
        "stock default mode, plain decode",
        phases=(Ask("plain", _PLAIN, expect=NOTED),),
        records=("short", "long"),
        reference="stock-default-plain",
        mode="stock",
        deterministic=False,
        flags=_TRITON,
    ),
    Arm(
        "stock-default",
        "control: stock default mode",
        "dflash",
        phases=_STOCK,
        reference="stock-default-plain",
        mode="stock",
        deterministic=False,
    ),
)
BY_NAME = {arm.name: arm for arm in ARMS}
