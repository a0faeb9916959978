# SPDX-License-Identifier: Apache-2.0
"""Device code of other architectures goes, that of one stays, byte for byte."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tools.offline import fatbin

KERNEL = "__global__ void twice(float *x) { x[threadIdx.x] *= 2.f; }\n"


def container(*entries: tuple[int, int, bytes]) -> bytes:
    """A container of entries (kind, arch, payload)."""
    body = b""
    for kind, arch, payload in entries:
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(payload))
        header = header.ljust(28, b"\0") + struct.pack("<I", arch)
        body += header.ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", fatbin.CONTAINER_MAGIC, 1, 16, len(body)) + body


def elf(**contents: bytes) -> bytearray:
    """An ELF file with these sections; `_` in a name stands for a dot."""
    names = ["", *(name.replace("_", ".", 1) for name in contents), ".shstrtab"]
    table = b"".join(name.encode() + b"\0" for name in names)
    parts, offset, headers = [], 64, []
    for data in (b"", *contents.values(), table):
        headers.append((offset, len(data)))
        parts.append(data.ljust(-(-len(data) // 8) * 8, b"\0"))
        offset += len(parts[-1])
    head = bytearray(64)
    head[:6] = fatbin.ELF_MAGIC + b"\x02\x01"
    struct.pack_into("<Q", head, 0x28, offset)
    struct.pack_into("<HHH", head, 0x3A, 64, len(names), len(names) - 1)
    rows = b""
    for name, (at, size) in zip(names, headers, strict=True):
        start = (b"\0" + table).find(b"\0" + name.encode() + b"\0") if name else 0
        row = struct.pack("<IIQQQQ", start, 1, 0, 0, at, size)
        rows += row.ljust(64, b"\0")
    return head + b"".join(parts) + rows


def entries(data: bytearray) -> list[tuple[int, int, bytes]]:
    return [
        (e.kind, e.arch, bytes(data[e.start : e.stop]))
        for section in fatbin.sections(data)
        if section.name == ".nv_fatbin"
        for items in fatbin.containers(data, section)
        for e in items
    ]


@pytest.mark.parametrize(
    ("there", "arch", "kept"),
    [
        # (kind, architecture): 2 machine code, 1 PTX, 8 something else
        ([(2, 80), (2, 90), (2, 120), (1, 120)], 90, [(2, 90)]),
        ([(2, 80), (2, 90), (2, 120), (1, 120)], 120, [(2, 120)]),
        ([(2, 90), (2, 90), (1, 90)], 90, [(2, 90), (2, 90)]),
        # Machine code runs on later cards of its generation, and on no other.
        ([(2, 100), (2, 120)], 121, [(2, 120)]),
        ([(2, 86), (2, 80), (1, 80)], 89, [(2, 86)]),
        ([(2, 121), (1, 90)], 120, [(1, 90)]),
        # Nothing else fits: the newest PTX that can be compiled.
        ([(2, 80), (1, 70), (1, 80), (1, 100)], 90, [(1, 80)]),
        ([(2, 80), (1, 100)], 90, []),
        ([(8, 80), (2, 90)], 90, [(8, 80), (2, 90)]),
    ],
)
def test_what_the_driver_may_pick_stays(
    there: list[tuple[int, int]], arch: int, kept: list[tuple[int, int]]
) -> None:
    payload = [(k, a, bytes([n + 1]) * 40) for n, (k, a) in enumerate(there)]
    data = elf(_text=b"code", _nv_fatbin=container(*payload) + b"\0" * 8)
    before, size = entries(data), len(data)
    assert before == payload
    zeroed, total = fatbin.keep_one_arch(data, arch)
    after = entries(data)
    assert len(data) == size
    left = [(k, a) for k, a, body in after if any(body)]
    assert left == kept
    for new, old in zip(after, before, strict=True):
        assert new == old or not any(new[2])
    assert (zeroed, total) == (40 * (len(there) - len(kept)), 40 * len(there))


def test_several_containers_and_other_sections() -> None:
    one = container((2, 80, b"a" * 24), (2, 90, b"b" * 24))
    two = container((2, 80, b"c" * 21))
    data = elf(_data=two, _nv_fatbin=one + two.ljust(112, b"\0") + one)
    fatbin.keep_one_arch(data, 90)
    bodies = [body for _, _, body in entries(data)]
    assert bodies == [bytes(24), b"b" * 24, bytes(21), bytes(24), b"b" * 24]
    (section,) = [s for s in fatbin.sections(data) if s.name == ".data"]
    assert data[section.offset : section.offset + section.size] == two


@pytest.mark.parametrize("data", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + b"\0" * 90])
def test_other_files_stay(data: bytes) -> None:
    found = bytearray(data)
    assert fatbin.keep_one_arch(found, 90) == (0, 0)
    assert found == data


def test_a_real_library(tmp_path: Path) -> None:
    """What nvcc makes: the kept machine code can still be listed and disassembled."""
    nvcc, cuobjdump = shutil.which("nvcc"), shutil.which("cuobjdump")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    (tmp_path / "k.cu").write_text(KERNEL)
    library = tmp_path / "k.so"
    archs = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in (80, 90, 120)]
    archs.append("-gencode=arch=compute_120,code=compute_120")
    command = [nvcc, "-shared", "-Xcompiler", "-fPIC", *archs, "-o", str(library)]
    subprocess.run([*command, str(tmp_path / "k.cu")], check=True, capture_output=True)
    data = bytearray(library.read_bytes())
    before = entries(data)
    assert {(k, a) for k, a, _ in before} >= {(2, 80), (2, 90), (2, 120), (1, 120)}
    zeroed, total = fatbin.keep_one_arch(data, 90)
    assert 0 < zeroed < total
    for old, new in zip(before, entries(data), strict=True):
        wanted = old[2] if old[:2] == (2, 90) else bytes(len(old[2]))
        assert new == (*old[:2], wanted)
    if cuobjdump is None:
        return
    library.write_bytes(data)
    listed = subprocess.run(
        [cuobjdump, "-sass", "-arch", "sm_90", str(library)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert "Function : _Z5twicePf" in listed
