"""A second, naive allocator that records its history in torch's format; knows nothing of memfit.

Written from c10/cuda/CUDACachingAllocator.cpp and the docstring of ``torch.cuda.memory._snapshot``,
with plain lists that are searched from end to end. It is what the product's replay is held against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

KIB, MIB = 1024, 1024**2
NEVER = 2**62
SMALL, SMALL_SEGMENT, LARGE_SEGMENT, OWN_SEGMENT = MIB, 2 * MIB, 20 * MIB, 10 * MIB
Frames = list[dict]


class OutOfMemoryError(Exception):
    """The device has no more."""


@dataclass
class Block:
    address: int
    size: int
    state: str  # "used", "free" or "unmapped"
    requested: int = 0
    frames: Frames = field(default_factory=list)


@dataclass
class Segment:
    stream: int
    owner: tuple[int, int]
    is_small: bool
    is_expandable: bool
    blocks: list[Block]


def whole(number: int, granule: int) -> int:
    return -(-number // granule) * granule


class RecordingAllocator:
    """Allocates by torch's rules and writes down every entry that torch would."""

    def __init__(
        self,
        capacity: int,
        *,
        expandable: bool = False,
        max_split: int = NEVER,
        divisions: int = 1,
        device: int = 0,
    ) -> None:
        self.capacity, self.expandable, self.device = capacity, expandable, device
        self.max_split, self.divisions = max_split, divisions
        self.segments: list[Segment] = []
        self.trace: list[dict] = []
        self.peak_reserved = self.peak_allocated = 0
        self._next = 1 << 60  # room below for expandable segments, of which each takes 16 TiB
        self._gaps: list[list[int]] = []
        self._time = 1_790_000_000_000_000
        self._frames: Frames = []

    @property
    def reserved(self) -> int:
        return sum(b.size for s in self.segments for b in s.blocks if b.state != "unmapped")

    @property
    def allocated(self) -> int:
        return sum(b.size for s in self.segments for b in s.blocks if b.state == "used")

    def malloc(self, size: int, frames: Frames, stream=0, owner=(0, 0)) -> Block:
        """Serve a request, or record an ``oom`` and raise."""
        self._frames = frames
        rounded = self._rounded(size)
        pool = (stream, owner, rounded <= SMALL)
        found = self._best_fit(pool, rounded) or self._from_device(pool, rounded)
        if found is None and self._release_oversize(pool, rounded):
            found = self._from_device(pool, rounded)
        if found is None:
            self._release_cached()
            found = self._from_device(pool, rounded)
        if found is None:
            self._note("oom", self.capacity - self.reserved, rounded, pool, frames)
            raise OutOfMemoryError(rounded)
        segment, block = found
        rest = block.size - rounded
        if pool[2] or self.expandable:
            is_split = rest >= 512
        else:
            is_split = rest > SMALL and rounded < self.max_split
        if is_split:
            index = segment.blocks.index(block)
            segment.blocks.insert(index + 1, Block(block.address + rounded, rest, "free"))
            block.size = rounded
        block.state, block.requested, block.frames = "used", size, frames
        self._note("alloc", block.address, size, pool, frames)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block, frames: Frames) -> None:
        """Free a block on its own stream: requested and completed at once."""
        self.request_free(block, frames)
        self.complete_free(block, frames)

    def request_free(self, block: Block, frames: Frames) -> None:
        self._note("free_requested", block.address, block.requested, self._pool_of(block), frames)

    def complete_free(self, block: Block, frames: Frames) -> None:
        segment = next(s for s in self.segments if block in s.blocks)
        self._note("free_completed", block.address, block.requested, self._pool_of(block), frames)
        block.state, block.requested, block.frames = "free", 0, []
        self._merge(segment)

    def empty_cache(self) -> None:
        self._frames = [{"name": "empty_cache", "filename": "/x/torch/cuda/memory.py", "line": 240}]
        self._release_cached()

    def _pool_of(self, block: Block) -> tuple:
        segment = next(s for s in self.segments if any(b is block for b in s.blocks))
        return segment.stream, segment.owner, segment.is_small

    def _best_fit(self, pool: tuple, size: int) -> tuple[Segment, Block] | None:
        fitting = [
            (block.size, block.address, segment, block)
            for segment in self.segments
            if (segment.stream, segment.owner, segment.is_small) == pool
            for block in segment.blocks
            if block.state == "free" and block.size >= size
        ]
        fitting.sort(key=lambda each: each[:2])
        # A block that can grow counts with what it can grow to (get_free_block).
        while len(fitting) > 1 and self._reach(*fitting[1][2:]) < self._reach(*fitting[0][2:]):
            del fitting[0]
        if not fitting or self._is_oversize(fitting[0][3], size):
            return None
        return fitting[0][2:]

    def _is_oversize(self, block: Block, size: int) -> bool:
        """Tell whether a block is kept for larger requests (get_free_block)."""
        if size < self.max_split:
            return block.size >= self.max_split
        return block.size >= size + 20 * MIB

    def _rounded(self, size: int) -> int:
        """Round as round_size does: to 512 bytes, or to a part of the next power of two."""
        power = 1 << (size.bit_length() - 1)
        if self.divisions > 1 and size > 512 * self.divisions:
            return size if size == power else whole(size - power, power // self.divisions) + power
        return whole(size, 512)

    def _release_oversize(self, pool: tuple, size: int) -> bool:
        """Give back blocks that are never split, just enough (release_available_cached_blocks)."""
        if self.max_split == NEVER:
            return False
        wanted = max(size, self.max_split)
        free = sorted(
            (s.blocks[0].size, s.blocks[0].address, s)
            for s in self.segments
            if (s.stream, s.owner, s.is_small) == pool
            and not s.is_expandable
            and len(s.blocks) == 1
            and s.blocks[0].state == "free"
            and s.blocks[0].size >= self.max_split
        )
        enough = [each for each in free if each[0] >= wanted]
        released = 0
        for each in enough[:1] or reversed(free):
            if released >= wanted:
                break
            released += each[0]
            self.segments.remove(each[2])
            self._note("segment_free", each[1], each[0], pool, self._frames)
        return released >= wanted

    def _reach(self, segment: Segment, block: Block) -> int:
        if not segment.is_expandable:
            return 0
        following = segment.blocks[segment.blocks.index(block) + 1 :][:1]
        return block.size + sum(b.size for b in following if b.state == "unmapped")

    def _from_device(self, pool: tuple, size: int) -> tuple[Segment, Block] | None:
        if self.expandable:
            return self._grow(pool, size)
        amount = SMALL_SEGMENT if pool[2] else LARGE_SEGMENT
        if size >= OWN_SEGMENT:
            amount = whole(size, 2 * MIB)
        if self.reserved + amount > self.capacity:
            return None
        block = Block(self._addresses(amount), amount, "free")
        segment = Segment(*pool, False, [block])
        self.segments.append(segment)
        self._took("segment_alloc", block.address, amount, pool)
        return segment, block

    def _grow(self, pool: tuple, size: int) -> tuple[Segment, Block] | None:
        """Map granules behind the first place that has room, block by block."""
        own = [s for s in self.segments if (s.stream, s.owner, s.is_small) == pool]
        if not own:
            space = 1 << 44
            own = [Segment(*pool, True, [Block(self._addresses(space), space, "unmapped")])]
            self.segments += own
        segment, blocks = own[0], own[0].blocks
        granule = SMALL_SEGMENT if pool[2] else LARGE_SEGMENT
        block = self._place(blocks, size)
        while True:
            start = next(b for b in blocks if b.address <= block.address < b.address + b.size)
            if start.state == "free" and start.size >= size:
                return segment, start
            have = start.size if start.state == "free" else 0
            index = blocks.index(start) + (1 if have else 0)
            if not self._map(segment, index, whole(size - have, granule), pool):
                return None

    def _place(self, blocks: list[Block], size: int) -> Block:
        """Find the lowest block that is followed by room enough, some of it unmapped."""
        for first, block in enumerate(blocks):
            room, last = 0, first
            if block.state == "used" or (first and blocks[first - 1].state == "free"):
                continue
            while last < len(blocks) and blocks[last].state != "used" and room < size:
                room, last = room + blocks[last].size, last + 1
            if room >= size and any(b.state == "unmapped" for b in blocks[first:last]):
                return block
        raise AssertionError

    def _map(self, segment: Segment, index: int, amount: int, pool: tuple) -> bool:
        target = segment.blocks[index]
        amount = min(amount, target.size)
        if self.reserved + amount > self.capacity:
            return False
        if amount < target.size:
            rest = Block(target.address + amount, target.size - amount, "unmapped")
            segment.blocks.insert(index + 1, rest)
            target.size = amount
        target.state = "free"
        self._took("segment_map", target.address, amount, pool)
        self._merge(segment)
        return True

    def _release_cached(self) -> None:
        for segment in list(self.segments):
            if segment.owner != (0, 0):
                continue
            pool = (segment.stream, segment.owner, segment.is_small)
            if segment.is_expandable:
                self._unmap(segment, pool)
            elif all(block.state == "free" for block in segment.blocks):
                block = segment.blocks[0]
                self.segments.remove(segment)
                self._note("segment_free", block.address, block.size, pool, self._frames)

    def _unmap(self, segment: Segment, pool: tuple) -> None:
        granule = SMALL_SEGMENT if pool[2] else LARGE_SEGMENT
        base = segment.blocks[0].address
        parts: list[Block] = []
        for block in segment.blocks:
            begin = base + whole(block.address - base, granule)
            end = base + (block.address + block.size - base) // granule * granule
            if block.state != "free" or begin >= end:
                parts.append(block)
                continue
            stop = block.address + block.size
            pieces = [(block.address, begin, "free"), (begin, end, "unmapped"), (end, stop, "free")]
            parts += [Block(one, two - one, state) for one, two, state in pieces if two > one]
            self._note("segment_unmap", begin, end - begin, pool, self._frames)
        segment.blocks = parts
        self._merge(segment)
        if all(block.state == "unmapped" for block in segment.blocks):
            self.segments.remove(segment)

    def _merge(self, segment: Segment) -> None:
        index = 0
        while index + 1 < len(segment.blocks):
            one, two = segment.blocks[index : index + 2]
            if one.state == two.state != "used":
                one.size += two.size
                del segment.blocks[index + 1]
            else:
                index += 1

    def _addresses(self, size: int) -> int:
        """Place a segment as the driver does: small ones in what is left of 32 MiB, from the top down.

        Where the product's allocator has this from is said in allocator/device_memory.py.
        """
        size = whole(size, 2 * MIB)
        for gap in self._gaps if size < 32 * MIB else ():
            if gap[1] - gap[0] >= size:
                gap[0] += size
                return gap[0] - size
        end, self._next = self._next, self._next - whole(size, 32 * MIB)
        self._gaps.append([self._next + size, end])
        return self._next

    def _took(self, action: str, address: int, size: int, pool: tuple) -> None:
        self._note(action, address, size, pool, self._frames)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _note(self, action: str, address: int, size: int, pool: tuple, frames: Frames) -> None:
        self._time += 7
        place = "device_free" if action == "oom" else "addr"
        self.trace.append({
            "action": action,
            place: address,
            "size": size,
            "stream": pool[0],
            "time_us": self._time,
            "compile_context": "",
            "user_metadata": "",
            "pool_id": pool[1],
            "frames": frames,
        })  # fmt: skip

    def snapshot(self, *, keep_last: int | None = None) -> dict:
        """Return what ``torch.cuda.memory._snapshot()`` would, with the last entries alone."""
        trace = self.trace if keep_last is None else self.trace[len(self.trace) - keep_last :]
        segments = [entry for segment in self.segments for entry in self._written(segment)]
        parts = ["expandable_segments:True"] if self.expandable else []
        parts += [] if self.max_split == NEVER else [f"max_split_size_mb:{self.max_split // MIB}"]
        parts += [f"roundup_power2_divisions:{self.divisions}"] if self.divisions > 1 else []
        return {
            "segments": sorted(segments, key=lambda each: each["address"]),
            "device_traces": [[] for _ in range(self.device)] + [list(trace)],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": ",".join(parts),
                "max_split_size": -1 if self.max_split == NEVER else self.max_split,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": self.expandable,
                "pinned_num_register_threads": 1,
                "release_lock_on_cudamalloc": False,
                "pinned_use_cuda_host_register": False,
                "roundup_power2_divisions": {str(2**index): 0 for index in range(16)},
                "graph_capture_record_stream_reuse": False,
            },
            "external_annotations": [],
        }

    def _written(self, segment: Segment) -> list[dict]:
        """Write a segment, or each mapped stretch of an expandable one."""
        stretches: list[list[Block]] = [[]]
        for block in segment.blocks:
            if block.state == "unmapped":
                stretches.append([])
            else:
                stretches[-1].append(block)
        return [self._stretch(segment, stretch) for stretch in stretches if stretch]

    def _stretch(self, segment: Segment, blocks: Sequence[Block]) -> dict:
        used = sum(block.size for block in blocks if block.state == "used")
        return {
            "device": self.device,
            "address": blocks[0].address,
            "total_size": sum(block.size for block in blocks),
            "allocated_size": used,
            "active_size": used,
            "requested_size": sum(block.requested for block in blocks),
            "stream": segment.stream,
            "segment_type": "small" if segment.is_small else "large",
            "segment_pool_id": segment.owner,
            "is_expandable": segment.is_expandable,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": "active_allocated" if block.state == "used" else "inactive",
                    "frames": block.frames,
                }
                for block in blocks
            ],
        }
