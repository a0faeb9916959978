# SPDX-License-Identifier: Apache-2.0
"""Machine code as expressions: what a kernel stores, as a tree of float operations.

`stored_values` walks one kernel's disassembly (see aot.py) and returns the expression
of every register that a store writes. Two kernels that return the same multiset do the
same float operations, in the same order, with the same contractions.

Leaves are loads (by width and position in the vector), constants, and everything that
is integer only. Conditional branches are taken as not taken, a backward branch is
followed once more with the stored state as the new loaded state. What is not modelled:
which address a load reads. Bit tests cover that.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)(.*?);")
_LABEL = re.compile(r"^(\.L_\w+):")
_REG = re.compile(r"^(U?R)(\d+)$")
_VECTOR = {"64": 2, "128": 4}
_UNIFORM = ("SHF", "PRMT", "IMAD", "LOP3", "MOV", "FADD", "FMUL", "FFMA", "FSEL")
_UNIFORM += ("FSETP", "ISETP", "SEL")
_COMMUTE = ("FADD", "FMUL", "FFMA")

Expr = tuple[Any, ...]
INT: Expr = ("int",)
ZERO: Expr = ("imm", "0")


class Instruction(NamedTuple):
    predicate: str | None
    op: str
    operands: tuple[str, ...]


class Program(NamedTuple):
    instructions: list[Instruction]
    labels: dict[str, int]


def parse(sass: str) -> Program:
    """Instructions and label positions of one disassembled kernel."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(instructions)
        elif found := _LINE.match(line):
            predicate, op, rest = found.groups()
            operands = tuple(p.strip() for p in rest.split(",") if p.strip())
            instructions.append(Instruction(predicate, op, operands))
    return Program(instructions, labels)


def float_ops(sass: str) -> Counter[str]:
    """How often each float, transcendental and shuffle instruction occurs."""
    ops = [_plain(i.op) for i in parse(sass).instructions]
    wanted = re.compile(r"(F(ADD|MUL|FMA|SETP|SEL|MNMX)|MUFU|SHFL|F2F|I2F|HMMA|HGMMA)")
    return Counter(op for op in ops if wanted.match(op))


def _negate(x: Expr) -> Expr:
    return x[1] if x[0] == "neg" else ("neg", x)


def _is_int(x: Expr) -> bool:
    inner = x[1] if x[0] == "neg" else x
    return inner[0] in ("int", "imm")


class _Machine:
    """Registers as expressions; `stores` collects what leaves the thread."""

    def __init__(self) -> None:
        self.registers: dict[str, Expr] = {}
        self.stores: list[Expr] = []
        self.state: list[tuple[Expr, int]] = []
        self.active: tuple[Expr, bool] | None = None
        self._interned: dict[Expr, Expr] = {}

    def intern(self, x: Expr) -> Expr:
        """Expressions as small keys: ("#", n); equal trees get the same n."""
        if x[0] in ("int", "imm", "load", "#"):
            return x
        if x[0] == "neg":
            return ("neg", self.intern(x[1]))
        return self._interned.setdefault(x, ("#", _number(x)))

    def value(self, text: str) -> Expr:
        text = text.replace(".reuse", "").strip()
        if text.startswith("-"):
            return _negate(self.value(text[1:]))
        if text.startswith("~"):
            return INT
        if text.startswith("!"):
            inner = self.value(text[1:])
            return INT if _is_int(inner) else self.intern(("not", inner))
        if text.startswith("|"):
            return self.intern(("abs", self.value(text.strip("|"))))
        base = text.split(".")[0]
        if base in ("RZ", "URZ", "SRZ"):
            return ZERO
        if base in ("PT", "UPT"):
            return ("imm", "true")
        if _REG.match(base) or re.match(r"^U?P\d+$", base):
            return self._known(self.registers.get(base, INT))
        if text.startswith("c["):
            return INT
        return ("imm", _immediate(text))

    def _known(self, x: Expr) -> Expr:
        """Under predicate P, select(P, a, b) is a."""
        if self.active is None or x[0] != "#":
            return x
        tree = _TREES[x[1]]
        if tree[0] != "select" or tree[1] != self.active[0]:
            return x
        return tree[2] if self.active[1] else tree[3]

    def _known_not(self, x: Expr) -> Expr:
        """What `x` is where the active predicate does not hold."""
        if self.active is None or x[0] != "#":
            return x
        tree = _TREES[x[1]]
        if tree[0] != "select" or tree[1] != self.active[0]:
            return x
        return tree[3] if self.active[1] else tree[2]

    def write(self, name: str, x: Expr, predicate: str | None) -> None:
        if name in ("RZ", "URZ", "PT", "UPT"):
            return
        if predicate is not None:
            flag = self.value(predicate.lstrip("!"))
            if not _is_int(flag):
                old = self._known_not(self.registers.get(name, INT))
                pair = (old, x) if predicate.startswith("!") else (x, old)
                x = self.intern(("select", flag, *pair))
        self.registers[name] = x

    def destinations(self, text: str, count: int) -> list[str]:
        name = text.replace(".reuse", "")
        found = _REG.match(name)
        if found is None:
            return [name]
        kind, first = found.group(1), int(found.group(2))
        return [f"{kind}{first + i}" for i in range(count)]

    def step(self, ins: Instruction) -> None:
        self.active = None
        if ins.predicate is not None:
            flag = self.value(ins.predicate.lstrip("!"))
            self.active = (flag, not ins.predicate.startswith("!"))
        op = _family(ins.op)
        if op in ("LDG", "LDS", "LDSM", "LDL"):
            width = _width(ins.op)
            for i, name in enumerate(self.destinations(ins.operands[0], width)):
                self.write(name, ("load", op, width, i), ins.predicate)
        elif op in ("STG", "STS", "STSM"):
            width = _width(ins.op)
            for i, name in enumerate(self.destinations(ins.operands[-1], width)):
                x = self.value(name)
                self.stores.append(("store", op, width, i, x))
                if op == "STG" and width == 4:
                    self.state.append((x, i))
        elif op == "SHFL":
            x = self.intern((ins.op, *(self.value(o) for o in ins.operands[2:])))
            self.write(ins.operands[1], x, ins.predicate)
        elif ins.operands and re.match(r"^U?P(\d|T)$", ins.operands[0]):
            self._set_predicate(ins)
        elif ins.operands and re.match(r"^(U?R\d+)$", ins.operands[0]):
            self._arithmetic(op, ins)

    def _set_predicate(self, ins: Instruction) -> None:
        values = [self.value(o) for o in ins.operands[2:]]
        x = INT
        if not all(_is_int(v) for v in values):
            x = self.intern((_plain(ins.op), *values))
        self.write(ins.operands[0], x, ins.predicate)

    def _arithmetic(self, op: str, ins: Instruction) -> None:
        if ins.op == "MOV.64":
            pairs = [self.destinations(o, 2) for o in ins.operands[:2]]
            for name, source in zip(*pairs, strict=False):
                self.write(name, self.value(source), ins.predicate)
            return
        sources = [o for o in ins.operands[1:] if not re.match(r"^U?P(\d|T)$", o)]
        if op in ("FSEL", "SEL"):
            sources = list(ins.operands[1:])
        values = [self.value(o) for o in sources]
        x = self._result(op, _plain(ins.op), values)
        count = 2 if op in ("CS2R", "IMAD") and ".WIDE" in ins.op else 1
        if op == "CS2R" and ".32" not in ins.op:
            count = 2
        for name in self.destinations(ins.operands[0], count):
            self.write(name, x, ins.predicate)

    def _result(self, op: str, full: str, values: list[Expr]) -> Expr:
        if op in ("MOV", "CS2R", "R2UR") or full.startswith("IMAD.MOV"):
            return values[2] if full.startswith("IMAD.MOV") else values[0]
        if op.startswith("HFMA2") and values[0] in (("neg", ZERO), ZERO):
            return _packed_halves(values)
        if op in ("SHF", "IMAD", "LOP3", "PRMT") and not all(map(_is_int, values)):
            widened = self._halves(op, full, values)
            if widened is not None:
                return widened
        if op[0] != "F" and op != "MUFU" and all(_is_int(v) for v in values):
            return INT
        if op in _COMMUTE:
            return self._commuted(op, full, values)
        return self.intern((full, *values))

    def _half(self, x: Expr, upper: int) -> Expr:
        """Lower (0) or upper (1) 16 bits of a register."""
        if _is_int(x):
            return INT
        tree = _TREES[x[1]] if x[0] == "#" else x
        return tree[1 + upper] if tree[0] == "pair" else self.intern(("half", x, upper))

    def _halves(self, op: str, full: str, values: list[Expr]) -> Expr | None:
        """Packed bf16: selection of halves, and both ways to widen one to fp32."""
        shift = op == "SHF" and ".L" in full and values[1] == ("imm", "0x10")
        multiply = op == "IMAD" and values[1] in (
            ("imm", "0x10000"),
            ("imm", "65536.0"),
        )
        if shift or multiply:
            return self.intern(("bf16", self._half(values[0], 0)))
        if op == "LOP3" and values[1] == ("imm", "nan"):
            return self.intern(("bf16", self._half(values[0], 1)))
        if op == "PRMT" and re.match(r"^0x[0-9a-f]{4}$", values[1][-1]):
            digits = values[1][1][2:]
            picks = {"10": (0, 0), "32": (0, 1), "54": (2, 0), "76": (2, 1)}
            if digits[:2] in picks and digits[2:] in picks:
                low, high = (picks[d] for d in (digits[2:], digits[:2]))
                return self.intern(
                    ("pair", *(self._half(values[n], u) for n, u in (low, high)))
                )
        return None

    def _commuted(self, op: str, full: str, values: list[Expr]) -> Expr:
        if op == "FADD":
            return self.intern((full, *sorted(values, key=repr)))
        negative = sum(v[0] == "neg" for v in values[:2]) % 2 == 1
        a, b = sorted((v[1] if v[0] == "neg" else v for v in values[:2]), key=repr)
        if op == "FMUL":
            product = self.intern((full, a, b))
            return _negate(product) if negative else product
        return self.intern((full, negative, a, b, values[2]))


_NUMBERS: dict[Expr, int] = {}
_TREES: list[Expr] = []


def _number(x: Expr) -> int:
    if x not in _NUMBERS:
        _NUMBERS[x] = len(_TREES)
        _TREES.append(x)
    return _NUMBERS[x]


def _family(op: str) -> str:
    """First part of the name; uniform-datapath twins count as the plain ones."""
    name = op.split(".")[0]
    return name[1:] if name[0] == "U" and name[1:] in _UNIFORM else name


def _plain(op: str) -> str:
    return ".".join([_family(op), *op.split(".")[1:]])


def _width(op: str) -> int:
    return next((n for part, n in _VECTOR.items() if part in op.split(".")), 1)


def _immediate(text: str) -> str:
    """One spelling per constant: hexadecimal words that are floats become floats."""
    if re.match(r"^0x[0-9a-f]{8}$", text):
        value = struct.unpack("<f", struct.pack("<I", int(text, 16)))[0]
        return repr(value)
    try:
        value = struct.unpack("<f", struct.pack("<f", float(text)))[0]
    except ValueError:
        return text
    return "0" if value == 0 else repr(value)


def _packed_halves(values: list[Expr]) -> Expr:
    """HFMA2 -RZ, RZ, hi, lo builds a 32-bit constant out of two fp16 ones."""
    halves = [float(v[1]) if v[0] == "imm" else -float(v[1][1]) for v in values[2:4]]
    raw = struct.pack("<e", halves[1]) + struct.pack("<e", halves[0])
    value = struct.unpack("<f", raw)[0]
    return ("imm", "0" if value == 0 else repr(value))


State = list[tuple[Expr, int]]
"""Values that a thread keeps from one pass to the next, with their place in a load."""


def stored_values(sass: str, carried: State | None = None) -> list[Counter[Expr]]:
    """Expressions that one thread stores, one multiset per pass of the main loop.

    A kernel without a loop gives one multiset; a kernel with one gives two (the loop
    body entered from above, then from below). `carried` is the state of a kernel that
    does not store it, as another one's `stored_state`.
    """
    program = parse(sass)
    machine = _Machine()
    passes: list[Counter[Expr]] = []
    at, followed = 0, False
    while at < len(program.instructions):
        ins = program.instructions[at]
        target = re.search(r"\.L_\w+", " ".join(ins.operands))
        if ins.op.startswith("BRA") and target:
            goal = program.labels[target.group(0)]
            if goal <= at:
                passes.append(Counter(machine.stores))
                if followed:
                    return passes
                followed = True
                machine.state += carried or []
                _reload_state(machine)
                at = goal
                continue
        if ins.op == "EXIT" and ins.predicate is None:
            break
        machine.step(ins)
        at += 1
    passes.append(Counter(machine.stores))
    return passes


def stored_state(sass: str) -> State:
    """What a kernel without a loop stores as its state."""
    machine = _Machine()
    for ins in parse(sass).instructions:
        if ins.op == "EXIT" and ins.predicate is None:
            break
        if not ins.op.startswith("BRA"):
            machine.step(ins)
    return machine.state


def _reload_state(machine: _Machine) -> None:
    """The next step starts from the stored state as if it were loaded again."""
    loaded = {x: ("load", "LDG", 4, i) for x, i in machine.state}
    for name, x in machine.registers.items():
        if x in loaded:
            machine.registers[name] = loaded[x]
    machine.stores, machine.state = [], []


def expand(x: Expr, depth: int) -> Expr:
    """`x` as a tree, to `depth` levels below it."""
    tree = _TREES[x[1]] if x[0] == "#" else x
    if depth == 0:
        return (tree[0],)
    return tuple(expand(c, depth - 1) if isinstance(c, tuple) else c for c in tree)


def rewritten(
    x: Expr, rule: Callable[[Expr], Expr | None], seen: dict[Expr, Expr] | None = None
) -> Expr:
    """`x` with every subexpression that `rule` answers for replaced by the answer."""
    seen = {} if seen is None else seen
    if x not in seen:
        tree = _TREES[x[1]] if x[0] == "#" else x
        answer = rule(tree)
        if answer is None:
            children = [
                rewritten(c, rule, seen) if isinstance(c, tuple) else c for c in tree
            ]
            kind = str(tree[0]).split(".")[0]
            if kind in _COMMUTE:
                first = 2 if kind == "FFMA" else 1
                children[first : first + 2] = sorted(
                    children[first : first + 2], key=repr
                )
            answer = ("tree", _number(tuple(children)))
        seen[x] = answer
    return seen[x]
