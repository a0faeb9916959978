# SPDX-License-Identifier: Apache-2.0
"""Remove the device code of other GPU architectures from shared libraries.

A CUDA library holds, in sections named .nv_fatbin and __nv_relfatbin, containers of
entries: machine code for one architecture each, or PTX. The driver picks one entry of a
container. Here the payload of every entry that it would not pick is overwritten with
zeros; headers and sizes stay, so every offset in the file holds, and zeros compress to
nothing. Layout of the headers: NVIDIA's fatbinary.h in the CUDA toolkit (container) and
the entries as `cuobjdump` lists them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

ELF_MAGIC = b"\x7fELF"
CONTAINER_MAGIC = 0xBA55ED50
SECTIONS = (".nv_fatbin", "__nv_relfatbin")
PTX, CUBIN = 1, 2
NO_BYTES = 8
"""ELF section type of a section without bytes in the file (SHT_NOBITS)."""


class Section(NamedTuple):
    """A section of an ELF file: bytes offset .. offset + size."""

    name: str
    kind: int
    offset: int
    size: int


class Entry(NamedTuple):
    """One entry of a container; its payload is bytes start .. stop of the file."""

    kind: int
    arch: int
    start: int
    stop: int


def sections(data: bytes | bytearray) -> Iterator[Section]:
    """Sections of a little-endian 64-bit ELF file; none of anything else."""
    if data[:6] != ELF_MAGIC + b"\x02\x01":
        return
    (table,) = struct.unpack_from("<Q", data, 0x28)
    width, count, names_index = struct.unpack_from("<HHH", data, 0x3A)

    def header(index: int) -> tuple[int, int, int, int]:
        name, kind, _, _, offset, size = struct.unpack_from(
            "<IIQQQQ", data, table + index * width
        )
        return name, kind, offset, size

    if count == 0:
        return
    names = header(names_index)[2]
    for index in range(count):
        name, kind, offset, size = header(index)
        end = data.find(b"\0", names + name)
        text = bytes(data[names + name : end]).decode("ascii", "replace")
        yield Section(text, kind, offset, size)


def containers(data: bytes | bytearray, section: Section) -> Iterator[list[Entry]]:
    """The entries of every container in a section. Headers are aligned to 8 bytes."""
    position, end = section.offset, section.offset + section.size
    while position + 16 <= end:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, position)
        if magic != CONTAINER_MAGIC:
            position += 8
            continue
        stop = position + header + length
        yield list(_entries(data, position + header, min(stop, end)))
        position = -(-stop // 8) * 8


def _entries(data: bytes | bytearray, position: int, stop: int) -> Iterator[Entry]:
    while position + 64 <= stop:
        kind, _, header = struct.unpack_from("<HHI", data, position)
        (length,) = struct.unpack_from("<Q", data, position + 8)
        (arch,) = struct.unpack_from("<I", data, position + 28)
        if header == 0 or position + header + length > stop:
            return
        yield Entry(kind, arch, position + header, position + header + length)
        position += header + length


def needed(entries: list[Entry], arch: int) -> set[Entry]:
    """Entries the driver may pick on `arch` (90 for sm_90), and all it may not know.

    Machine code of the very architecture; without it that of the nearest lower one of
    the same generation, which runs as well; without either the newest PTX that can be
    compiled. Entries of other kinds (link-time code, for one) are left alone.
    """
    keep = {e for e in entries if e.kind not in (PTX, CUBIN)}
    usable = [
        e.arch
        for e in entries
        if e.kind == CUBIN and e.arch // 10 == arch // 10 and e.arch <= arch
    ]
    if usable:
        best = max(usable)
        return keep | {e for e in entries if e.kind == CUBIN and e.arch == best}
    texts = [e.arch for e in entries if e.kind == PTX and e.arch <= arch]
    newest = max(texts, default=None)
    return keep | {e for e in entries if e.kind == PTX and e.arch == newest}


def keep_one_arch(data: bytearray, arch: int) -> tuple[int, int]:
    """Zero in place what `arch` does not need; (bytes zeroed, bytes of device code)."""
    zeroed = total = 0
    for section in list(sections(data)):
        if section.kind == NO_BYTES or section.name not in SECTIONS:
            continue
        for entries in containers(data, section):
            keep = needed(entries, arch)
            for entry in entries:
                size = entry.stop - entry.start
                total += size
                if entry not in keep:
                    data[entry.start : entry.stop] = bytes(size)
                    zeroed += size
    return zeroed, total
