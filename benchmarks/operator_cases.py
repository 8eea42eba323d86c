"""Single operators to time: by what they do, in several types and sizes, forward and backward.

Each case gives a function that runs a few operators, which are then timed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Work = Callable[[], object]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCase:
    """A few operators on tensors of one size and type."""

    name: str
    build: Callable[[], Work]
    tf32: bool = False


def operator_cases(device: str, scale: float = 1.0) -> Iterator[OperatorCase]:
    """Yield all cases, those that say most first; ``scale`` makes the tensors smaller."""
    maker = _Maker(device, scale)
    families = (
        maker.products,
        maker.attention,
        maker.convolutions,
        maker.norms,
        maker.elementwise,
        maker.losses,
        maker.reductions,
        maker.embeddings,
        maker.optimizers,
        maker.copies,
    )
    found = [list(each()) for each in families]
    for place in range(max(map(len, found))):
        for each in found:
            yield from each[place : place + 1]


class _Maker:
    """Makes tensors on a device, and the work on them."""

    def __init__(self, device: str, scale: float) -> None:
        self._device, self._scale = device, scale

    def _size(self, size: int) -> int:
        return max(8, int(size * self._scale) // 8 * 8)

    def _random(self, *shape: int, dtype: Any = torch.float32, grad: bool = False) -> Tensor:
        tensor = torch.randn(shape, device=self._device, dtype=torch.float32).to(dtype)
        return tensor.requires_grad_(grad)

    def _types(self) -> tuple[Any, ...]:
        return _FLOATS if self._device == "cuda" else _FLOATS[:1]

    def products(self) -> Iterator[OperatorCase]:
        """Yield matrix products: square, skinny, batched, with a bias."""
        shapes = [(4096, 4096, 4096), (16384, 1024, 4096), (2048, 2048, 2048), (8192, 768, 768)]
        shapes += [(1024, 1024, 1024), (512, 512, 512), (64, 4096, 4096), (8192, 50257, 768)]
        shapes += [(8192, 8, 1024), (256, 256, 256)]
        for m, n, k in shapes:
            sizes = self._size(m), self._size(n), self._size(k)
            for dtype in self._types():
                yield self._product("mm", sizes, dtype)
            if self._device == "cuda":
                yield self._product("mm", sizes, torch.float32, tf32=True)
            yield self._product("linear", sizes, self._types()[-1])
            yield self._product("linear", sizes, torch.float32)
        for batch, length, width in ((96, 512, 64), (32, 1024, 128), (256, 128, 64)):
            for dtype in self._types():
                shape = batch, self._size(length), width
                yield OperatorCase(
                    name=f"bmm {shape} {dtype}",
                    build=lambda shape=shape, dtype=dtype: self._bmm(shape, dtype),
                )

    def _product(
        self, kind: str, sizes: tuple[int, int, int], dtype: Any, *, tf32: bool = False
    ) -> OperatorCase:
        m, n, k = sizes

        def build() -> Work:
            left, right = self._random(m, k, dtype=dtype), self._random(n, k, dtype=dtype)
            bias = self._random(n, dtype=dtype)
            if kind == "linear":
                return lambda: F.linear(left, right, bias)
            return lambda: left @ right.T

        return OperatorCase(name=f"{kind} {sizes} {dtype} tf32={tf32}", build=build, tf32=tf32)

    def _bmm(self, shape: tuple[int, int, int], dtype: Any) -> Work:
        left, right = self._random(*shape, dtype=dtype), self._random(*shape, dtype=dtype)
        return lambda: torch.bmm(left, right.mT) @ right

    def attention(self) -> Iterator[OperatorCase]:
        """Yield attention by each of its kernels, forward and backward."""
        kernels = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
        kernels += (SDPBackend.CUDNN_ATTENTION,)
        for shape in ((8, 12, 1024, 64), (4, 16, 4096, 128), (16, 12, 256, 64), (2, 32, 2048, 128)):
            for kernel in kernels if self._device == "cuda" else kernels[:3:2]:
                for dtype in self._types()[:2]:
                    sizes = (*shape[:2], self._size(shape[2]), shape[3])
                    yield OperatorCase(
                        name=f"attention {kernel.name} {sizes} {dtype}",
                        build=lambda k=kernel, s=sizes, d=dtype: self._attention(k, s, d),
                    )

    def _attention(self, kernel: SDPBackend, shape: tuple[int, ...], dtype: Any) -> Work:
        query, key, value = (self._random(*shape, dtype=dtype, grad=True) for _ in range(3))

        def work() -> None:
            with sdpa_kernel(kernel):
                found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            found.sum().backward()

        return work

    def convolutions(self) -> Iterator[OperatorCase]:
        """Yield convolutions in both layouts, forward and backward."""
        shapes = [(64, 64, 64, 56, 3, 1), (64, 256, 64, 56, 1, 1), (64, 256, 256, 28, 3, 256)]
        shapes += [(32, 512, 512, 14, 3, 1), (32, 3, 64, 224, 7, 1), (16, 128, 128, 112, 3, 1)]
        shapes += [(64, 2048, 512, 7, 1, 1)]
        for shape in shapes:
            for dtype in self._types()[:2]:
                for layout in (torch.contiguous_format, torch.channels_last):
                    for tf32 in (False, True) if dtype is torch.float32 else (False,):
                        if tf32 and self._device != "cuda":
                            continue
                        yield OperatorCase(
                            name=f"convolution {shape} {dtype} {layout} tf32={tf32}",
                            build=lambda s=shape, d=dtype, f=layout: self._convolution(s, d, f),
                            tf32=tf32,
                        )

    def _convolution(self, shape: tuple[int, ...], dtype: Any, layout: Any) -> Work:
        batch, inputs, outputs, pixels, width, groups = shape
        batch = max(1, int(batch * self._scale))
        layer = nn.Conv2d(inputs, outputs, width, padding=width // 2, groups=groups)
        layer = layer.to(self._device, dtype, memory_format=layout)
        images = self._random(batch, inputs, pixels, pixels, dtype=dtype)
        images = images.to(memory_format=layout).requires_grad_()
        return lambda: layer(images).backward(torch.ones_like(layer(images)))

    def norms(self) -> Iterator[OperatorCase]:
        """Yield normalisations, forward and backward."""
        for rows, width in ((16384, 1024), (4096, 4096), (2048, 768)):
            for dtype in self._types()[:2]:
                for kind in (nn.LayerNorm, nn.RMSNorm):
                    yield self._layer(kind(width), (self._size(rows), width), dtype)
        for batch, channels, pixels in ((64, 64, 56), (64, 256, 28), (16, 64, 112)):
            shape = (max(1, int(batch * self._scale)), channels, pixels, pixels)
            for dtype in self._types()[:2]:
                yield self._layer(nn.BatchNorm2d(channels), shape, dtype)
                yield self._layer(nn.GroupNorm(8, channels), shape, dtype)

    def elementwise(self) -> Iterator[OperatorCase]:
        """Yield functions of each element, forward and backward."""
        layers = (nn.GELU(), nn.SiLU(), nn.ReLU(), nn.Dropout(0.1), nn.Sigmoid())
        for rows in (16384, 2048, 128, 65536):
            shape = (self._size(rows), 1024)
            for dtype in self._types()[:2]:
                yield from (self._layer(each, shape, dtype) for each in layers)
                yield OperatorCase(
                    name=f"pointwise {shape} {dtype}",
                    build=lambda s=shape, d=dtype: self._pointwise(s, d),
                )

    def _pointwise(self, shape: tuple[int, ...], dtype: Any) -> Work:
        left, right = self._random(*shape, dtype=dtype), self._random(*shape, dtype=dtype)
        mask = left > 0

        def work() -> None:
            for function in (torch.add, torch.mul, torch.div, torch.maximum):
                function(left, right)
            left.exp(), left.sqrt(), left.tanh(), left * 2.0, left + right[:1]
            left.add_(right, alpha=0.0)
            torch.where(mask, left, right)
            left.masked_fill(mask, 0.0)

        return work

    def losses(self) -> Iterator[OperatorCase]:
        """Yield softmax and cross-entropy, forward and backward."""
        for rows, classes in ((4096, 32000), (8192, 50257), (4096, 1000), (96 * 512, 512)):
            shape = self._size(rows), classes
            for dtype in self._types()[:2]:
                yield self._layer(nn.Softmax(-1), shape, dtype)
                yield self._layer(nn.LogSoftmax(-1), shape, dtype)
                yield OperatorCase(
                    name=f"cross-entropy {shape} {dtype}",
                    build=lambda s=shape, d=dtype: self._cross_entropy(s, d),
                )

    def _cross_entropy(self, shape: tuple[int, int], dtype: Any) -> Work:
        scores = self._random(*shape, dtype=dtype, grad=True)
        targets = torch.randint(0, shape[1], shape[:1], device=self._device)
        return lambda: F.cross_entropy(scores, targets).backward()

    def reductions(self) -> Iterator[OperatorCase]:
        """Yield sums, means and the like."""
        for rows in (16384, 1024, 65536):
            for dtype in self._types()[:2]:
                shape = self._size(rows), 1024
                yield OperatorCase(
                    name=f"reductions {shape} {dtype}",
                    build=lambda s=shape, d=dtype: self._reductions(s, d),
                )

    def _reductions(self, shape: tuple[int, ...], dtype: Any) -> Work:
        values = self._random(*shape, dtype=dtype)

        def work() -> None:
            values.sum(), values.sum(0), values.sum(1), values.mean(1), values.amax(1)
            values.argmax(1), values.var(1), torch.linalg.vector_norm(values)
            values.cumsum(1), values[:, :256].sort(1), values.topk(8, 1)

        return work

    def embeddings(self) -> Iterator[OperatorCase]:
        """Yield look-ups and what adds into rows, forward and backward."""
        for rows, width, lookups in (
            (50257, 768, 8192),
            (400_000, 64, 200_000),
            (1000, 512, 16384),
        ):
            for dtype in self._types()[:2]:
                sizes = self._size(rows), width, self._size(lookups)
                yield OperatorCase(
                    name=f"embedding {sizes} {dtype}",
                    build=lambda s=sizes, d=dtype: self._embedding(s, d),
                )

    def _embedding(self, sizes: tuple[int, int, int], dtype: Any) -> Work:
        rows, width, lookups = sizes
        table = self._random(rows, width, dtype=dtype, grad=True)
        places = torch.randint(0, rows, (lookups,), device=self._device)
        added = self._random(lookups, width, dtype=dtype)

        def work() -> None:
            F.embedding(places, table).backward(added)
            with torch.no_grad():
                table.index_select(0, places), table[places]
                torch.zeros_like(table).index_add_(0, places, added)
                wide = places[:, None].expand_as(added)
                table.gather(0, wide)
                torch.zeros_like(table).scatter_add_(0, wide, added)

        return work

    def optimizers(self) -> Iterator[OperatorCase]:
        """Yield updates of many parameters by each implementation."""
        for num, values in ((50, 1 << 20), (100, 1 << 16), (8, 1 << 24)):
            for choice in ({"foreach": True}, {"fused": True}, {"foreach": False}):
                for kind in (torch.optim.AdamW, torch.optim.SGD):
                    size = max(64, int(values * self._scale**2))
                    yield OperatorCase(
                        name=f"{kind.__name__} {choice} {num} x {size}",
                        build=lambda k=kind, c=choice, n=num, s=size: self._update(k, c, n, s),
                    )

    def _update(self, kind: Any, choice: dict[str, Any], num: int, size: int) -> Work:
        weights = [nn.Parameter(self._random(size)) for _ in range(num)]
        for each in weights:
            each.grad = self._random(size)
        further = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(weights, lr=1e-9, **choice, **further)
        optimizer.step()
        return optimizer.step

    def copies(self) -> Iterator[OperatorCase]:
        """Yield copies, casts, joins and transposed copies on the device."""
        for rows in (16384, 1024, 65536):
            for dtype in self._types()[:2]:
                shape = self._size(rows), 1024
                yield OperatorCase(
                    name=f"copies {shape} {dtype}",
                    build=lambda s=shape, d=dtype: self._copies(s, d),
                )

    def _copies(self, shape: tuple[int, ...], dtype: Any) -> Work:
        values, target = self._random(*shape, dtype=dtype), self._random(*shape, dtype=dtype)

        def work() -> None:
            values.clone(), target.copy_(values), values.T.contiguous()
            values.to(torch.bfloat16 if dtype is torch.float32 else torch.float32)
            torch.cat((values, target)), torch.stack((values, target)), torch.zeros_like(values)
            values[:, ::2].contiguous(), torch.full_like(values, 1.0), values.repeat(1, 2)
            values.view(shape[0], 16, -1).transpose(0, 1).contiguous()

        return work

    def _layer(self, layer: nn.Module, shape: tuple[int, ...], dtype: Any) -> OperatorCase:
        def build() -> Work:
            placed = layer.to(self._device, dtype)
            inputs = self._random(*shape, dtype=dtype, grad=True)
            back = torch.ones_like(inputs)
            return lambda: placed(inputs).backward(back)

        return OperatorCase(name=f"{type(layer).__name__} {shape} {dtype}", build=build)
