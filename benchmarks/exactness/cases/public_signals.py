"""Speech, recommendation, graphs and control, as public code trains them."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from exactness.case import Theme
from exactness.parts import Modules, classifier, cross_entropy, encoder, labelled, make_job, vectors

theme = Theme("public")


class InputNormalisation(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.count = kind, 0
        self.mean, self.std = torch.zeros(12), torch.ones(12)

    def forward(self, x):
        means, stds = x.mean(1).detach(), x.std(1).detach()
        if self.kind == "sentence":
            for i in range(len(x)):
                x[i] = (x[i] - means[i]) / stds[i]
            return x
        share = 1 / (self.count + 1)
        self.mean = (1 - share) * self.mean + share * means.mean(0)
        self.std = (1 - share) * self.std + share * stds.mean(0)
        self.count += 1
        return (x - self.mean) / self.std


def acoustic(kind):
    def model():
        front = nn.Sequential(InputNormalisation(kind), nn.Linear(12, 12))
        return nn.Sequential(front, nn.GRU(12, 8, batch_first=True))

    def loss(model, batch):
        out, _ = model(batch[0])
        return F.cross_entropy(out[:, -1], batch[1])

    def batch(size):
        return torch.randn(size, 5, 12) * 2 + 1, labelled(size)[1]

    return make_job(model, batch, loss, 8)


@theme.case(
    adds="no",
    leaves="different",
    recompute_unsafe=True,
    source="speechbrain/speechbrain speechbrain/processing/features.py (global)",
)
def global_input_normalisation():
    """Moving statistics and a count as plain attributes normalise the features."""
    return acoustic("global")


@theme.case(
    effects=True,
    recompute_unsafe=True,
    source="speechbrain/speechbrain speechbrain/processing/features.py (sentence)",
)
def sentence_normalisation_in_place():
    """Each utterance is normalised by its own statistics, in place: the batch is changed."""
    return acoustic("sentence")


@theme.loss(
    lambda: encoder(3),
    lambda size: (torch.randn(size, 6, 12), torch.randn(size, 6, 3)),
    8,
    source="speechbrain/speechbrain speechbrain/nnet/losses.py (PitWrapper)",
)
def permutation_invariant(model, batch):
    """For each utterance the best order of its sources is found in a Python loop."""
    losses = []
    for prediction, target in zip(model(batch[0]), batch[1], strict=True):
        best = None
        for order in itertools.permutations(range(3)):
            value = (prediction - target[:, list(order)]).pow(2).mean()
            best = value if best is None or value < best else best
        losses.append(best)
    return torch.stack(losses).mean()


def spectrograms(size):
    lengths = torch.tensor([5, 2, 4, 1])[torch.arange(size) % 4]
    real = (torch.arange(5) < lengths[:, None]).float()
    return torch.randn(size, 5, 12) * real[..., None], torch.randn(size, 5, 3), real, lengths


@theme.loss(
    lambda: encoder(4), spectrograms, 8, adds="no", source="NVIDIA/tacotron2 loss_function.py"
)
def spectrograms_by_total_length(model, x, target, real, lengths):
    """Squared errors are divided by the lengths of all utterances; the gate is a plain mean."""
    out = model(x)
    mel = F.mse_loss(out[..., :3] * real[..., None], target * real[..., None], reduction="sum")
    gate = F.binary_cross_entropy_with_logits(out[..., 3], 1 - real)
    return mel / (lengths.sum() * 3) + gate


def factors():
    return Modules(users=nn.Embedding(20, 6), items=nn.Embedding(30, 6))


def interactions(size):
    return tuple(torch.randint(0, n, (size,)) for n in (20, 30, 30))


def bpr(model, batch):
    user, positive, negative = batch
    u, p, n = model.users(user), model.items(positive), model.items(negative)
    return -torch.log(1e-10 + torch.sigmoid((u * p).sum(1) - (u * n).sum(1))).mean(), (u, p, n)


@theme.loss(
    factors, interactions, adds="no", source="RUCAIBox/RecBole recbole/model/loss.py (EmbLoss)"
)
def bpr_with_the_norm_of_the_batch(model, batch):
    """The norm of all the batch's embeddings together, divided by the batch size."""
    value, parts = bpr(model, batch)
    return value + 0.1 * sum(torch.norm(part, p=2) for part in parts) / len(parts[0])


@theme.loss(factors, interactions, source="RUCAIBox/RecBole recbole/model/loss.py (RegLoss)")
def bpr_with_the_norms_of_the_weights(model, batch):
    """The norms of the whole embedding tables."""
    return bpr(model, batch)[0] + 1e-2 * sum(w.norm(2) for w in model.parameters())


class PairNorm(nn.Module):
    def forward(self, x):
        x = x - x.mean(dim=0)
        return x / (1e-6 + x.pow(2).sum(dim=1).mean()).sqrt()


@theme.model(
    labelled,
    cross_entropy,
    adds="no",
    source="pyg-team/pytorch_geometric torch_geometric/nn/norm/pair_norm.py",
)
def pair_norm():
    """Nodes lose their common mean and share one scale."""
    return nn.Sequential(nn.Linear(12, 8), PairNorm(), nn.ReLU(), nn.Linear(8, 4))


@theme.loss(
    lambda: Modules(encode=encoder(), weight=nn.Parameter(torch.randn(8, 8) * 0.3)),
    vectors,
    adds="no",
    draws="shared",
    source="pyg-team/pytorch_geometric torch_geometric/nn/models/deep_graph_infomax.py",
)
def deep_graph_infomax(model, x):
    """A summary of all nodes, against the nodes and a permutation of them."""
    real, fake = model.encode(x), model.encode(x[torch.randperm(len(x))].flip(1))
    summary = model.weight @ real.mean(0).sigmoid()
    return F.softplus(-(real @ summary)).mean() + F.softplus(fake @ summary).mean()


@theme.case(effects=True, source="pytorch/rl torchrl/objectives/dqn.py")
def q_learning_that_writes_priorities():
    """Temporal differences; each sample's error is written into the batch as its priority."""

    def model():
        return Modules(value=classifier(), target=classifier().requires_grad_(False))

    def batch(size):
        x, action = labelled(size)
        return {
            "x": x, "action": action, "next": vectors(size), "reward": torch.randn(size),
            "priority": torch.zeros(size),
        }  # fmt: skip

    def loss(model, batch):
        value = model.value(batch["x"]).gather(1, batch["action"][:, None]).squeeze(1)
        target = batch["reward"] + 0.9 * model.target(batch["next"]).max(1).values
        batch["priority"].copy_((value - target).detach().pow(2))
        return F.mse_loss(value, target)

    return make_job(model, batch, loss)


@theme.loss(
    lambda: Modules(body=encoder(6), log_alpha=nn.Parameter(torch.zeros(()))),
    lambda size: (vectors(size), torch.randn(size, 3)),
    draws="per-sample",
    source="pytorch/rl torchrl/objectives/decision_transformer.py",
)
def entropy_by_drawn_actions(model, batch):
    """Likelihood of actions, and an entropy that is estimated from drawn ones."""
    mean, spread = model.body(batch[0]).chunk(2, -1)
    policy = torch.distributions.Normal(mean, F.softplus(spread) + 0.1)
    entropy = -policy.log_prob(policy.rsample((1,))).mean(0).mean()
    alpha = model.log_alpha.exp()
    value = -policy.log_prob(batch[1]).mean() - alpha.detach() * entropy
    return value + alpha * (entropy + 3.0).detach()


@theme.loss(
    lambda: Modules(actor=classifier(), critic=encoder(1)),
    lambda size: (*labelled(size), torch.randn(size), torch.randn(size), -torch.rand(size) - 0.7),
    adds="no",
    source="DLR-RM/stable-baselines3 stable_baselines3/ppo/ppo.py",
)
def ppo(model, batch):
    """Clipped ratios with advantages that are whitened over the minibatch."""
    x, action, advantage, returns, old = batch
    policy = torch.distributions.Categorical(logits=model.actor(x))
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = torch.exp(policy.log_prob(action) - old)
    value = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
    value = value + 0.5 * F.mse_loss(returns, model.critic(x).flatten())
    return value - 0.01 * policy.entropy().mean()


def utterances(size):
    lengths = torch.tensor([6, 2, 4, 5])[torch.arange(size) % 4]
    return torch.randn(size, 6, 12), torch.randn(size, 6), lengths


@theme.loss(
    lambda: encoder(1),
    utterances,
    8,
    source="speechbrain/speechbrain speechbrain/nnet/losses.py (compute_masked_loss, batchmean)",
)
def masked_loss_by_batch_size(model, x, target, lengths):
    """Masked errors of all utterances, divided by their number."""
    mask = torch.arange(6) < lengths[:, None]
    return (F.l1_loss(model(x).squeeze(-1), target, reduction="none") * mask).sum() / len(x)


@theme.loss(
    lambda: encoder(1),
    utterances,
    8,
    adds="no",
    source="speechbrain/speechbrain speechbrain/nnet/losses.py (compute_masked_loss, mean)",
)
def masked_loss_by_mask(model, x, target, lengths):
    """The same, divided by the number of frames that are not masked."""
    mask = torch.arange(6) < lengths[:, None]
    losses = F.l1_loss(model(x).squeeze(-1), target, reduction="none") * mask
    return losses.sum() / mask.sum()


@theme.case(source="pyg-team/pytorch_geometric torch_geometric/nn/norm/graph_norm.py")
def graph_norm_of_dense_graphs():
    """Each graph's nodes are normalised by that graph's own statistics, with a learned share."""

    class Graphs(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.head = nn.Linear(12, 8), nn.Linear(8, 4)
            self.share = nn.Parameter(torch.ones(8))

        def forward(self, x, adjacency):
            z = adjacency @ self.one(x)
            z = z - self.share * z.mean(1, keepdim=True)
            return self.head(
                torch.relu(z / (z.square().mean(1, keepdim=True) + 1e-5).sqrt()).sum(1)
            )

    def batch(size):
        return torch.randn(size, 6, 12), (torch.rand(size, 6, 6) < 0.5).float(), labelled(size)[1]

    return make_job(Graphs, batch, lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]))
