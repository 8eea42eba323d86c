"""Scans: scores against whole gradients, checkpoints, the highest, folders, budgets, refusals."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from tests.influence.models import Case, classify, dense_gradients, make
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memfit import Job, influence
from memfit.errors import (
    CoupledSamplesError,
    DataError,
    JobError,
    NoPlanFitsError,
    OtherScanError,
    UsageError,
)
from memfit.observe.allocator_events import AllocatorWatch

RATES = (0.3, 0.05)


def settings_of(case: Case) -> dict:
    return {"model": case.model, "loss": case.loss, "train": case.samples}


def part(samples, stop: int):
    return torch.utils._pytree.tree_map(lambda each: each[:stop], samples)


def states_of(model: nn.Module, number: int):
    """Make the weights of some checkpoints."""
    torch.manual_seed(5)
    return [
        {name: value + 0.1 * torch.randn_like(value) for name, value in weights.items()}
        for weights in [model.state_dict()] * number
    ]


def checkpoints_of(states):
    return [
        influence.Checkpoint(
            name=f"epoch {place}", load=lambda state=state: state, learning_rate=rate
        )
        for place, (state, rate) in enumerate(zip(states, RATES, strict=True))
    ]


def expected_scores(case: Case, states, num_train: int, num_test: int) -> np.ndarray:
    total = np.zeros((num_test, num_train))
    for state, rate in zip(states, RATES, strict=True):
        case.model.load_state_dict(state)
        dense = dense_gradients(case, range(num_train))
        total += rate * (dense[:num_test] @ dense.T).numpy()
    return total


@pytest.fixture
def tied():
    case = make("tied", number=9)
    return case, states_of(case.model, 2)


def error(found, expected) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("chunks", [{}, {"train_chunk": 2, "test_chunk": 3}])
def test_scores_are_sums_over_checkpoints_with_their_rates(tied, chunks) -> None:
    case, states = tied
    found = influence.scores(
        case.model,
        case.loss,
        case.samples,
        case.samples[:4],
        checkpoints=checkpoints_of(states),
        **chunks,
    )

    assert error(found.scores, expected_scores(case, states, 9, 4)) < 1e-12
    assert found.checkpoints == ["epoch 0", "epoch 1"]
    assert found.learning_rates == list(RATES)
    assert found.proof_error < 1e-12


def test_self_influence_is_the_diagonal(tied) -> None:
    case, states = tied
    found = influence.self_influence(
        case.model, case.loss, case.samples, checkpoints=checkpoints_of(states), train_chunk=4
    )
    expected = expected_scores(case, states, 9, 9).diagonal()

    assert error(found.scores, expected) < 1e-12
    assert found.highest(2).indices == [np.argsort(-expected)[:2].tolist()]


@pytest.mark.parametrize("in_folder", [True, False])
def test_the_highest_and_the_lowest_are_kept(tied, tmp_path, in_folder: bool) -> None:
    case, states = tied
    found = influence.scores(
        case.model,
        case.loss,
        case.samples,
        case.samples[:4],
        checkpoints=checkpoints_of(states),
        top_k=3,
        train_chunk=2,
        folder=tmp_path if in_folder else None,
    )
    expected = expected_scores(case, states, 9, 4)
    order = np.argsort(-expected, axis=1)

    assert found.scores is None
    assert found.helpful.indices == order[:, :3].tolist()
    assert found.harmful.indices == order[:, ::-1][:, :3].tolist()
    for ranked in (found.helpful, found.harmful):
        there = np.take_along_axis(expected, np.array(ranked.indices), axis=1)
        assert error(np.array(ranked.scores), there) < 1e-12


def test_more_are_not_kept_than_there_are() -> None:
    case = make("lstm")
    found = influence.Scan(**settings_of(case), test=case.samples, top_k=100).scores()

    assert all(len(each) == 6 for each in found.helpful.indices)


def test_test_samples_may_have_a_loss_of_their_own() -> None:
    def margin(model, batch):
        return -model(batch[0]).gather(1, batch[1][:, None])[:, 0]

    case = make("convolutions")
    found = influence.Scan(**settings_of(case), test=case.samples, test_loss=margin).scores()
    train = dense_gradients(case, range(6))
    test = dense_gradients(Case(case.model, margin, case.samples), range(6))

    assert error(found.scores, (test @ train.T).numpy()) < 1e-12


def test_a_job_has_a_loss_for_each_sample() -> None:
    case = make("convolutions")
    job = Job(
        model=lambda: case.model,
        batch=lambda size: part(case.samples, size),
        loss=lambda model, batch: classify(model, batch).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )
    found = influence.scores(case.model, job, case.samples, case.samples)
    dense = dense_gradients(case, range(6))

    assert error(found.scores, (dense @ dense.T).numpy()) < 1e-12


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (1, {"head.weight", "head.bias"}),
        (["head.bias"], {"head.bias"}),
        (["embedding", "layers.1.linear1"],
         {"embedding.weight", "layers.1.linear1.weight", "layers.1.linear1.bias"}),
    ],
)  # fmt: skip
def test_parameters_are_chosen(choice, names) -> None:
    case = make("transformer")
    found = influence.Scan(**settings_of(case), test=case.samples, parameters=choice).scores()
    for name, each in case.model.named_parameters():
        each.requires_grad_(name in names)
    dense = dense_gradients(case, range(6))

    assert set(found.parameters) == names
    assert error(found.scores, (dense @ dense.T).numpy()) < 1e-12


def test_a_shared_parameter_goes_by_either_name() -> None:
    case = make("tied")
    for name in ("embedding.weight", "output.weight"):
        found = influence.Scan(**settings_of(case), parameters=[name]).self_influence()
        assert found.parameters == ["embedding.weight"]


def test_the_model_is_evaluated_and_left_as_it_was() -> None:
    case = make("transformer")
    case.model.train()
    case.model.layers.eval()
    case.model.head.bias.requires_grad_(False)
    modes = [module.training for module in case.model.modules()]
    found = influence.Scan(**settings_of(case), test=case.samples).scores()

    assert "head.bias" not in found.parameters
    assert [module.training for module in case.model.modules()] == modes
    assert not case.model.head.bias.requires_grad
    assert all(each.grad is None for each in case.model.parameters())


@pytest.mark.parametrize("wrap", [TensorDataset, lambda *t: DataLoader(TensorDataset(*t), 2, True)])
def test_data_sets_and_loaders_go_by_the_numbers_of_the_data_set(wrap) -> None:
    case = make("lstm")
    found = influence.self_influence(case.model, case.loss, wrap(*case.samples))
    expected = influence.self_influence(case.model, case.loss, case.samples)

    assert error(found.scores, expected.scores) < 1e-12


@pytest.mark.slow
def test_results_are_json() -> None:
    case = make("lstm")
    scan = partial(influence.Scan, **settings_of(case))
    for found in (
        scan(test=case.samples).scores(),
        scan(test=case.samples, top_k=2).scores(),
        scan().self_influence(),
    ):
        assert json.loads(json.dumps(found.as_json()))["num_train"] == 6


class _StopError(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "highest", "self"])
@pytest.mark.parametrize("stopped_at", [1, 4, 10, 13])
def test_a_scan_goes_on_with_equal_bits(tied, tmp_path, monkeypatch, kind, stopped_at) -> None:
    monkeypatch.setattr("memfit.influence.walk._SECONDS_BETWEEN_SAVES", 0.0)
    case, states = tied
    settings = {**settings_of(case), "train_chunk": 2, "checkpoints": checkpoints_of(states)}
    if kind != "self":
        settings |= {
            "test": case.samples[:5],
            "test_chunk": 3,
            "top_k": 3 if kind == "highest" else None,
        }

    def run(folder, listener=None):
        scan = influence.Scan(**settings, folder=folder, listener=listener)
        return (scan.self_influence() if kind == "self" else scan.scores()).as_json()

    def stop(progress):
        if progress.num_done == min(stopped_at, progress.num_steps - 1):
            raise _StopError

    whole = run(tmp_path / "whole")
    with pytest.raises(_StopError):
        run(tmp_path / "cut", stop)
    seen = []

    assert run(tmp_path / "cut", lambda progress: seen.append(progress.num_done)) == whole
    assert seen[0] > 1
    assert run(tmp_path / "cut") == whole  # once more, when there is nothing left to do


def test_a_block_written_twice_is_the_same(tied, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("memfit.influence.walk._SECONDS_BETWEEN_SAVES", 1e9)
    case, states = tied
    settings = {
        **settings_of(case),
        "test": case.samples[:4],
        "train_chunk": 2,
        "checkpoints": checkpoints_of(states),
    }

    def stop(progress):
        if progress.num_done == 8:  # three blocks of the second checkpoint are written, not noted
            raise _StopError

    with pytest.raises(_StopError):
        influence.Scan(**settings, folder=tmp_path / "cut", listener=stop).scores()
    found = influence.Scan(**settings, folder=tmp_path / "cut").scores()
    expected = influence.Scan(**settings).scores()

    assert np.array_equal(found.scores, expected.scores)
    assert [path.name for path in (tmp_path / "cut").glob("scores-*")] == ["scores-1.npy"]


def test_a_folder_of_another_scan_is_refused(tied, tmp_path) -> None:
    case, states = tied
    settings = {**settings_of(case), "folder": tmp_path, "checkpoints": checkpoints_of(states)}
    influence.Scan(**settings).self_influence()

    with pytest.raises(OtherScanError, match="train_chunk is 9 there and 3 here"):
        influence.Scan(**settings, train_chunk=3).self_influence()
    with pytest.raises(OtherScanError, match="samples is"):
        influence.Scan(**settings | {"train": case.samples.flip(0)}).self_influence()


def test_other_weights_under_the_name_of_a_checkpoint_are_refused(
    tied, tmp_path, monkeypatch
) -> None:
    case, states = tied

    def stop(progress):
        raise _StopError

    settings = {**settings_of(case), "folder": tmp_path, "train_chunk": 2}
    monkeypatch.setattr("memfit.influence.walk._SECONDS_BETWEEN_SAVES", 0.0)
    scan = influence.Scan(**settings, checkpoints=checkpoints_of(states), listener=stop)
    with pytest.raises(_StopError):
        scan.self_influence()

    with pytest.raises(OtherScanError, match="epoch 0 has other weights now"):
        influence.Scan(**settings, checkpoints=checkpoints_of(states[::-1])).self_influence()


def test_a_file_that_is_no_progress_is_refused(tied, tmp_path) -> None:
    case, _ = tied
    (tmp_path / "progress.npz").write_text("nothing")

    with pytest.raises(DataError, match=r"progress.npz: it cannot be read"):
        influence.Scan(**settings_of(case), folder=tmp_path).self_influence()


def test_a_full_disk_is_one_clear_line_and_nothing_is_left(tied, tmp_path, monkeypatch) -> None:
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memfit.influence.sums.os.posix_fallocate", full)
    case, _ = tied

    with pytest.raises(DataError, match="there is no room for 648 B of scores"):
        influence.Scan(**settings_of(case), test=case.samples, folder=tmp_path).scores()
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_come_from_files(tied, tmp_path) -> None:
    case, states = tied
    files = []
    for place, state in enumerate(states):
        torch.save({"epoch": place, "model": state}, tmp_path / f"{place}.pt")
        files.append(
            influence.Checkpoint.of_file(tmp_path / f"{place}.pt", RATES[place], key="model")
        )
    settings = settings_of(case)

    found = influence.Scan(**settings, checkpoints=files).self_influence()
    expected = influence.Scan(**settings, checkpoints=checkpoints_of(states)).self_influence()
    assert np.array_equal(found.scores, expected.scores)


@pytest.mark.parametrize(
    ("write", "key", "message"),
    [
        (None, None, "there is no such checkpoint"),
        (lambda path: path.write_text("nothing"), None, "it cannot be read as a checkpoint"),
        (lambda path: torch.save({"a": 1}, path), "model", "it holds no state dict under 'model'"),
        (lambda path: torch.save({"a": torch.ones(1)}, path), None, "do not fit the model"),
    ],
)
def test_wrong_checkpoints_are_refused_in_one_line(tied, tmp_path, write, key, message) -> None:
    case, _ = tied
    path = tmp_path / "checkpoint.pt"
    if write is not None:
        write(path)
    given = influence.Checkpoint.of_file(path, key=key)

    with pytest.raises(DataError, match=message) as raised:
        influence.Scan(**settings_of(case), checkpoints=[given]).self_influence()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "error_class", "message"),
    [
        ({"method": "fast"}, UsageError, "method is"),
        ({"train_chunk": 0}, UsageError, "train_chunk must be at least 1"),
        ({"parameters": 99}, JobError, "layers with parameters; the last 99"),
        ({"parameters": ["no_such"]}, JobError, "no parameter or module called no_such"),
        ({"train": torch.zeros(0, 4)}, JobError, "no train samples"),
        ({"train": (torch.zeros(3, 4), torch.zeros(2))}, JobError, r"\[2, 3\] entries"),
        ({"train": iter([1])}, JobError, "Samples cannot be taken from list_iterator"),
        pytest.param(
            {"budget": "1KiB"},
            NoPlanFitsError,
            "the proof on a few samples",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_is_refused(wrong, error_class, message) -> None:
    case = make("lstm")

    with pytest.raises(error_class, match=message):
        influence.Scan(**settings_of(case) | wrong).self_influence()


def test_batch_statistics_that_evaluation_keeps_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))

    with pytest.raises(CoupledSamplesError, match="1 normalise with the statistics of the batch"):
        influence.self_influence(model, classify, (torch.randn(6, 3), torch.arange(6) % 4))


def test_a_score_that_is_no_number_names_the_sample() -> None:
    case = make("lstm")
    case.samples[0][4] = float("inf")

    with pytest.raises(JobError, match="training sample 4 is no finite number"):
        influence.Scan(**settings_of(case), parameters=["head"]).self_influence()


def test_samples_can_be_cut_down() -> None:
    case = make("lstm")
    samples = influence.Samples.of(case.samples)
    whole = influence.self_influence(case.model, case.loss, samples)
    few = influence.self_influence(case.model, case.loss, samples.subset([4, 1]))

    np.testing.assert_allclose(few.scores, whole.scores[[4, 1]], rtol=1e-12)
    with pytest.raises(JobError, match="no sample 6; there are 6"):
        samples.subset([6])


def test_a_single_sample_that_lies_strided_goes_on_too(tmp_path) -> None:
    case = make("transformer")
    inputs, labels = part(case.samples, 1)
    apart = torch.stack([labels, labels, labels], dim=1)[:, 0]  # contiguous, and its stride is 3
    assert apart.stride() == (3,)
    samples = influence.Samples(count=1, batch=lambda _: (inputs, apart))
    settings = {**settings_of(case), "train": samples, "folder": tmp_path}

    found = influence.Scan(**settings).self_influence()
    again = influence.Scan(**settings).self_influence()
    np.testing.assert_array_equal(again.scores, found.scores)


@pytest.mark.slow
def test_a_projection_is_near_and_the_same_each_time() -> None:
    case = make("transformer", number=12)
    settings = {**settings_of(case), "test": case.samples}
    exact = influence.Scan(**settings).scores()
    near = influence.Scan(**settings, method="projected", dimension=6).scores()
    whole = influence.Scan(**settings, method="projected", dimension=100).scores()

    assert near.method == "projected"
    assert np.corrcoef(near.scores.ravel(), exact.scores.ravel())[0, 1] > 0.9
    assert error(whole.scores, exact.scores) < 1e-12  # nothing is larger than the dimension
    again = influence.Scan(**settings, method="projected", dimension=6, train_chunk=5).scores()
    assert error(again.scores, near.scores) < 1e-12


def measured_bytes(scan: influence.Scan) -> int:
    own = sum(each.nbytes for each in [*scan.model.parameters(), *scan.model.buffers()])
    with AllocatorWatch() as watch:
        scan.self_influence() if scan.test is None else scan.scores()
    return own + watch.highest_growth_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "convolutions", "functional"])
def test_the_predicted_peak_is_what_the_allocator_reports(name: str) -> None:
    case = make(name, number=80)
    scan = influence.Scan(**settings_of(case), test=part(case.samples, 20), train_chunk=16)

    assert measured_bytes(scan) == pytest.approx(scan.predict().peak_allocated_bytes, rel=0.01)


@pytest.mark.slow
def test_a_budget_chooses_the_chunks_and_is_kept() -> None:
    case = make("convolutions", number=60)
    settings = {**settings_of(case), "train_chunk": 32}
    budget_bytes = influence.Scan(**settings).predict().peak_allocated_bytes // 3
    own = sum(each.nbytes for each in [*case.model.parameters(), *case.model.buffers()])
    with AllocatorWatch() as watch:
        found = influence.Scan(**settings, budget=budget_bytes).self_influence()

    assert own + watch.highest_growth_bytes() <= budget_bytes
    assert found.train_chunk == 8


@pytest.mark.slow
def test_more_training_samples_take_no_more_memory() -> None:
    peaks = []
    for number in (50, 500):
        case = make("convolutions", number=number)
        scan = influence.Scan(
            **settings_of(case), test=part(case.samples, 20), train_chunk=16, top_k=5
        )
        peaks.append(measured_bytes(scan))

    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


@pytest.mark.slow
def test_a_projected_scan_is_predicted_and_then_runs() -> None:
    case = make("convolutions", number=40)
    scan = influence.Scan(
        **settings_of(case),
        test=part(case.samples, 20),
        train_chunk=16,
        method="projected",
        dimension=4,
    )
    predicted_bytes = scan.predict().peak_allocated_bytes

    assert measured_bytes(scan) == pytest.approx(predicted_bytes, rel=0.01)


@pytest.mark.slow
def test_a_card_that_is_not_here_is_predicted() -> None:
    case = make("convolutions", number=40)
    predicted = influence.Scan(**settings_of(case), train_chunk=16).predict("a100-40gb")

    assert predicted.step.device == "a100-40gb"
    assert predicted.num_steps == 3
    assert predicted.seconds > 0
    assert predicted.process_bytes > predicted.peak_allocated_bytes > 0


def test_sparse_gradients_and_words_that_count_by_frequency_are_exact() -> None:
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Embedding(7, 4, sparse=True)
            self.other = nn.Embedding(7, 4, scale_grad_by_freq=True)

        def forward(self, tokens):
            return torch.tanh(self.one(tokens) * self.other(tokens)).sum(dim=1)

    torch.manual_seed(0)
    case = Case(Bag().double(), classify, (torch.randint(0, 7, (6, 5)), torch.arange(6) % 4))
    found = influence.Scan(**settings_of(case), test=case.samples).scores()
    dense = dense_gradients(case, range(6))

    assert set(found.unread) == {"other.weight"}
    assert error(found.scores, (dense @ dense.T).numpy()) < 1e-12
