"""The sizes and dropouts that define a ConvE model, checked before anything is built."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memfit.errors import UsageError
from memfit_workloads.model_sizes import ModelSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvESizes(ModelSizes):
    """Everything needed to build the model again."""

    num_entities: int
    num_relations: int
    """Without the inverse relations; the model embeds twice as many."""
    embedding_dim: int = 200
    embedding_height: int = 10
    embedding_width: int = 20
    output_channels: int = 32
    kernel_height: int = 3
    kernel_width: int = 3
    input_dropout: float = 0.2
    feature_map_dropout: float = 0.2
    output_dropout: float = 0.3

    def __post_init__(self) -> None:
        check_image(self.embedding_dim, self.embedding_height, self.embedding_width)
        if (
            self.kernel_height > 2 * self.embedding_height
            or self.kernel_width > self.embedding_width
        ):
            msg = (
                f"The kernel of {self.kernel_height} x {self.kernel_width} is larger than the "
                f"stacked image of {2 * self.embedding_height} x {self.embedding_width}. Needed is "
                "a smaller kernel, or an embedding of more even height and width."
            )
            raise UsageError(msg)

    @property
    def feature_height(self) -> int:
        """Return the height of the feature maps: of the two stacked images, less the kernel."""
        return 2 * self.embedding_height - self.kernel_height + 1

    @property
    def feature_width(self) -> int:
        """Return the width of the feature maps."""
        return self.embedding_width - self.kernel_width + 1

    @property
    def num_features(self) -> int:
        """Return the entries of all feature maps of one query."""
        return self.output_channels * self.feature_height * self.feature_width


def check_image(embedding_dim: int, height: int, width: int) -> None:
    """Refuse an embedding that does not fill its image.

    Raises:
        UsageError: with the nearest sizes that fit.
    """
    if embedding_dim == height * width:
        return
    near = nearest_image(embedding_dim)
    msg = (
        f"--embedding-dim {embedding_dim} does not fill an image of --embedding-height {height} x "
        f"--embedding-width {width} = {height * width}. Use --embedding-dim {height * width}, or "
        f"--embedding-dim {near[0] * near[1]} --embedding-height {near[0]} "
        f"--embedding-width {near[1]}."
    )
    raise UsageError(msg)


def even_image(embedding_dim: int) -> tuple[int, int]:
    """Return the height and width that fill an embedding most evenly, height below width."""
    height = max(h for h in range(1, math.isqrt(embedding_dim) + 1) if embedding_dim % h == 0)
    return height, embedding_dim // height


def nearest_image(embedding_dim: int) -> tuple[int, int]:
    """Return the image nearest to a size whose width is at most four times its height."""
    for distance in range(embedding_dim + 1):
        for size in (embedding_dim + distance, embedding_dim - distance):
            height, width = even_image(max(size, 1))
            if width <= 4 * height:
                return height, width
    raise AssertionError("the image of 1 x 1 is always found")
