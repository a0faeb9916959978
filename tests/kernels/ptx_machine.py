# SPDX-License-Identifier: Apache-2.0
"""Runs the integer part of a PTX kernel and says what each tensor-core chain sums.

Every thread of one block runs by itself; branches, addresses and predicates are
computed, data is not. Copies into shared memory, `ldmatrix` and `mma` are recorded,
and `chains` puts the threads together: for each accumulator, which 8-element chunks
of which rows of A and B went in, in which order. Two kernels with equal chains do the
same tensor-core operations on the same operands in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Chunk = tuple[str, int, int]
"""(operand, row, k // 8): 8 bf16 of one row, the unit of ldmatrix."""


class Step(NamedTuple):
    """One mma: its instruction, first row of A, first row of B, and its k // 16."""

    op: str
    a_row: int
    b_row: int
    k_step: int


class Instruction(NamedTuple):
    predicate: str | None
    op: str
    operands: list[Any]


class Program(NamedTuple):
    instructions: list[Instruction]
    labels: dict[str, int]


_STATEMENT = re.compile(r"^(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)


def _operands(text: str) -> list[Any]:
    """Split at commas outside of {} and []; vectors become lists."""
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,{\[]*", text)
    return [
        [x.strip() for x in p[1:-1].split(",")] if p.startswith("{") else p.strip()
        for p in parts
    ]


def parse(ptx: str) -> Program:
    """Instructions and labels of the only kernel in `ptx`."""
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx[ptx.index(".entry") :], flags=re.S)
    body = body[body.index("\n{") + 2 :]
    body = re.sub(r"^\s*\.(loc|reg|pragma|shared)[^\n]*", "", body, flags=re.M)
    body = re.sub(r"^\s*\{\s*$|^\s*\}\s*$", "", body, flags=re.M)
    body = re.sub(r"^\s*([$\w]+):", r"\1:;", body, flags=re.M)
    body = re.sub(r"\{\s*(?=\.reg)", "", body)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for raw in body.split(";"):
        text = raw.strip()
        if text in ("", "}"):
            continue
        if text.endswith(":"):
            labels[text[:-1]] = len(instructions)
        elif found := _STATEMENT.match(text):
            predicate, op, rest = found.groups()
            instructions.append(Instruction(predicate, op, _operands(rest)))
    return Program(instructions, labels)


def _signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "div": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "rem": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    "min": min,
    "max": max,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lo": lambda a, b: a < b,
    "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b,
    "hs": lambda a, b: a >= b,
}
_IGNORED = (
    *("st", "stmatrix", "cvt.rn", "fence", "membar", "mbarrier", "griddepcontrol"),
    *("cp.async.commit", "cp.async.wait", "cp.async.bulk", "tensormap", "prefetch"),
    *("setmaxnreg", "trap"),
)
"""Instructions without an integer result."""


class Thread:
    """One thread: runs to its end, or until `limit` instructions."""

    def __init__(
        self, program: Program, tid: int, params: list[int], symbols: dict[str, int]
    ) -> None:
        self.program = program
        self.special = {"%tid.x": tid, "%laneid": tid % 32}
        self.params, self.symbols = params, symbols
        self.registers: dict[str, Any] = {}
        self.phase = 0
        self.copies: list[tuple[int, int, int]] = []
        self.matrices: list[tuple[int, int]] = []
        self.mmas: list[tuple[str, int, list[Any], list[Any]]] = []
        self.num_chains = 0

    def value(self, text: Any, bits: int = 64, signed: bool = False) -> Any:
        if not isinstance(text, str):
            return None
        if text in self.registers:
            found = self.registers[text]
        elif text.startswith("0f") or text.startswith("0F"):
            return 0
        elif re.match(r"^-?(0x)?[0-9a-fA-F]+U?$", text):
            found = int(text.rstrip("U"), 0)
        elif text.startswith("%"):
            found = self.special.get(text, 0)
        else:
            found = self.symbols.get(text)
        if not isinstance(found, int) or isinstance(found, bool):
            return found
        return _signed(found, bits) if signed else found & ((1 << bits) - 1)

    def address(self, text: str) -> int:
        base, _, offset = text.strip("[] ").partition("+")
        found = self.value(base.strip())
        return (found or 0) + (int(offset.strip(), 0) if offset.strip() else 0)

    def run(self, limit: int = 200_000) -> None:
        at = 0
        for _ in range(limit):
            if at >= len(self.program.instructions):
                return
            ins = self.program.instructions[at]
            at += 1
            if ins.predicate is not None:
                wanted = not ins.predicate.startswith("!")
                if bool(self.value(ins.predicate.lstrip("!"))) != wanted:
                    continue
            kind = ins.op.split(".")[0]
            if kind == "bra":
                at = self.program.labels[ins.operands[0]]
            elif kind in ("ret", "exit"):
                return
            else:
                self.step(kind, ins)
        raise RuntimeError(f"found no end after {limit} instructions")

    def step(self, kind: str, ins: Instruction) -> None:
        op, operands = ins.op, ins.operands
        if kind in ("bar", "barrier"):
            self.phase += 1
        elif op.startswith("cp.async.c"):
            if op.startswith(("cp.async.ca.", "cp.async.cg.")):
                self.copies.append(
                    (self.phase, self.address(operands[0]), self.address(operands[1]))
                )
        elif kind == "ldmatrix":
            self.matrices.append((self.phase, self.address(operands[1])))
            for j, name in enumerate(operands[0]):
                self.registers[name] = ("matrix", len(self.matrices) - 1, j)
        elif kind == "mma":
            self.mma(op, operands)
        elif op.startswith("mbarrier.t"):
            self.registers[operands[0]] = True
            self.phase += 1
        elif kind == "elect":
            self.registers[operands[0].split("|")[1]] = self.special["%laneid"] == 0
        elif not any(op.startswith(x) for x in _IGNORED):
            self.arithmetic(kind, op, operands)

    def mma(self, op: str, operands: list[Any]) -> None:
        into, a, b, before = operands
        chain = self.registers.get(before[0], 0)
        if not isinstance(chain, tuple):
            chain = ("chain", self.num_chains)
            self.num_chains += 1
        for name in into:
            self.registers[name] = chain
        fragments = ([self.registers[x] for x in a], [self.registers[x] for x in b])
        self.mmas.append((op, chain[1], *fragments))

    def arithmetic(self, kind: str, op: str, operands: list[Any]) -> None:
        names = operands[0] if isinstance(operands[0], list) else [operands[0]]
        types = re.findall(r"\.([usbf])(8|16|32|64)\b", op)
        bits = int(types[-1][1]) if types else 64
        signed = bool(types) and types[-1][0] == "s"
        if kind == "ld":
            found: Any = 0
            if ".param" in op:
                found = self.params[int(operands[1].strip("[]").rsplit("_", 1)[1])]
            for name in names:
                self.registers[name] = found
            return
        values = [self.value(x, bits, signed) for x in operands[1:]]
        if op.startswith("mad.wide"):
            values[2] = self.value(operands[3], 2 * bits, signed)
        self.registers[names[0].split("|")[0]] = self.result(kind, op, values, bits)

    def result(self, kind: str, op: str, values: list[Any], bits: int) -> Any:
        if kind in ("mov", "cvt", "cvta", "shfl"):
            return values[0]
        if kind == "selp":
            return values[0] if values[2] else values[1]
        if any(not isinstance(x, int) for x in values):
            return None
        if kind == "setp":
            found = _COMPARE[op.split(".")[1]](values[0], values[1])
            if len(values) == 3:
                both = op.split(".")[2] == "and"
                found = found and values[2] if both else found or values[2]
            return bool(found)
        if op.endswith(".pred"):
            flags = [bool(x) for x in values]
            return {
                "and": all(flags),
                "or": any(flags),
                "xor": sum(flags) == 1,
                "not": not flags[0],
            }[kind]
        if kind == "mad":
            return values[0] * values[1] + values[2]
        if kind == "bfe":
            field = (values[0] >> values[1]) & ((1 << values[2]) - 1)
            return _signed(field, values[2]) if ".s" in op else field
        if kind == "neg":
            return -values[0]
        if kind == "not":
            return ~values[0]
        found = _BINARY[kind](values[0], values[1])
        if ".hi." in op:
            found >>= bits
        return found if ".wide" in op else found & ((1 << bits) - 1)


Content = Callable[[int, int], Chunk]
"""(phase, shared address) -> what 16 bytes lie there when it is read; a phase ends at
a block barrier or when a wait on an mbarrier returns."""


def copied(threads: Iterable[Thread], where: Callable[[int], Chunk]) -> Content:
    """Shared memory as the threads' own cp.async fill it; `where` names a source."""
    history: dict[int, list[tuple[int, Chunk]]] = {}
    for thread in threads:
        for phase, into, source in thread.copies:
            history.setdefault(into, []).append((phase, where(source)))

    def content(phase: int, address: int) -> Chunk:
        return max((p, c) for p, c in history[address] if p < phase)[1]

    return content


def _rows(warp: list[Thread], fragment: Any, content: Content) -> list[Chunk]:
    _, index, j = fragment
    return [content(*warp[8 * j + i].matrices[index]) for i in range(8)]


def _aligned(rows: list[Chunk]) -> tuple[str, int, int]:
    """The chunk of the first row, if the eight are rows r .. r + 7 of one chunk."""
    operand, row, chunk = rows[0]
    if rows != [(operand, row + i, chunk) for i in range(8)]:
        raise ValueError(f"found an 8x8 matrix of {rows}, expected 8 rows of one chunk")
    return rows[0]


def chains(threads: list[Thread], content: Content) -> list[list[Step]]:
    """The steps of every accumulator tile of the block, in the order they ran."""
    result = []
    for first in range(0, len(threads), 32):
        warp = threads[first : first + 32]
        found: dict[int, list[Step]] = {}
        for op, chain, a, b in warp[0].mmas:
            left = [_aligned(_rows(warp, x, content)) for x in a]
            right = [_aligned(_rows(warp, x, content)) for x in b]
            name, row, chunk = left[0]
            other, column, _ = right[0]
            square = [
                (name, row + 8 * (i % 2), chunk + i // 2) for i in range(len(left))
            ]
            strip = [(other, column, chunk + i) for i in range(len(right))]
            if left != square or right != strip or chunk % 2:
                raise ValueError(f"found operands {left} and {right} of one mma")
            found.setdefault(chain, []).append(Step(op, row, column, chunk // 2))
        result += found.values()
    return result
