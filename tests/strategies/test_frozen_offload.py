"""Frozen weights wait elsewhere, and nothing that is trained notices."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.zoo.frozen_models import (
    Adapted,
    DirectlyRead,
    HalfFrozen,
    Recurrent,
    SharedBlock,
    Stack,
    TiedDecoder,
    images,
    job_of,
    sequences,
    words,
    written_in_place,
    written_through_data,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import Plan
from memfit.errors import JobFunctionError, MemfitWarning, StrategyError
from memfit.session.batches import find_layout
from memfit.session.session import open_session
from memfit.strategies import (
    ActivationCheckpointing,
    ActivationOffload,
    Bf16,
    FrozenOffload,
    MicroBatching,
    OptimizerInBackward,
    OptimizerOffload,
    PureBf16,
    Strategy,
)
from memfit.strategies.frozen_offload import frozen_facts
from memfit.strategies.frozen_offload.visits import HostWeight

ALL = FrozenOffload(to="disk", min_tensor_bytes=1)
ON_CARD = FrozenOffload(min_tensor_bytes=1)
CARD = "a100-40gb"


def plan_of(*strategies: Strategy) -> Plan:
    return Plan(strategies=strategies)


def trained(job, plan, between=None, num_steps: int = 3):
    """Return the losses of some steps, and what the model is after them."""
    torch.manual_seed(0)
    batches = [job.batch(job.batch_size) for _ in range(num_steps)]
    torch.manual_seed(1)
    losses = []
    with memfit.start(job, plan) as run:
        for batch in batches:
            losses.append(run.step(batch).loss.item())
            if between is not None:
                between(run)
        values = {key: value.clone() for key, value in run.model.state_dict().items()}
    after = run.model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in values.items())
    return losses, values


def is_same(first, second) -> bool:
    (losses, values), (other_losses, other_values) = first, second
    return (
        losses == other_losses
        and values.keys() == other_values.keys()
        and all(torch.equal(values[key], other_values[key]) for key in values)
    )


def assert_same_training(job, strategy=ALL, between=None):
    assert is_same(trained(job, plan_of(strategy), between), trained(job, Plan(), between))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "blocks"),
    [
        (Stack, None, ()),
        (partial(Stack, partial(Adapted, recomputes=True)), None, ()),
        (partial(Stack, DirectlyRead), None, ()),
        (partial(Stack, num_calls=2), None, ()),
        (partial(Stack, reads=True), None, ()),
        (SharedBlock, None, ("blocks.0",)),
        (HalfFrozen, images, ()),
        (partial(HalfFrozen, trains_statistics=True), images, ("stages.0-1",)),
        (TiedDecoder, words, ()),
        (TiedDecoder, words, ("embedding", "blocks.0-1", "head")),
        (partial(TiedDecoder, reads_weight=True), words, ("embedding", "blocks.0-1", "head")),
        (Recurrent, sequences, ("layers.0-2",)),
    ],
    ids=[
        "adapters",
        "recomputes by itself",
        "reads its layers",
        "called twice",
        "read outside",
        "shared block",
        "half a CNN",
        "statistics",
        "tied and left",
        "tied",
        "tied and read",
        "recurrent",
    ],
)
def test_steps_are_equal_to_the_bit(model, batch, blocks):
    job = job_of(model) if batch is None else job_of(model, batch)
    strategy = FrozenOffload(to="disk", min_tensor_bytes=1, blocks=blocks)
    assert_same_training(job, strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        ActivationCheckpointing(),
        ActivationCheckpointing(keep=("addmm.0",)),
        ActivationOffload(to="disk", min_tensor_bytes=1),
        OptimizerInBackward(),
        OptimizerOffload(to="disk", min_tensor_bytes=1),
        MicroBatching(micro_batch_size=3),
        Bf16(),
        PureBf16(),
    ],
    ids=lambda each: each.label(),
)
def test_it_changes_nothing_of_what_others_do(other):
    job = job_of(Stack)
    assert is_same(trained(job, plan_of(ALL, other)), trained(job, plan_of(other)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_adapters_on_a_decoder_are_trained_to_the_bit(reentrant):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

    def model():
        torch.manual_seed(3)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            attention_dropout=0.1,
        )
        adapters = peft.LoraConfig(
            r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"]
        )
        made = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
        if reentrant is not None:
            made.gradient_checkpointing_enable({"use_reentrant": reentrant})
            made.enable_input_require_grads()
        return made.train()

    job = job_of(model, lambda size: torch.randint(0, 64, (size, 16)))
    assert_same_training(
        replace(job, loss=lambda model, ids: model(input_ids=ids, labels=ids).loss)
    )


def save_and_load(run):
    values = run.model.state_dict()
    assert not any(value.is_meta for value in values.values())
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    run.model.load_state_dict(torch.load(file))


def change_frozen_weights(run):
    with torch.no_grad():
        for parameter in run.model.parameters():
            if not parameter.requires_grad:
                parameter.mul_(0.9)


def give_other_parameters(run):
    values = {key: value.clone() for key, value in run.model.state_dict().items()}
    frozen = {key: value for key, value in values.items() if "up" in key}
    run.model.load_state_dict(frozen, strict=False, assign=True)


def evaluate(run):
    with torch.inference_mode():
        run.model(torch.zeros(2, 32))
    run.evaluate(torch.ones(8, 32))


@pytest.mark.slow
@pytest.mark.parametrize(
    "between",
    [save_and_load, change_frozen_weights, give_other_parameters, evaluate],
    ids=lambda each: each.__name__,
)
def test_what_is_done_between_steps_is_as_without(between):
    assert_same_training(job_of(Stack), between=between)


def test_a_copy_of_the_model_computes_by_itself():
    model = Stack().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 32)
    expected = model(x).detach()
    with memfit.attach(model, optimizer, plan_of(ALL)):
        twin = copy.deepcopy(model)
        assert torch.equal(model(x), expected)
        change_frozen_weights(type("Run", (), {"model": model}))
        assert torch.equal(twin(x), expected)
    assert torch.equal(twin(x), expected)


def gradients(plan):
    torch.manual_seed(1)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = memfit.attach(model, optimizer, plan)
    x = torch.randn(4, 32, requires_grad=True)
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    first.square().sum().backward(retain_graph=True)
    first.sum().backward()
    attached.detach()
    return [x.grad, *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.slow
def test_gradients_of_gradients_and_of_kept_graphs():
    pairs = zip(gradients(plan_of(ALL)), gradients(Plan()), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def test_a_failed_forward_leaves_the_weights_elsewhere():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.blocks[2].up.weight
    with memfit.attach(model, optimizer, plan_of(ALL)):
        elsewhere = weight.data_ptr()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.blocks[2].mlp(torch.zeros(3, 5))
        with pytest.raises(RuntimeError):
            model(torch.zeros(3, 5))
        assert model.blocks[2].up.weight is weight
        assert weight.data_ptr() == elsewhere


def test_strides_and_identities_come_back():
    model = HalfFrozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.stages[0][0].weight
    before, strides = weight.clone(), weight.stride()
    attached = memfit.attach(model, optimizer, plan_of(ALL))
    model(images(2)).sum().backward()
    attached.detach()
    assert model.stages[0][0].weight is weight
    assert torch.equal(weight, before)
    assert weight.stride() == strides
    assert "forward" not in vars(model.stages[0])


def frozen_bytes(model) -> int:
    return sum(each.nbytes for each in model.blocks.parameters() if not each.requires_grad)


@pytest.mark.slow
def test_on_a_card_the_weights_of_one_block_are_there_at_a_time():
    job, model = job_of(Stack), Stack()
    plain = memfit.predict(job, CARD)
    found = memfit.predict(job, CARD, plan_of(ON_CARD))
    rest = plain.by_category["parameters"] - found.by_category["parameters"]
    parts = [each.nbytes for each in model.blocks.parameters() if not each.requires_grad]
    # A card takes 512 bytes at least, so that small weights weigh more than they have.
    rounded = sum(-(-num_bytes // 512) * 512 for num_bytes in parts)
    assert rest == pytest.approx(rounded * 3 / 4, abs=2048)
    assert found.host_bytes >= frozen_bytes(model)
    assert found.step_seconds > plain.step_seconds


@pytest.mark.slow
def test_on_a_card_backward_finds_what_was_recomputed():
    """Weights that autograd saves as they are: those of norms and convolutions."""
    for model, batch in ((Stack, None), (HalfFrozen, images)):
        job = job_of(model) if batch is None else job_of(model, batch)
        assert memfit.predict(job, CARD, plan_of(ON_CARD)).host_bytes


def test_weights_need_not_come_to_a_card():
    job, chosen = job_of(Stack), plan_of(ON_CARD)
    session = open_session(job, "meta", find_layout(job), lambda *_: None, stays=chosen.stays)
    parameters = [*session.model.blocks.parameters()]
    places = {(each.requires_grad, each.device.type) for each in parameters}
    assert places == {(True, "meta"), (False, "cpu")}
    assert session.model.blocks[0].up.weight.numel() > 0
    assert list(Plan().stays(session.model)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [partial(Stack, reads=True), partial(Stack, partial(Adapted, recomputes=True))],
    ids=["outside", "recomputes by itself"],
)
def test_a_card_refuses_weights_that_are_read_outside_of_their_block(model):
    with pytest.raises(JobFunctionError, match="same device"):
        memfit.predict(job_of(model), CARD, plan_of(ON_CARD))


@pytest.mark.slow
def test_the_planner_refuses_what_the_card_refuses():
    job = job_of(partial(wide, recomputes=True), lambda size: torch.randn(size, 256))
    with pytest.raises(StrategyError, match=r"frozen-offload.*same device"):
        memfit.plan(job, CARD, require=["frozen-offload"])


@pytest.mark.slow
@pytest.mark.parametrize("change", [written_in_place, written_through_data])
def test_a_forward_that_writes_to_a_frozen_weight_is_refused(change):
    job = job_of(partial(Stack, partial(Adapted, change=change)))
    with pytest.raises(StrategyError, match=r"writes to blocks\.0\.up\.weight"):
        trained(job, plan_of(ALL))
    with pytest.raises(StrategyError, match="writes to"):
        memfit.predict(job, CARD, plan_of(ON_CARD))


def test_a_weight_that_is_trained_after_all_ends_the_run():
    def unfreeze(run):
        run.model.blocks[1].up.weight.requires_grad_(True)

    with pytest.raises(StrategyError, match=r"blocks\.1\.up\.weight requires gradients by now"):
        trained(job_of(Stack), plan_of(ALL), unfreeze)


def test_memory_that_something_else_holds_is_refused_and_left_alone():
    model = Stack()
    weight = model.blocks[0].up.weight
    held = weight.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StrategyError, match=r"holds the memory of blocks\.0\.up\.weight"):
        memfit.attach(model, optimizer, plan_of(ALL))
    assert weight.data_ptr() == held.data_ptr()
    assert all("forward" not in vars(block) for block in model.blocks)
    assert all(each.is_leaf and each.device.type == "cpu" for each in model.parameters())


class HoldsMemory(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.held = self.blocks[0].up.weight.data


@pytest.mark.slow
def test_memory_that_something_else_holds_is_refused_on_a_card_too():
    with pytest.raises(StrategyError, match=r"holds the memory of blocks\.0\.up\.weight"):
        memfit.predict(job_of(HoldsMemory), CARD, plan_of(ON_CARD))


def test_what_cannot_be_moved_stays():
    model = Stack()
    model.blocks[0].down.weight = nn.Parameter(model.blocks[1].down.weight.data, False)
    model.blocks[2].norm.weight = nn.Parameter(torch.ones(64)[::2], requires_grad=False)
    weights = {each.name: each for each in frozen_facts(model).weights}
    for name in ("blocks.0.down.weight", "blocks.1.down.weight", "blocks.2.norm.weight"):
        assert weights[name].obstacle == "it shares its memory with other tensors"
    assert weights["blocks.0.up.weight"].obstacle == ""


def sentence(model, strategy=ALL) -> str:
    with pytest.raises(StrategyError) as caught:
        memfit.start(job_of(model), plan_of(strategy))
    return str(caught.value)


@pytest.mark.slow
def test_models_without_frozen_weights_are_refused():
    assert "all weights require gradients" in sentence(lambda: Stack().requires_grad_(True))
    none = FrozenOffload(to="disk", min_tensor_bytes=1, blocks=("head",))
    assert "no frozen weight belongs to the blocks alone" in sentence(Stack, none)
    large = FrozenOffload(to="disk")
    assert "the largest frozen weight of the blocks has 8192 bytes" in sentence(Stack, large)


def test_hooks_of_accelerate_are_refused():
    hooks = pytest.importorskip("accelerate.hooks")

    def model():
        made = Stack()
        hooks.add_hook_to_module(made.blocks[1].up, hooks.AlignDevicesHook("cpu", offload=True))
        return made

    assert "hooks of accelerate act on blocks.1.up already" in sentence(model)


def test_what_the_documentation_says_of_accelerates_hooks():
    hooks = pytest.importorskip("accelerate.hooks")
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)]
    kept = [block[1].requires_grad_(False).weight for block in blocks]
    for block in blocks:
        hooks.add_hook_to_module(block[1], hooks.AlignDevicesHook("cpu", offload=True))
    x = torch.randn(2, 4)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    assert {block[1].weight.device.type for block in blocks} == {"meta"}
    x.sum().backward()
    assert {block[1].weight.device.type for block in blocks} == {"cpu"}
    assert all(block[1].weight is not weight for block, weight in zip(blocks, kept, strict=True))


@pytest.mark.slow
def test_the_guard_goes_on_below():
    class WithoutDropout(Stack):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.dropout.p = 0.0

    job = replace(job_of(WithoutDropout), batch_size=256)
    predicted = memfit.predict(job, plan=plan_of(ALL)).peak_allocated_bytes
    torch.manual_seed(0)
    batch = job.batch(256)
    with memfit.start(job, plan_of(ALL)) as run:
        run.step(batch)
        run.step(batch)
        with memfit.EnforcedBudget(predicted - 50_000):
            run.step(batch)
        assert run.plan.labels() == (ALL.label(), "micro-batching(128)")
        assert len(run.events) == 1
        run.step(batch)


def test_weights_that_do_not_fit_stay_on_the_host(monkeypatch):
    def fails(_):
        raise torch.OutOfMemoryError

    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attached = memfit.attach(model, optimizer, plan_of(ALL))
    monkeypatch.setattr(HostWeight, "_on_device", fails)
    with pytest.warns(MemfitWarning, match="stay in the host's memory"):
        attached.detach()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def wide(**settings):
    return nn.Sequential(*(Adapted(256, **settings) for _ in range(4)))


@pytest.mark.slow
def test_the_planner_takes_it_where_it_is_required(tmp_path):
    job = job_of(wide, lambda size: torch.randn(size, 256))
    plan = memfit.plan(job, CARD, require=["frozen-offload"])
    (found,) = (each for each in plan.strategies if each.name == "frozen-offload")
    assert (found.to, found.blocks) == ("host", ("0-1",))
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml").labels() == plan.labels()
    here = memfit.plan(job, "cpu", require=["frozen-offload"], budget="3MiB")
    (found,) = (each for each in here.strategies if each.name == "frozen-offload")
    assert found.to == "disk"
    assert here.prediction.disk_bytes > 2**20
    measured = memfit.measure(job, here).peak_allocated_bytes
    assert measured == pytest.approx(here.prediction.peak_allocated_bytes, rel=1e-3)
