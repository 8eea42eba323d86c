"""States of all kinds under the strategies of a plan."""

from __future__ import annotations

import torch
from torch import nn

from guard_scenarios.training import classifier, cross_entropy, labelled, scenario, training_of
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.activation_offload import ActivationOffload
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.fp16 import Fp16
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation
from memfit.strategies.optimizer_in_backward import OptimizerInBackward


def counted_loss(*, logs=True):
    """Count the calls; a log of values is one that pieces of a batch would write otherwise."""
    calls = 0
    seen = []

    def loss(model, batch):
        nonlocal calls
        calls += 1
        value = cross_entropy(model, batch)
        if logs:
            seen.append(float(value.detach()))
        return value * (1 + 0.01 * calls)

    return loss


@scenario("activation checkpointing, with a counter in the loss")
def checkpointed():
    return training_of(
        classifier(nn.Linear(12, 12)),
        loss=counted_loss(),
        strategies=[ActivationCheckpointing(blocks=("1",))],
    )


@scenario("activation offload, with a counter in the loss")
def offloaded():
    model = nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 3))
    return training_of(
        model, loss=counted_loss(), strategies=[ActivationOffload(blocks=("2",), to="disk")]
    )


@scenario("micro-batches, with a counter in the loss")
def micro_batches():
    return training_of(
        classifier(),
        loss=counted_loss(logs=False),
        strategies=[MicroBatching(micro_batch_size=2)],
    )


@scenario("micro-batches of a ragged batch, gradients clipped")
def ragged_micro_batches():
    return training_of(
        classifier(),
        loss=counted_loss(logs=False),
        batches=[*labelled(5), *labelled(1, 5)],
        clip_grad_norm=0.5,
        strategies=[MicroBatching(micro_batch_size=4)],
    )


@scenario("batch normalisation replayed")
def replayed():
    return training_of(
        classifier(nn.BatchNorm1d(12)), strategies=[BatchNormReplay(micro_batch_size=4)]
    )


@scenario("gradient scaler, with draws from a generator")
def scaled():
    generator = torch.Generator().manual_seed(2)

    def loss(model, batch):
        noise = torch.randn(batch[0].shape, generator=generator)
        return cross_entropy(model, (batch[0] + 0.1 * noise, batch[1]))

    return training_of(classifier(), loss=loss, strategies=[Fp16()])


@scenario("optimizer in backward")
def in_backward():
    return training_of(classifier(), strategies=[OptimizerInBackward()])


@scenario("optimizer in backward, with a counter in the loss and SGD")
def in_backward_counted():
    return training_of(
        classifier(),
        loss=counted_loss(),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        strategies=[OptimizerInBackward()],
    )


@scenario("fused optimizer of the plan")
def fused_by_plan():
    return training_of(
        classifier(nn.BatchNorm1d(12)),
        strategies=[OptimizerImplementation(implementation="fused")],
    )


@scenario("gradients gathered by the caller over two run.steps")
def gathered_by_caller():
    model = classifier()
    kept = []

    def loss(model, batch):
        value = cross_entropy(model, batch)
        grads = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
        kept.append([g.clone() for g in grads])
        del kept[:-2]
        return value

    def before(run, number):
        if len(kept) == 2:
            for p, first in zip(model.parameters(), kept[0], strict=True):
                p.grad = 0.5 * first.clone()

    return training_of(model, loss=loss, before=before)
