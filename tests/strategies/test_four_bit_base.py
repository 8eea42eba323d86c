"""A 4-bit base trains adapters beside packed weights, and nothing else."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tests.zoo import four_bit
from tests.zoo.four_bit import HIDDEN, WIDTH, Block, weight_bytes
from torch import nn

import memfit
from memfit import Plan
from memfit.errors import StrategyError
from memfit.strategies import CATALOGUE, FourBitBase, build_strategy
from memfit.strategies import four_bit_base as module

pytestmark = pytest.mark.usefixtures("packages")
NUM_BLOCKS = 2
WORDS, RATES = ("rise", "fall"), (0.1, 0.2)
EXACT = FourBitBase(rank=4, alpha=8, compute_dtype="float32")


@pytest.fixture
def packages():
    four_bit.library()
    pytest.importorskip("peft")


def plain(num_blocks: int = NUM_BLOCKS) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks)))


def job(model=plain, **settings):
    return replace(
        four_bit.job(model),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **settings),
    )


def plan(strategy=EXACT) -> Plan:
    return Plan(strategies=(strategy,))


def unpacked(model, *, double: bool = True):
    """Round the weights of a model as packing does, by direct calls of the library."""
    functional = four_bit.library().functional
    rounded = copy.deepcopy(model)
    for layer in rounded.modules():
        if type(layer) is nn.Linear:
            packed, state = functional.quantize_4bit(
                layer.weight.data, quant_type="nf4", compress_statistics=double
            )
            layer.weight.data = functional.dequantize_4bit(packed, state)
    return rounded


def test_the_first_loss_is_that_of_the_rounded_weights():
    batch = job().batch(2)
    expected = job().loss(unpacked(plain()), batch)
    with memfit.start(job(), plan()) as run:
        found = run.step(batch).loss
    assert torch.allclose(found, expected, rtol=1e-6)
    assert not torch.allclose(found, job().loss(plain(), batch), rtol=1e-6)


def test_adapters_are_trained_as_adapters_on_plain_rounded_weights_are():
    """The same adapters on unpacked weights, without memfit and without packing."""
    peft = pytest.importorskip("peft")
    batch = job().batch(2)
    with memfit.start(job(), plan()) as run:
        begin = {n: p.detach().clone() for n, p in run.model.named_parameters() if "lora" in n}
        losses = [run.step(batch).loss.item() for _ in range(3)]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["rise", "fall"])
    model = peft.get_peft_model(unpacked(plain()), config).base_model.model
    with torch.no_grad():
        for name, value in begin.items():
            model.get_parameter(name).copy_(value)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    expected = []
    for _ in range(3):
        loss = job().loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[2] < losses[0]


def test_only_adapters_are_trained_and_merged_into_the_weights_at_the_end():
    model = plain()
    rounded = unpacked(model)
    biases = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("bias")}
    identities = {name: id(each) for name, each in model.named_parameters()}
    inputs = torch.randn(3, 4, WIDTH)
    with memfit.start(job(lambda: model), plan()) as run:
        trained = [name for name, each in model.named_parameters() if each.requires_grad]
        assert trained
        assert all("lora_" in name for name in trained)
        assert [len(group["params"]) for group in run.optimizer.param_groups] == [len(trained)]
        for _ in range(3):
            run.step(job().batch(2))
        expected = model(inputs).detach()
    assert {name: id(each) for name, each in model.named_parameters()} == identities
    assert all(each.requires_grad for each in model.parameters())
    assert all(torch.equal(model.get_parameter(name), each) for name, each in biases.items())
    assert torch.allclose(model(inputs), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(rounded(inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "h100-80gb"])
def test_weights_take_what_packed_ones_and_adapters_take(device):
    prediction = memfit.predict(job(), device, plan(FourBitBase(rank=4)))
    assert prediction.numerics == "different"
    layers = 2 * NUM_BLOCKS
    adapters_bytes = 4 * layers * 4 * (WIDTH + HIDDEN)
    biases_bytes = 2 * NUM_BLOCKS * (WIDTH + HIDDEN)  # in what is computed in
    packed_bytes = layers * weight_bytes(WIDTH * HIDDEN, double=True)
    expected = packed_bytes + adapters_bytes + biases_bytes
    rounding_bytes = 0 if device == "cpu" else 512 * layers * 10
    assert expected <= prediction.by_category["parameters"] <= expected + rounding_bytes


@pytest.mark.slow
def test_evaluation_between_steps_changes_nothing():
    batch = job().batch(2)
    losses = []
    for evaluates in (True, False):
        torch.manual_seed(1)
        with memfit.start(job(), plan()) as run:
            for _ in range(3):
                loss = run.step(batch).loss
                if evaluates:
                    run.evaluate(batch)
        losses.append(loss)
    assert torch.equal(*losses)


def test_a_loop_of_one_s_own_trains_adapters_too():
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(2, 4, WIDTH)
    losses = []
    with memfit.attach(model, optimizer, plan()) as attached:
        for _ in range(3):
            loss = attached.model(inputs).square().mean()
            loss.backward()
            attached.optimizer.step()
            attached.optimizer.zero_grad()
            losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert type(model[0].rise) is nn.Linear


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused():
    with memfit.start(job(), plan()) as run:
        run.step(job().batch(2))
        state = run.state_dict()
    raises = pytest.raises(RuntimeError, match="Unexpected key")
    with memfit.start(job(), plan()) as other, raises:
        other.load_state_dict(state)


def test_groups_keep_their_settings_and_get_the_adapters_of_their_weights():
    def by_layer(named_parameters):
        groups = {"rise": [], "fall": []}
        for name, parameter in named_parameters:
            groups["rise" if "rise" in name else "fall"].append((name, parameter))
        return torch.optim.SGD(
            [{"params": groups["rise"], "lr": 0.1}, {"params": groups["fall"], "lr": 0.2}]
        )

    some = replace(job(), optimizer=by_layer)
    with memfit.start(some, plan()) as run:
        groups = run.optimizer.param_groups
        for group, word, rate in zip(groups, WORDS, RATES, strict=True):
            assert group["lr"] == rate
            assert len(group["params"]) == len(group["param_names"]) == 2 * NUM_BLOCKS
            assert all(word in name and "lora" in name for name in group["param_names"])


def test_targets_choose_the_layers_that_get_adapters_and_kept_those_that_stay():
    strategy = FourBitBase(rank=2, targets=("rise",), kept=("1.fall",))
    with memfit.start(job(), plan(strategy)) as run:
        adapted = {n.split(".lora_")[0] for n, p in run.model.named_parameters() if "lora_" in n}
        assert adapted == {"0.rise", "1.rise"}
        assert type(run.model.get_submodule("1.fall")) is nn.Linear
        assert type(run.model.get_submodule("0.fall")).__name__ == "Linear4bit"


def tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, WIDTH)
            self.block = Block()
            self.head = nn.Linear(WIDTH, 8, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.block(x))

    return Tied()


@pytest.mark.parametrize(
    ("model", "strategy", "words"),
    [
        (tied, FourBitBase(), r"kept: \[head\]"),
        (four_bit.build, FourBitBase(), "is an adapter or packed already"),
        (
            lambda: nn.Sequential(Block(), four_bit.base()),
            FourBitBase(),
            "is an adapter or packed already",
        ),
        (plain, FourBitBase(targets=("query",)), "no torch.nn.Linear called query"),
        (plain, FourBitBase(targets=("rise",), kept=("rise",)), "are kept as they are"),
        (lambda: plain().double(), FourBitBase(), "not float64"),
        (lambda: nn.Linear(WIDTH, WIDTH), FourBitBase(), "wrap it in a module"),
        (lambda: plain().requires_grad_(False).append(nn.LayerNorm(WIDTH)), FourBitBase(), "none"),
    ],
)
def test_what_cannot_be_packed_is_refused(model, strategy, words):
    some = four_bit.job(model)
    with pytest.raises(StrategyError, match=words):
        memfit.start(some, plan(strategy))


@pytest.mark.slow
def test_what_is_tied_may_be_kept():
    prediction = memfit.predict(job(tied), plan=plan(FourBitBase(rank=2, kept=("head",))))
    assert prediction.peak_allocated_bytes > 0


def test_a_missing_package_is_refused_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "peft" else name)
    with pytest.raises(StrategyError, match=r"pip install 'memfit\[four-bit\]'"):
        memfit.start(job(), plan(FourBitBase()))


@pytest.mark.slow
def test_it_is_planned_only_where_it_is_asked_for():
    plain_peak_bytes = memfit.predict(job()).peak_allocated_bytes
    budget = f"{plain_peak_bytes * 19 // 20}B"
    found = memfit.plan(job(), budget=budget, require=["four-bit-base"])
    assert "four-bit-base" in {strategy.name for strategy in found.strategies}
    allowed = memfit.plan(job(), budget=budget, allow=["approximate"])
    assert "four-bit-base" not in {strategy.name for strategy in allowed.strategies}
    unasked = memfit.plan(job(), budget=f"{plain_peak_bytes * 2}B")
    assert "four-bit-base" not in {each.allow for each in unasked.approximations}
    assert unasked.approximations


@pytest.mark.slow
def test_verification_says_that_another_problem_is_trained():
    found = memfit.verify(job(), plan(), dtype=torch.float32)
    assert (found.numerics, found.earned) == ("different", "different")
    assert 0 < found.loss_error < 0.1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 0}, "rank must be at least 1"),
        ({"quant_type": "int4"}, "quant_type must be one of nf4, fp4"),
        ({"compute_dtype": "float64"}, "compute_dtype must be one of"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, words):
    with pytest.raises(StrategyError, match=words):
        build_strategy("four-bit-base", settings)
    assert FourBitBase in CATALOGUE
