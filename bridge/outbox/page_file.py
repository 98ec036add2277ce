"""The pages of a database file that SQLite cannot read any more: the newest version of each, and which are in use.

By the file format (sqlite.org/fileformat2.html). Nothing here goes down a B-tree: of one whose root is gone the leaves
are still there. Which pages are free is told twice, by the list of free pages and, as the outbox is made with
auto_vacuum, by the pointer map: a page of it before every so many others. Where both are gone it is in doubt.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_FRACTIONS = bytes((64, 32, 32))
"""Of the header, and always so."""
_SMALLEST_PAGE, _LARGEST_PAGE = 512, 65_536
_WAL_MAGIC = 0x377F0682
_WAL_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
#: The outbox's own sizes first: now, before, and then whatever a tool may have made of it.
_PAGE_SIZES = (1024, 4096, 512, 2048, 8192, 16_384, 32_768)
_SAMPLE_BYTES = 2 * 1024 * 1024
#: No outbox is larger: what says so is damaged.
_MOST_BYTES = 4 * 1024 * 1024 * 1024

INDEX_INTERIOR, INDEX_LEAF, TABLE_LEAF = 0x02, 0x0A, 0x0D
_ROOT, _CHILD = 1, 5
"""In the pointer map: the root of a B-tree, and any other page of one."""
_FREE, _OVERFLOW_FIRST, _OVERFLOW_NEXT = 2, 3, 4

_Sums = tuple[int, int]


class PageFile:
    """The pages of the database in *file* as of the last commit in *wal*, which may be empty."""

    def __init__(self, file: BinaryIO, wal: BinaryIO) -> None:
        self._file, self._wal = file, wal
        self._frames: dict[int, int] = {}
        """Page -> where its newest version begins in the -wal."""
        wal_page_size, wal_count = _read_wal(wal, self._frames)
        header = (
            self._at(wal, self._frames[1], _HEADER_BYTES) if 1 in self._frames else self._at(file, 0, _HEADER_BYTES)
        )
        header_page_size = _page_size_in(header)
        self.page_size = wal_page_size or header_page_size or _guessed_page_size(file)
        is_sound = header_page_size == self.page_size
        self.usable = self.page_size - (header[20] if is_sound else 0)
        stored = int.from_bytes(header[28:32], "big") if is_sound and header[24:28] == header[92:96] else 0
        in_file = -(-file.seek(0, os.SEEK_END) // self.page_size)
        self.count = wal_count or min(stored, _MOST_BYTES // self.page_size) or in_file
        """How many pages there are, those that are missing included."""
        self._has_pointer_map = not is_sound or header[52:56] != bytes(4)
        self._free, self._is_free_known = bytearray(self.count + 1), False
        if is_sound:
            self._is_free_known = self._read_free_list(*struct.unpack(">2I", header[32:40]))

    def page(self, number: int) -> bytes:
        """Return one page; it is shorter, or empty, where the file was cut off."""
        if number in self._frames:
            return self._at(self._wal, self._frames[number], self.page_size)
        return self._at(self._file, (number - 1) * self.page_size, self.page_size)

    def row_pages(self) -> Iterator[bytes]:
        """Yield the pages that may hold rows: first those that are in use for sure, then those in doubt."""
        doubtful: list[range] = []
        for numbers, kinds in self._groups():
            if kinds is None and not self._is_free_known:
                doubtful.append(numbers)
                continue
            for at, number in enumerate(numbers):
                if not self._free[number] if kinds is None else kinds[at] in (_ROOT, _CHILD):
                    yield from self._if_of_rows(number)
        for numbers in doubtful:
            for number in numbers:
                if not self._free[number]:
                    yield from self._if_of_rows(number)

    def _if_of_rows(self, number: int) -> Iterator[bytes]:
        page = self.page(number)
        if len(page) == self.page_size and page[0] in (INDEX_INTERIOR, INDEX_LEAF, TABLE_LEAF):
            yield page

    def _groups(self) -> Iterator[tuple[range, bytes | None]]:
        """Yield pages, and what each is by the pointer map; None where that cannot be read. Page 1 is not among them.

        (The page at 1 GiB, which SQLite leaves out, is beyond any outbox.)
        """
        if not self._has_pointer_map:
            yield range(2, self.count + 1), None
            return
        length = self.usable // 5
        for map_number in range(2, self.count + 1, length + 1):
            numbers = range(map_number + 1, min(map_number + length, self.count) + 1)
            page = self.page(map_number)
            yield numbers, self._kinds(page[: 5 * len(numbers)], len(numbers))

    def _kinds(self, entries: bytes, count: int) -> bytes | None:
        """Return the kind of each page in *entries* of the pointer map, None when one of them makes no sense."""
        if len(entries) < 5 * count:
            return None
        for kind, parent in struct.iter_unpack(">BI", entries):
            has_parent = kind in (_CHILD, _OVERFLOW_FIRST, _OVERFLOW_NEXT)
            if not (has_parent or kind in (_ROOT, _FREE)) or (0 < parent <= self.count) != has_parent:
                return None
        return entries[::5]

    def _read_free_list(self, trunk: int, expected: int) -> bool:
        """Note which pages are free, by the list that begins at *trunk*; return whether it could be read to its end."""
        found = 0
        while 1 < trunk <= self.count and not self._free[trunk]:
            page = self.page(trunk)
            if len(page) < self.page_size:
                return False
            following, length = struct.unpack_from(">2I", page)
            if length > self.usable // 4 - 2:
                return False
            leaves = struct.unpack_from(f">{length}I", page, 8)
            if not all(1 < leaf <= self.count for leaf in leaves):
                return False
            for number in (trunk, *leaves):
                self._free[number] = 1
            found, trunk = found + 1 + length, following
        return trunk == 0 and found == expected

    @staticmethod
    def _at(file: BinaryIO, offset: int, length: int) -> bytes:
        file.seek(offset)
        return file.read(length)


def _page_size_in(header: bytes) -> int:
    """Return the page size in *header*, 0 when it is none of a database."""
    size = int.from_bytes(header[16:18], "big")
    size = _LARGEST_PAGE if size == 1 else size
    is_sound = len(header) == _HEADER_BYTES and header.startswith(_MAGIC) and header[21:24] == _FRACTIONS
    return size if is_sound and size >= _SMALLEST_PAGE and size.bit_count() == 1 else 0


def _guessed_page_size(file: BinaryIO) -> int:
    """Return the page size by which most of *file* looks like pages."""
    file.seek(0)
    sample = file.read(_SAMPLE_BYTES)

    def fitting_bytes(size: int) -> int:
        return size * sum(_looks_like_page(sample[at : at + size], size) for at in range(0, len(sample), size))

    return max(_PAGE_SIZES, key=fitting_bytes)


def _looks_like_page(page: bytes, size: int) -> bool:
    """Return whether *page* has rows of which one is near its end: a page of half the size has none there.

    Only those of indexes are asked, and of tables like them: no row there has more than a quarter of a page.
    """
    if len(page) < size or page[0] != INDEX_LEAF:
        return False
    count = int.from_bytes(page[3:5], "big")
    if not 0 < count < size // 4:
        return False
    pointers = struct.unpack_from(f">{count}H", page, 8)
    return bool(8 + 2 * count <= min(pointers) and size // 2 <= max(pointers) < size)


def _read_wal(wal: BinaryIO, frames: dict[int, int]) -> tuple[int, int]:
    """Fill *frames* up to the last commit; return the page size and the count of pages then, 0 when unknown."""
    header = wal.read(_WAL_HEADER_BYTES)
    if len(header) < _WAL_HEADER_BYTES:
        return 0, 0
    magic, _, page_size, _, *salts = struct.unpack(">6I", header[:24])
    order = ">" if magic & 1 else "<"
    sums = _checksum(header[:24], order, (0, 0))
    if magic & ~1 != _WAL_MAGIC or sums != struct.unpack(">2I", header[24:]):
        return 0, 0
    uncommitted: dict[int, int] = {}
    count, offset = 0, _WAL_HEADER_BYTES + _FRAME_HEADER_BYTES
    while len(frame := wal.read(_FRAME_HEADER_BYTES + page_size)) == _FRAME_HEADER_BYTES + page_size:
        number, commit, *rest = struct.unpack_from(">6I", frame)
        sums = _checksum(frame[_FRAME_HEADER_BYTES:], order, _checksum(frame[:8], order, sums))
        if rest != [*salts, *sums]:
            break
        uncommitted[number] = offset
        if commit:
            frames.update(uncommitted)
            uncommitted.clear()
            count = commit
        offset += len(frame)
    return page_size, count


def _checksum(content: bytes, order: str, sums: _Sums) -> _Sums:
    first, second = sums
    words = iter(struct.unpack(f"{order}{len(content) // 4}I", content))
    for one, two in zip(words, words, strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + two + first) & 0xFFFFFFFF
    return first, second
