"""Node classification by neighbour sampling on an edge list; message passing with scatter, no graph library."""
import argparse
import os.path as osp
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument('--root', type=str, default='data/graph')
parser.add_argument('--nodes', type=int, default=20000)
parser.add_argument('--hidden', type=int, default=128)
parser.add_argument('--layers', type=int, default=2)
parser.add_argument('--heads', type=int, default=4)
parser.add_argument('--batch-size', type=int, default=256)
parser.add_argument('--fanout', type=int, default=10)
parser.add_argument('--epochs', type=int, default=2)
parser.add_argument('--max-batches', type=int, default=8)
parser.add_argument('--lr', type=float, default=0.005)
parser.add_argument('--dropout', type=float, default=0.5)
args = parser.parse_args()

device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def load_graph():
    path = osp.join(args.root, f'graph_{args.nodes}.pt')
    if not osp.exists(path):
        Path(args.root).mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        y = rng.integers(0, 7, args.nodes)
        # preferential attachment: a few hubs have most of the edges
        src = rng.integers(0, args.nodes, args.nodes * 8)
        dst = (args.nodes * rng.random(args.nodes * 8) ** 3).astype(np.int64)
        same = rng.random(len(src)) < 0.5
        by_class = [np.flatnonzero(y == c) for c in range(7)]
        dst[same] = [rng.choice(by_class[y[s]]) for s in src[same]]
        x = rng.normal(0, 1, (args.nodes, 64)) + np.eye(7, 64)[y] * 0.8
        edge_index = torch.from_numpy(np.stack([np.r_[src, dst], np.r_[dst, src]])).long()
        edge_index = torch.unique(edge_index, dim=1)
        mask = torch.from_numpy(rng.random(args.nodes))
        torch.save({'x': torch.from_numpy(x).float(), 'y': torch.from_numpy(y), 'edge_index': edge_index,
                    'train': mask < 0.6, 'val': (mask >= 0.6) & (mask < 0.8), 'test': mask >= 0.8}, path)
    return torch.load(path)


class NeighbourSampler:
    """Subgraphs of the nodes around a batch of seeds, at most ``fanout`` in-edges per node and hop."""

    def __init__(self, edge_index, num_nodes, fanout, hops):
        order = edge_index[1].argsort(stable=True)
        self.src = edge_index[0][order]
        counts = torch.bincount(edge_index[1], minlength=num_nodes)
        self.ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self.fanout, self.hops = fanout, hops

    def sample(self, seeds):
        nodes, edges, frontier = seeds, [], seeds
        for _ in range(self.hops):
            picked_src, picked_dst = [], []
            for n in frontier.tolist():
                a, b = self.ptr[n].item(), self.ptr[n + 1].item()
                if b == a:
                    continue
                if b - a > self.fanout:
                    idx = a + torch.randperm(b - a)[:self.fanout]
                else:
                    idx = torch.arange(a, b)
                picked_src.append(self.src[idx])
                picked_dst.append(torch.full_like(idx, n))
            edges.append(torch.stack([torch.cat(picked_src), torch.cat(picked_dst)]))
            everything = torch.cat([nodes, edges[-1][0]])
            frontier = torch.tensor(sorted(set(everything.tolist()) - set(nodes.tolist())), dtype=torch.long)
            nodes = torch.cat([nodes, frontier])
        edge_index = torch.unique(torch.cat(edges, dim=1), dim=1)
        local = torch.full((int(self.ptr.numel()) - 1,), -1, dtype=torch.long)
        local[nodes] = torch.arange(len(nodes))
        return nodes, local[edge_index]


class GATLayer(nn.Module):
    def __init__(self, cin, cout, heads, dropout):
        super().__init__()
        self.heads, self.cout, self.dropout = heads, cout, dropout
        self.lin = nn.Linear(cin, heads * cout, bias=False)
        self.a_src = nn.Parameter(torch.empty(heads, cout))
        self.a_dst = nn.Parameter(torch.empty(heads, cout))
        self.res = nn.Linear(cin, heads * cout)
        nn.init.xavier_uniform_(self.a_src)
        nn.init.xavier_uniform_(self.a_dst)

    def forward(self, x, edge_index):
        n = x.size(0)
        src, dst = edge_index
        h = self.lin(x).view(n, self.heads, self.cout)
        e = F.leaky_relu((h * self.a_src).sum(-1)[src] + (h * self.a_dst).sum(-1)[dst], 0.2)
        # softmax over the in-edges of each node
        peak = torch.full((n, self.heads), float('-inf'), device=x.device)
        peak = peak.scatter_reduce(0, dst[:, None].expand_as(e), e.detach(), reduce='amax')
        w = (e - peak[dst]).exp()
        total = torch.zeros(n, self.heads, device=x.device).scatter_add(0, dst[:, None].expand_as(w), w)
        w = F.dropout(w / total[dst].clamp(min=1e-9), self.dropout, self.training)
        out = torch.zeros_like(h).index_add(0, dst, h[src] * w[..., None])
        return out.flatten(1) + self.res(x)


class GAT(nn.Module):
    def __init__(self, cin, hidden, classes, layers, heads, dropout):
        super().__init__()
        self.layers = nn.ModuleList()
        for i in range(layers):
            self.layers.append(GATLayer(cin if i == 0 else hidden, hidden // heads, heads, dropout))
        self.out = nn.Linear(hidden, classes)
        self.dropout = dropout

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = F.dropout(F.elu(layer(x, edge_index)), self.dropout, self.training)
        return self.out(x)


data = load_graph()
x, y, edge_index = data['x'], data['y'], data['edge_index']
sampler = NeighbourSampler(edge_index, args.nodes, args.fanout, args.layers)
model = GAT(x.size(1), args.hidden, int(y.max()) + 1, args.layers, args.heads, args.dropout).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)
print(model, edge_index.size(1), 'edges')


def train():
    model.train()
    seeds = data['train'].nonzero().view(-1)
    seeds = seeds[torch.randperm(len(seeds))]
    total_loss = total = 0
    for i, batch in enumerate(seeds.split(args.batch_size)):
        if i == args.max_batches:
            break
        nodes, edges = sampler.sample(batch)
        optimizer.zero_grad()
        out = model(x[nodes].to(device), edges.to(device))[:len(batch)]
        loss = F.cross_entropy(out, y[batch].to(device))
        loss.backward()
        optimizer.step()
        total_loss += float(loss) * len(batch)
        total += len(batch)
        print(f'  batch {i}: {len(nodes)} nodes {edges.size(1)} edges loss {float(loss):.4f}')
    return total_loss / total


@torch.no_grad()
def test():
    model.eval()
    pred = model(x.to(device), edge_index.to(device)).argmax(dim=-1).cpu()  # the whole graph at once
    return [(pred[data[m]] == y[data[m]]).float().mean().item() for m in ('train', 'val', 'test')]


best_val = test_acc = 0
for epoch in range(1, args.epochs + 1):
    loss = train()
    train_acc, val_acc, tmp = test()
    if val_acc > best_val:
        best_val, test_acc = val_acc, tmp
    print(f'Epoch {epoch:03d}: loss {loss:.4f}, train {train_acc:.4f}, val {val_acc:.4f}, test {test_acc:.4f}')
