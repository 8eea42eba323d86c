"""A mixture of experts over rows, and the loss that keeps its experts in use.

Shape suffixes: N rows, D features, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MixtureOfExperts(nn.Module):
    """Send each row through its best experts.

    All experts see all rows, and the weights of those not chosen are 0: the same values as with
    rows sent around, and shapes that do not depend on values.

    Args:
        width: D.
        hidden: of each expert.
        num_experts: E.
        top_k: experts per row; their logits make a softmax.
        dropout: inside experts.
        is_residual: whether what experts give is added to the row; experts then begin with 0.
    """

    def __init__(
        self,
        width: int,
        *,
        hidden: int,
        num_experts: int,
        top_k: int,
        dropout: float,
        is_residual: bool,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.inner = nn.ModuleList(nn.Linear(width, hidden) for _ in range(num_experts))
        self.outer = nn.ModuleList(nn.Linear(hidden, width) for _ in range(num_experts))
        self._top_k, self._dropout, self._is_residual = top_k, dropout, is_residual
        if is_residual:
            for parameter in self.outer.parameters():
                nn.init.zeros_(parameter)

    def forward(self, rows_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixture (N, D), and the logits of the gate (N, E)."""
        logits_NE = self.gate(rows_ND)
        weights_NE = chosen_weights(logits_NE, self._top_k)
        out_ND = rows_ND if self._is_residual else torch.zeros_like(rows_ND)
        for number, (inner, outer) in enumerate(zip(self.inner, self.outer, strict=True)):
            hidden = F.dropout(inner(rows_ND).relu(), self._dropout, self.training)
            out_ND = out_ND + weights_NE[:, number : number + 1] * outer(hidden)
        return out_ND, logits_NE


def chosen_weights(logits_NE: Tensor, top_k: int) -> Tensor:
    """Return a softmax over the highest logits of each row, 0 for all others, (N, E)."""
    highest, places = logits_NE.topk(top_k, dim=1)
    return torch.zeros_like(logits_NE).scatter(1, places, highest.softmax(1))


def balance_loss(logits_NE: Tensor, top_k: int) -> Tensor:
    """Return E sum_e f_e P_e: f the share of choices that fall on e, P its mean probability.

    Both are means over the rows, and their product is none of means over parts of them.
    """
    num_experts = logits_NE.shape[1]
    chosen_NE = torch.zeros_like(logits_NE).scatter(1, logits_NE.topk(top_k, dim=1).indices, 1.0)
    share_E = chosen_NE.mean(0) / top_k
    return num_experts * (share_E * logits_NE.softmax(1).mean(0)).sum()
