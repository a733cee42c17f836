"""Slots of one tier: a fixed address space cut into segments, each serving one size class at a time.

    pool   | segment 0        | segment 1        | segment 2        | ...
           | 1.4 MiB slots .. | 64 KiB slots ... | (free)           |

A segment that becomes empty goes back to the common list, so room follows demand between keyspaces of different block
sizes. Free slots of a segment are handed out in address order after a sort, so that consecutive blocks tend to be
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.core.types import SLOT_ALIGN, Slot
from kvstore.errors import InvalidField


@dataclass(slots=True)
class _Segment:
    """`free` is a stack of byte offsets, lowest on top when `sorted`."""

    base: int
    size_class: int
    used: bytearray
    """One flag a slot. The stack may hold slots that `claim` took meanwhile; the flag decides."""
    free: list[int]
    num_used: int = 0
    sorted: bool = True

    @property
    def num_slots(self) -> int:
        return len(self.used)

    def take(self, slot: int) -> bool:
        """Mark a slot used; False when it was already."""
        index = (slot - self.base) // self.size_class
        if self.used[index]:
            return False
        self.used[index] = 1
        self.num_used += 1
        return True

    def give(self, slot: int) -> None:
        index = (slot - self.base) // self.size_class
        assert self.used[index], "slot freed twice"
        self.used[index] = 0
        self.num_used -= 1
        self.sorted = self.sorted and (not self.free or slot < self.free[-1])
        self.free.append(slot)

    def pop(self) -> int:
        """The lowest free slot, marked used. Call only while `num_used < num_slots`."""
        if not self.sorted:
            self.free.sort(reverse=True)
            self.sorted = True
        while not self.take(slot := self.free.pop()):
            pass
        return slot


@dataclass(slots=True)
class _SizeClass:
    partial: dict[int, _Segment] = field(default_factory=dict)
    """Segments with free slots, by index; the last one is handed out from first."""
    num_segments: int = 0
    num_free: int = 0


class SlotAllocator:
    """Fixed-capacity allocator. All sizes in bytes; `size_class` is a multiple of 4 KiB and at most `segment_bytes`."""

    def __init__(self, capacity_bytes: int, segment_bytes: int) -> None:
        segment_bytes = min(segment_bytes, capacity_bytes) // SLOT_ALIGN * SLOT_ALIGN
        if segment_bytes <= 0:
            raise InvalidField("capacity_bytes", f"{capacity_bytes} is too small", f"give at least {SLOT_ALIGN}")
        self.segment_bytes = segment_bytes
        self.num_segments = capacity_bytes // segment_bytes
        self._free_segments = list(range(self.num_segments - 1, -1, -1))
        self._segments: dict[int, _Segment] = {}
        self._classes: dict[int, _SizeClass] = {}
        self.num_used: dict[int, int] = {}
        """Slots in use by size class."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes in all segments."""
        return self.num_segments * self.segment_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in used slots."""
        return sum(size * n for size, n in self.num_used.items())

    def is_free_segment(self, index: int) -> bool:
        """Does the segment serve no size class now?"""
        return index not in self._segments

    def num_free(self, size_class: int) -> int:
        """Slots that `allocate` could still give to `size_class`."""
        own = self._classes.get(size_class)
        return (own.num_free if own else 0) + len(self._free_segments) * (self.segment_bytes // size_class)

    def capacity(self, size_class: int) -> int:
        """Slots of `size_class` if the whole tier served it."""
        return self.num_segments * (self.segment_bytes // size_class)

    def allocate(self, size_class: int) -> Slot | None:
        """A free slot, or None when there is none of this class and no free segment."""
        own = self._classes.get(size_class)
        if own is None or not own.partial:
            own = self._open_segment(size_class)
            if own is None:
                return None
        index, segment = next(reversed(own.partial.items()))
        slot = segment.pop()
        self._taken(index, segment, own)
        return Slot(slot)

    def allocate_many(self, size_class: int, count: int) -> list[Slot]:
        """The slots that `count` calls of `allocate` would give, less those that would give none."""
        slots: list[Slot] = []
        while len(slots) < count and (slot := self.allocate(size_class)) is not None:
            slots.append(slot)
        return slots

    def _taken(self, index: int, segment: _Segment, own: _SizeClass) -> None:
        if segment.num_used == segment.num_slots:
            del own.partial[index]
        own.num_free -= 1
        self.num_used[segment.size_class] += 1

    def claim(self, slot: Slot, size_class: int) -> bool:
        """Take one particular slot (recovery). False when it doesn't fit what is already there."""
        index = slot // self.segment_bytes
        if not 0 <= index < self.num_segments or size_class > self.segment_bytes:
            return False
        if index not in self._segments:
            self._free_segments.remove(index)
            self._add_segment(index, size_class)
        segment = self._segments[index]
        fits = segment.size_class == size_class and (slot - segment.base) % size_class == 0
        if not fits or (slot - segment.base) // size_class >= segment.num_slots or not segment.take(slot):
            return False
        self._taken(index, segment, self._classes[size_class])
        return True

    def free(self, slot: Slot) -> int | None:
        """Give a slot back. Returns the index of its segment when that became empty and left its class."""
        index = slot // self.segment_bytes
        segment = self._segments[index]
        own = self._classes[segment.size_class]
        segment.give(slot)
        own.num_free += 1
        own.partial.setdefault(index, segment)
        self.num_used[segment.size_class] -= 1
        return self._close_segment(index) if segment.num_used == 0 else None

    def _open_segment(self, size_class: int) -> _SizeClass | None:
        if not self._free_segments or size_class > self.segment_bytes:
            return None
        return self._add_segment(self._free_segments.pop(), size_class)

    def _add_segment(self, index: int, size_class: int) -> _SizeClass:
        own = self._classes.setdefault(size_class, _SizeClass())
        self.num_used.setdefault(size_class, 0)
        base = index * self.segment_bytes
        num_slots = self.segment_bytes // size_class
        free = list(range(base + (num_slots - 1) * size_class, base - 1, -size_class))
        self._segments[index] = own.partial[index] = _Segment(base, size_class, bytearray(num_slots), free)
        own.num_segments += 1
        own.num_free += num_slots
        return own

    def _close_segment(self, index: int) -> int:
        segment = self._segments.pop(index)
        own = self._classes[segment.size_class]
        del own.partial[index]
        own.num_segments -= 1
        own.num_free -= segment.num_slots
        self._free_segments.append(index)
        return index

    def check(self) -> None:
        """Conservation: free and used slots add up in every class; no segment in two places."""
        assert len(self._segments) + len(self._free_segments) == self.num_segments
        assert not set(self._free_segments) & set(self._segments)
        for size_class, own in self._classes.items():
            segments = [s for s in self._segments.values() if s.size_class == size_class]
            assert own.num_segments == len(segments)
            assert own.num_free == sum(s.num_slots - s.num_used for s in segments)
            assert all(sum(s.used) == s.num_used for s in segments)
            assert own.num_free + self.num_used[size_class] == sum(s.num_slots for s in segments)
