"""A placement: the device that a step runs on, and this rank among those that train together."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import UsageError

_MOST_DEVICES_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one rank of a step runs. One rank on one device is the special case.

    Raises:
        UsageError: if the numbers do not go together.
    """

    device: str = "cpu"
    """A name from ``memfit devices``; every rank has one of these."""
    num_ranks: int = 1
    rank: int = 0
    """The rank that is looked at. The first ones get the largest shards of what is uneven."""
    devices_per_node: int | None = None
    """How many ranks share a machine; None means as many as there are, up to 8."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise UsageError(f"A placement needs at least 1 rank, not {self.num_ranks}.")
        if not 0 <= self.rank < self.num_ranks:
            raise UsageError(
                f"There is no rank {self.rank} among {self.num_ranks} rank(s): they are numbered "
                f"0 to {self.num_ranks - 1}."
            )
        if self.devices_per_node is None:
            return
        if self.devices_per_node < 1:
            raise UsageError(f"A node has at least 1 device, not {self.devices_per_node}.")
        is_one_node = self.devices_per_node >= self.num_ranks
        if not is_one_node and self.num_ranks % self.devices_per_node:
            raise UsageError(
                f"{self.num_ranks} ranks do not fill nodes of {self.devices_per_node} devices: the "
                f"last one would have {self.num_ranks % self.devices_per_node}."
            )

    @property
    def ranks_per_node(self) -> int:
        """Return how many ranks share a machine."""
        return min(self.num_ranks, self.devices_per_node or _MOST_DEVICES_PER_NODE)

    @property
    def num_nodes(self) -> int:
        """Count the machines."""
        return -(-self.num_ranks // self.ranks_per_node)

    @property
    def local_rank(self) -> int:
        """Return the number of this rank on its machine."""
        return self.rank % self.ranks_per_node

    @property
    def node(self) -> int:
        """Return the number of this rank's machine."""
        return self.rank // self.ranks_per_node
