"""Into which blocks oneDNN cuts the columns of a result, so that they stay in a core's cache.

It tries a handful of blocks and takes the ones that it expects most of; so do these rules.

Source: ``init_conf`` in src/cpu/gemm_convolution_utils.cpp of oneDNN 3.12, in fp32.

Limits: a core's second cache is taken to have half a MiB, as oneDNN does where it cannot ask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from memfit.kernels.cpu_onednn_3_12.convolutions.avx2_choice import BLOCK, VOLUME_DIMS
from memfit.kernels.cpu_onednn_3_12.convolutions.shape import Convolution
from memfit.kernels.rounding import round_up
from memfit.units import KIB

_FP32 = 4
_CACHE = 512 * KIB // _FP32
_NARROW_FRACTION = 0.05
_MISS_COST, _STRIDED_COST = 20, 8
_LONG_ROW = 48
_SHARE_POWER = 8
_GOOD_FRACTION = 0.9
_PRODUCT_FACTOR = 5


def are_cut(shape: Convolution, num_threads: int) -> bool:
    """Return whether columns are cut into blocks."""
    rows, parts = math.prod(shape.result), shape.batch * shape.groups
    depth = shape.in_per_group * math.prod(shape.kernel)
    is_narrow = shape.stride[-1] == 1 and depth <= _NARROW_FRACTION * shape.out_per_group
    is_wide = parts * rows >= num_threads * BLOCK
    return len(shape.kernel) < VOLUME_DIMS and (is_wide or rows < parts or is_narrow)


def best_cut(shape: Convolution, num_threads: int) -> tuple[int, int]:
    """Return the channels and the positions of the blocks that each thread unfolds."""
    best, best_score = _Cut(threads_out=1, channels_out=1, positions=1, channels=0), 0.0
    for threads_out in range(1, num_threads + 1):
        work = _Work.of(shape, num_threads, threads_out)
        whole = work.cut(work.channels_out, work.positions)
        score = work.score(whole)
        if score > best_score:
            best, best_score = whole, score
        if (best.channels_out, best.positions, best.channels) == work.whole:
            continue
        for cut in work.cuts():
            score = work.score(cut)
            if score > best_score:
                best, best_score = cut, score
    return best.channels or shape.in_per_group, best.positions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Blocks of channels of the result, of positions and of channels of the image."""

    threads_out: int
    channels_out: int
    positions: int
    channels: int
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What a thread computes if so many threads share the channels of the result."""

    shape: Convolution
    num_threads: int
    threads_out: int
    spatial: int
    channels_out: int
    positions: int
    num_taps: int
    steps: int

    @classmethod
    def of(cls, shape: Convolution, num_threads: int, threads_out: int) -> _Work:
        """Share positions among the threads that are left."""
        spatial = shape.batch * shape.groups * math.prod(shape.result)
        return cls(
            shape=shape,
            num_threads=num_threads,
            threads_out=threads_out,
            spatial=spatial,
            channels_out=-(-shape.out_per_group // threads_out),
            positions=-(-spatial // (num_threads // threads_out)),
            num_taps=math.prod(shape.kernel),
            steps=math.prod(shape.stride[-2:]),
        )

    @property
    def whole(self) -> tuple[int, int, int]:
        """Return the blocks that need no cutting."""
        return self.channels_out, self.positions, self.shape.in_per_group

    def cuts(self) -> Iterator[_Cut]:
        """Yield the blocks that are tried, and such as fill registers."""
        for channels_out, positions in self._starts():
            low, high = channels_out // BLOCK * BLOCK, round_up(channels_out, BLOCK)
            short = positions // _LONG_ROW * _LONG_ROW
            yield self.cut(channels_out, positions)
            yield self.cut(low, short)
            yield self.cut(high, short)
            yield self.cut(high, round_up(positions, BLOCK))
            yield self.cut(high, round_up(positions, _LONG_ROW))

    def _starts(self) -> Iterator[tuple[int, int]]:
        """Yield blocks that fill the cache with all channels, with some, and with all results."""
        image = self.steps + self.num_taps
        weight = self.num_taps * self.channels_out
        channels = self.shape.in_per_group
        left = _CACHE - weight * channels
        channels_out = self._some_out(_whole(left - image * channels * BLOCK, BLOCK))
        yield channels_out, self._some(_whole(left, image * channels + channels_out))
        most = max(1, _CACHE // (2 * BLOCK * image + 2 * weight))
        if most < channels:
            some = channels // max(1, channels // most)
            positions = max(1, _whole(_CACHE - 2 * weight * some, 2 * some * image))
            channels_out = _CACHE // 2 // positions
            if channels_out > self.channels_out:
                channels_out = self.channels_out
                free = _CACHE - weight * some
                positions = self._some(_whole(free, image * some + channels_out))
            elif positions > self.positions:
                positions = self.positions
                free = _CACHE - image * some * positions - weight * some
                channels_out = self._some_out(_whole(free, positions))
            yield channels_out, positions
        fitting = _whole(left, image * channels + self.channels_out)
        yield self.channels_out, max(BLOCK, _whole(fitting, BLOCK) * BLOCK)

    def _some_out(self, channels_out: int) -> int:
        return max(BLOCK, min(self.channels_out, channels_out))

    def _some(self, positions: int) -> int:
        return max(BLOCK, min(self.positions, positions))

    def cut(self, channels_out: int, positions: int) -> _Cut:
        """Bound the blocks of results, and find the channels of the image that fit beside them."""
        channels_out = min(self.channels_out, self._some_out(channels_out))
        positions = min(self._most_positions, self._some(positions))
        fitting = self._fitting(channels_out, positions)
        all_channels = self.shape.in_per_group
        channels = max(1, all_channels // -(-all_channels // max(1, fitting)))
        return _Cut(
            threads_out=self.threads_out,
            channels_out=channels_out,
            positions=positions,
            channels=channels,
            fits=fitting >= 1,
        )

    @property
    def _most_positions(self) -> int:
        return min(math.prod(self.shape.result), self.positions)

    def _fitting(self, channels_out: int, positions: int) -> int:
        """Return the channels of the image that fit into the cache."""
        row = self.steps * positions + self.num_taps * positions
        beside = _CACHE - channels_out * positions
        with_weight = _whole(beside, row + self.num_taps * self.channels_out)
        if positions < self.positions:
            return with_weight
        found = _CACHE // row
        if channels_out < self.channels_out:
            found = min(
                found, _whole(beside, self.num_taps * positions + self.num_taps * channels_out)
            )
        return with_weight if found < self.shape.in_per_group else found

    def score(self, cut: _Cut) -> float:
        """Return what is expected of blocks: even shares, few tails, and few reads for each sum."""
        channels = self.shape.in_per_group
        depth, part = channels * self.num_taps, cut.channels * self.num_taps
        row = round_up(cut.positions, BLOCK)
        products = cut.positions / BLOCK * cut.channels_out * part
        moved = row * part + cut.channels_out * round_up(part, BLOCK) + cut.channels_out * row
        tails = (
            (self.channels_out, cut.channels_out),
            (self._most_positions, cut.positions),
            (channels, cut.channels),
            (cut.positions, 3 * BLOCK),
        )
        size = cut.positions * cut.channels_out * part
        size_fraction = size / (self.channels_out * self.positions * depth)
        evenness: float = self._evenness() ** _SHARE_POWER
        return (
            evenness
            * math.prod(whole / round_up(whole, block) for whole, block in tails)
            * self._reuse(cut)
            * math.sqrt(size_fraction)
            * products
            / moved
        )

    def _evenness(self) -> float:
        """Return the least share of a thread as a fraction of the largest."""
        all_out, threads, threads_out = (
            self.shape.out_per_group,
            self.num_threads,
            self.threads_out,
        )
        least_out = max(1, all_out // threads_out)
        slices = -(-threads // threads_out)
        few, fewest = -(-self.spatial // slices), max(1, self.spatial // slices)
        if all_out % threads_out > threads % threads_out:
            most = self.channels_out * self.positions
        else:
            most = max(self.channels_out * few, least_out * self.positions)
        if threads % threads_out > all_out % threads_out:
            least = least_out * fewest
        else:
            many = self.spatial // (threads // threads_out)
            least = min(self.channels_out * fewest, least_out * many)
        return least / most

    def _reuse(self, cut: _Cut) -> float:
        """Return the products for each element that is read or written."""
        channels, cost = self.shape.in_per_group, 1 if cut.fits else _MISS_COST
        passes = 1 if cut.channels == channels else 2 * -(-channels // cut.channels) - 1
        results = self.channels_out * round_up(self.positions, BLOCK) * passes
        image = self.num_taps * channels * round_up(self.positions * self.steps, BLOCK)
        columns = 2 * image * round_up(cut.positions, BLOCK) / cut.positions
        columns *= _STRIDED_COST if self.shape.stride[-1] > 1 else 1
        depth = channels * self.num_taps
        weight = self.channels_out * round_up(depth, BLOCK)
        products = self.positions / BLOCK * self.channels_out * depth
        return products / (cost * (image + columns + weight + results))


def _whole(number: int, divisor: int) -> int:
    """Divide as C does, towards zero."""
    return int(number / divisor)


def are_last_cut(shape: Convolution) -> bool:
    """Return whether columns are cut into rows and parts of rows, channels last."""
    is_single = shape.in_per_group == shape.out_per_group == 1 < shape.groups
    weight = shape.in_per_group * shape.out_per_group * math.prod(shape.kernel[-2:])
    is_flat = len(shape.kernel) < VOLUME_DIMS
    return is_flat and not shape.is_dilated and not is_single and weight < _CACHE // 2


def best_last_cut(shape: Convolution, num_threads: int) -> tuple[int, bool]:
    """Return the positions of a block, and whether each thread takes blocks of its own."""
    rows, row = shape.result[-2:]
    height, width = _fitting_last(shape)
    found, parts = 0.0, shape.groups * shape.batch
    if width == row:
        height, found = _even(rows, height, 4, parts, num_threads)
    if found < _GOOD_FRACTION:
        height = 1
        width, found = _even(row, width, BLOCK, parts * rows, num_threads)
    height, width = max(1, height), max(1, width)
    inner = -(-rows * row // BLOCK) * -(-shape.out_per_group // BLOCK)
    is_outer = found >= inner / round_up(inner, num_threads) / 2
    if not is_outer:
        height, width = rows, row
    return height * (row if height != 1 else width), is_outer


def _fitting_last(shape: Convolution) -> tuple[int, int]:
    """Return the rows that fit into the cache or, of one that doesn't, its positions."""
    channels, out = shape.in_per_group, shape.out_per_group
    rows, row = shape.result[-2:]
    size = math.prod(shape.kernel)
    used = channels * row * size + 2 * (channels * shape.image[-1] + out * row)
    used = (used * _PRODUCT_FACTOR + out * row + channels * shape.image[-1]) * _FP32
    height, width = max(1, min(rows, -(-_CACHE // used))), row
    if height == 1:
        used = (channels * size + 2 * (channels + out)) * _FP32
        width = max(1, min(row, -(-_CACHE // used)))
    height = height if height == rows else max(1, height // 4 * 4)
    width = width if width == row else max(1, width // BLOCK * BLOCK)
    return height, width


def _even(whole: int, block: int, step: int, parts: int, num_threads: int) -> tuple[int, float]:
    """Shrink a block until threads share the work evenly; say how evenly."""
    while True:
        work = parts * -(-whole // block)
        fraction = (work / round_up(work, num_threads) + whole / round_up(whole, block)) / 2
        if fraction >= _GOOD_FRACTION:
            return block, fraction
        block = 0 if block < step else (block - step) // step * step
        if block <= 0:
            return 0, fraction
