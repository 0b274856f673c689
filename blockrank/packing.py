"""Documents of different lengths into rows of one length, and sizes rounded to few values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from blockrank.errors import UserError

ROW_QUANTUM = 32
"""Row lengths chosen for shards are multiples of it."""

Packing = Literal["packed", "chunked"]


def round_up(value: int, quantum: int) -> int:
    return -(-value // quantum) * quantum


def round_up_geometric(value: int, steps: int = 2) -> int:
    """The next of few sizes, `steps` (a power of two) per doubling: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ... for 2.

    Less than 1 / (steps + 1) of a size is spare.
    """
    power = 1 << max(value - 1, 0).bit_length()
    return round_up(value, max(power // (2 * steps), 1))


def bucket_rows(rows: int) -> int:
    """The next number of rows that programs are compiled for: eight per doubling, so less than a ninth is spare.

    Beyond 64 rows, whose time outweighs another program's compilation, 32 per doubling: less than one in 33.
    """
    return round_up_geometric(rows, 8 if rows <= 64 else 32)


def pack(lengths: Sequence[int], row_length: int, packing: Packing) -> tuple[list[tuple[int, int]], int]:
    """(row, start) of each document, and the number of rows: first-fit decreasing, ties by index."""
    for index, length in enumerate(lengths):
        if length > row_length:
            raise UserError(f"document {index} has {length} tokens, more than a row of {row_length}: raise row_length")
    if packing == "chunked":
        return [(index, 0) for index in range(len(lengths))], len(lengths)
    places: list[tuple[int, int]] = [(0, 0)] * len(lengths)
    used: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, filled in enumerate(used) if filled + lengths[index] <= row_length), len(used))
        if row == len(used):
            used.append(0)
        places[index] = (row, used[row])
        used[row] += lengths[index]
    return places, len(used)


def even_row_length(lists: Sequence[Sequence[int]], row_length: int, shards: int) -> int:
    """The least row length at which every list fits in equally many rows per shard, of about `row_length`.

    Rows of 512 would pad the 9,100 tokens of a hundred passages to 24 rows on eight shards, a third too many; two rows
    of 608 in each waste a fifteenth. The number of rows is one that programs are compiled for, so none is spare.
    """
    total = max((sum(documents) for documents in lists), default=0)
    longest = max((length for documents in lists for length in documents), default=0)
    if total == 0 or longest > row_length:
        return row_length
    wanted = total / (shards * row_length)
    sizes = (size for size in range(1, 2 + 2 * int(wanted)) if bucket_rows(size) == size)
    rows = min(sizes, key=lambda size: abs(size - wanted))
    quantum = min(ROW_QUANTUM, row_length)
    length = round_up(max(longest, -(-total // (shards * rows))), quantum)
    while any(pack(documents, length, "packed")[1] > rows * shards for documents in lists):
        length += quantum
    return length
