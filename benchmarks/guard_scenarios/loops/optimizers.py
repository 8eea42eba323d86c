"""Optimizers with states of their own, and what changes their settings."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import nn

from guard_scenarios.training import adamw, classifier, cross_entropy, scenario, training_of


class Lookahead(torch.optim.Optimizer):
    """Slow weights and a counter beside the states of an inner optimizer."""

    def __init__(self, inner, every=2, alpha=0.5):
        self.inner = inner
        self.every, self.alpha = every, alpha
        self.counter = 0
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = inner.state
        self.slow = [[p.detach().clone() for p in g["params"]] for g in inner.param_groups]
        self._optimizer_step_pre_hooks = inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = inner._optimizer_step_post_hooks
        self._optimizer_state_dict_pre_hooks = inner._optimizer_state_dict_pre_hooks
        self._optimizer_state_dict_post_hooks = inner._optimizer_state_dict_post_hooks

    def step(self, closure=None):
        self.counter += 1
        self.inner.step(closure)
        if self.counter % self.every == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.add_(p.data - s, alpha=self.alpha)
                    p.data.copy_(s)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none=set_to_none)


@scenario("Lookahead around Adam, slow weights in a list", of="optimizer")
def lookahead(ps):
    return Lookahead(torch.optim.Adam(ps, lr=0.05))


@scenario("optimizer with global keys in its state", of="optimizer")
class GlobalKeys(torch.optim.Optimizer):
    """Keeps a norm and a count under keys of their own in ``state``."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.state["num_steps"] = 0
        self.state["norms"] = {"mean": torch.zeros(()), "largest": 0.0}
        self.history = []

    @torch.no_grad()
    def step(self, closure=None):
        self.state["num_steps"] += 1
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        norms = self.state["norms"]
        norms["mean"].lerp_(norm, 0.3)
        norms["largest"] = max(norms["largest"], float(norm))
        self.history.append(float(norm))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / (norms["mean"] + 1e-3), alpha=-group["lr"])


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, both halves in ``step`` with a closure kept from outside."""

    def __init__(self, params, rho=0.05, lr=0.1):
        super().__init__(params, {"rho": rho, "lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.again = None

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.05 / (float(norm) + 1e-12))
        if self.again is not None:
            self.zero_grad()
            with torch.enable_grad():
                self.again()
        for p in params:
            p.data = self.state[p]["old"]
        self.base.step()


@scenario("SAM with a second closure")
def sam():
    model = classifier()
    holder = {}

    def loss(model, batch):
        holder["batch"] = batch
        return cross_entropy(model, batch)

    def started(run):
        run.optimizer.again = lambda: cross_entropy(model, holder["batch"]).backward()

    return training_of(model, loss=loss, optimizer=SAM, started=started)


@scenario("Adafactor-like optimizer", of="optimizer")
class Factored(torch.optim.Optimizer):
    """Rows and columns of the second moment, as Adafactor keeps them."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    if p.dim() == 2:
                        state["row"] = torch.zeros(p.shape[0])
                        state["col"] = torch.zeros(p.shape[1])
                    else:
                        state["sq"] = torch.zeros_like(p)
                state["step"] += 1
                beta = 1.0 - state["step"] ** -0.8
                square = p.grad**2 + 1e-30
                if p.dim() == 2:
                    state["row"].mul_(beta).add_(square.mean(1), alpha=1 - beta)
                    state["col"] = beta * state["col"] + (1 - beta) * square.mean(0)
                    scale = torch.outer(state["row"], state["col"]) / state["row"].mean()
                else:
                    scale = state["sq"].mul_(beta).add_(square, alpha=1 - beta)
                p.sub_(group["lr"] * p.grad / scale.sqrt().clamp_min(1e-6))


@scenario("optimizer that adapts in its attributes", of="optimizer")
class Bound(torch.optim.SGD):
    """Counts and adapts in attributes."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr, momentum=0.9)
        self.rejected = 0
        self.best = math.inf
        self.by_shape = defaultdict(int)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.by_shape[tuple(p.shape)] += 1
        norm = sum(float(p.grad.norm()) for g in self.param_groups for p in g["params"])
        if norm > self.best:
            self.rejected += 1
        self.best = min(self.best, norm)
        return super().step(closure)


@scenario("gradients gathered over two run.steps by the optimizer", of="optimizer")
class WithHook(torch.optim.Optimizer):
    """Every 2nd step only, gradients gathered in a list meanwhile."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.gathered = []

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for g in self.param_groups for p in g["params"]]
        self.gathered.append([p.grad.clone() for p in params])
        if len(self.gathered) < 2:
            return
        for p, grads in zip(params, zip(*self.gathered, strict=True), strict=True):
            p.sub_(0.1 * torch.stack(grads).mean(0))
        self.gathered.clear()


@scenario("fused AdamW", of="optimizer")
def fused(ps):
    return torch.optim.AdamW(ps, lr=0.05, fused=True)


@scenario("foreach AdamW with amsgrad", of="optimizer")
def foreach(ps):
    return torch.optim.AdamW(ps, lr=0.05, foreach=True, amsgrad=True)


@scenario("AdamW parameter by parameter", of="optimizer")
def for_loop(ps):
    return torch.optim.AdamW(ps, lr=0.05, foreach=False)


@scenario("SGD with momentum, two groups, gradient clipping")
def momentum():
    model = classifier()

    def optimizer(ps):
        ps = list(ps)
        groups = [{"params": ps[:2], "lr": 0.1}, {"params": ps[2:], "lr": 0.02}]
        return torch.optim.SGD(groups, momentum=0.9, nesterov=True, lr=0.1)

    return training_of(model, optimizer=optimizer, clip_grad_norm=0.3)


@scenario("NAdam, whose states are created one after another", of="optimizer")
def nadam(ps):
    return torch.optim.NAdam(ps, lr=0.02)


@scenario("LBFGS-like optimizer that keeps a history of closures", of="optimizer")
class History(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})
        self._previous = None
        self._pairs = []

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for g in self.param_groups for p in g["params"]]
        flat = torch.cat([p.grad.reshape(-1) for p in params])
        where = torch.cat([p.reshape(-1) for p in params])
        if self._previous is not None:
            y, s = flat - self._previous[0], where - self._previous[1]
            self._pairs = [*self._pairs, (y, s, 1.0 / (y.dot(s).abs() + 1e-3))][-3:]
        self._previous = flat.clone(), where.clone()
        for y, _, r in reversed(self._pairs):
            flat = flat - 0.01 * r * y.dot(flat) * y
        offset = 0
        for p in params:
            p.sub_(0.05 * flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()


@scenario("scheduler stepped in a hook of the optimizer")
def scheduler_in_hook():
    model = classifier()
    schedules = []

    def started(run):
        schedules.append(torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=12))
        run.optimizer.register_step_post_hook(lambda o, a, k: schedules[0].step())

    return training_of(model, started=started, watched=[schedules])


@scenario("scheduler stepped by the caller")
def scheduler_by_caller():
    schedules = []

    def started(run):
        schedules.append(torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 6))

    return training_of(
        classifier(),
        started=started,
        after=lambda run, number: schedules[0].step(),
        watched=[schedules],
    )


@scenario("learning rate as a tensor, changed in place by the caller")
def tensor_rate():
    rate = torch.tensor(0.05)

    def after(run, number):
        rate.mul_(0.9)

    return training_of(
        classifier(),
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=rate, foreach=False),
        after=after,
    )


@scenario("warm-up counted in the parameter groups, by the loss")
def warm_up():
    model = classifier()
    holder = {}

    def loss(model, batch):
        for group in holder["optimizer"].param_groups:
            group["num_calls"] = group.get("num_calls", 0) + 1
            group["lr"] = 0.05 * min(1.0, group["num_calls"] / 4)
        return cross_entropy(model, batch)

    def optimizer(ps):
        holder["optimizer"] = adamw(ps)
        return holder["optimizer"]

    return training_of(model, loss=loss, optimizer=optimizer)


@scenario("groups added and settings changed by the caller")
def groups_changed():
    model = classifier()
    extra = nn.Parameter(torch.zeros(12))
    model.register_parameter("extra", extra)

    def loss(model, batch):
        return cross_entropy(model, batch) + (extra - 1).square().mean()

    def before(run, number):
        if number == 2:
            run.optimizer.add_param_group({"params": [extra], "weight_decay": 0.3})
        if number == 4:
            run.optimizer.param_groups[0]["betas"] = (0.8, 0.95)

    return training_of(
        model,
        loss=loss,
        before=before,
        optimizer=lambda ps: adamw([p for p in ps if p is not extra]),
    )


@scenario("ReduceLROnPlateau on the caller's losses, optimizer states emptied at a restart")
def plateau():
    schedules = []

    def started(run):
        schedules.append(torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=0))

    def after(run, number):
        schedules[0].step(float(number % 3))
        if number == 3:
            run.optimizer.state.clear()

    return training_of(classifier(), started=started, after=after, watched=[schedules])
