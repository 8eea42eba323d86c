"""The model has the reference's shape, and its sizes are checked before it is built."""

import argparse

import pytest
import torch
from torch import nn

from memfit.errors import UsageError
from memfit_workloads.conve.arguments import add_arguments
from memfit_workloads.conve.model import ConvE, build_model
from memfit_workloads.conve.settings import TrainingSettings, settings_from
from memfit_workloads.conve.sizes import ConvESizes, even_image, nearest_image
from memfit_workloads.flags import command_of

SMALL = ConvESizes(
    num_entities=11,
    num_relations=3,
    embedding_dim=24,
    embedding_height=4,
    embedding_width=6,
    output_channels=5,
)


def settings_of(*words: str) -> TrainingSettings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--dataset", "nations", *words])
    return settings_from(args, command_of(args, "conve", add_arguments))


def test_every_entity_gets_a_score_that_is_its_product_with_the_encoded_query() -> None:
    model = build_model(SMALL, seed=0).eval()
    heads, relations = torch.tensor([0, 4, 10]), torch.tensor([0, 5, 2])
    scores = model(heads, relations)
    assert scores.shape == (3, 11)
    query = model.encode(heads, relations)
    product = query @ model.entity_embedding.weight.T + model.entity_bias
    torch.testing.assert_close(scores, product)


def test_an_image_of_20_x_10_gives_the_reference_number_of_features() -> None:
    sizes = ConvESizes(num_entities=11, num_relations=3, embedding_height=20, embedding_width=10)
    model = build_model(sizes, seed=0)
    assert sizes.num_features == 9728
    assert model.get_submodule("encoder.1.1").in_features == 9728
    assert model.relation_embedding.weight.shape == (6, 200)
    assert model.entity_bias.shape == (11,)


def test_the_layers_come_in_the_reference_order() -> None:
    model = build_model(SMALL, seed=0)
    features, projection = model.encoder.children()
    assert [type(layer) for layer in features.children()] == [
        nn.BatchNorm2d, nn.Dropout, nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Dropout2d,
    ]  # fmt: skip
    assert [type(layer) for layer in projection.children()] == [
        nn.Flatten, nn.Linear, nn.Dropout, nn.BatchNorm1d, nn.ReLU,
    ]  # fmt: skip


def test_head_and_relation_are_stacked_along_the_height() -> None:
    model = build_model(SMALL, seed=0).eval()
    seen = []
    model.encoder.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    model.encode(torch.tensor([3]), torch.tensor([1]))
    image = seen[0][0, 0]
    assert image.shape == (8, 6)
    assert torch.equal(image[:4].flatten(), model.entity_embedding.weight[3])
    assert torch.equal(image[4:].flatten(), model.relation_embedding.weight[1])


def test_weights_depend_on_the_seed_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = build_model(SMALL, 0), build_model(SMALL, 0), build_model(SMALL, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.entity_embedding.weight, again.entity_embedding.weight)
    assert not torch.equal(first.entity_embedding.weight, other.entity_embedding.weight)


def test_sizes_survive_being_written_and_read() -> None:
    assert ConvESizes.from_json(SMALL.to_json()) == SMALL
    assert isinstance(ConvE(ConvESizes.from_json(SMALL.to_json())), ConvE)


def test_sizes_without_a_field_are_refused_by_its_name() -> None:
    values = SMALL.to_json()
    del values["output_channels"]
    with pytest.raises(TypeError, match="output_channels"):
        ConvESizes.from_json(values)


def test_an_embedding_that_does_not_fill_its_image_is_refused_with_sizes_that_fit() -> None:
    with pytest.raises(UsageError, match=r"--embedding-dim 130 .* 12 x .*--embedding-dim 120"):
        settings_of("--embedding-dim", "130", "--embedding-height", "12", "--embedding-width", "10")


def test_a_kernel_larger_than_the_image_is_refused() -> None:
    with pytest.raises(UsageError, match="kernel of 3 x 9"):
        ConvESizes(
            num_entities=4,
            num_relations=1,
            embedding_dim=24,
            embedding_height=4,
            embedding_width=6,
            kernel_width=9,
        )


@pytest.mark.parametrize(
    ("words", "image"),
    [
        ([], (200, 10, 20)),
        (["--embedding-dim", "128"], (128, 8, 16)),
        (["--embedding-dim", "200"], (200, 10, 20)),
        (["--embedding-height", "4", "--embedding-width", "6"], (24, 4, 6)),
        (["--embedding-dim", "32", "--embedding-height", "8"], (32, 8, 4)),
        (["--embedding-dim", "32", "--embedding-width", "4"], (32, 8, 4)),
    ],
)
def test_sides_that_are_not_given_are_filled_in(
    words: list[str], image: tuple[int, int, int]
) -> None:
    found = settings_of(*words).image
    assert (found.embedding_dim, found.embedding_height, found.embedding_width) == image


@pytest.mark.parametrize("embedding_dim", [1, 2, 97, 127, 199, 200, 1009])
def test_the_nearest_image_is_a_usable_one(embedding_dim: int) -> None:
    height, width = nearest_image(embedding_dim)
    assert even_image(height * width) == (height, width)
    assert width <= 4 * height


def test_the_documented_flags_are_all_understood() -> None:
    settings = settings_of(
        *("--output-dir", "out", "--use-mixed-precision", "--use-gradient-checkpointing"),
        *("--disable-memory-cleanup", "--batch-size", "512", "--num-epochs", "20"),
        *("--learning-rate", "0.0005", "--embedding-dim", "128", "--output-channels", "16"),
        *("--kernel-height", "3", "--kernel-width", "3", "--input-dropout", "0.1"),
        *("--feature-map-dropout", "0.1", "--output-dropout", "0.1", "--label-smoothing", "0.2"),
        *("--checkpoint-dir", "saved", "--checkpoint-frequency", "5", "--no-gpu"),
        *("--resume-from-checkpoint", "auto", "--random-seed", "7", "--num-workers", "2"),
    )
    assert settings.memory_settings.require == ("bf16", "activation-checkpointing")
    assert settings.memory_settings.device == "cpu"
    assert not settings.memory_cleanup
    assert (settings.num_epochs, settings.batch_size, settings.random_seed) == (20, 512, 7)
    assert str(settings.checkpoint_dir) == "saved"


def test_the_command_of_a_run_repeats_its_settings() -> None:
    words = ("--budget", "64MiB", "--allow", "bf16", "--epochs", "3", "--no-gpu", "-o", "a b")
    settings = settings_of(*words)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    import shlex

    again = parser.parse_args(shlex.split(settings.command)[3:])
    assert settings_from(again, settings.command) == settings


@pytest.mark.parametrize(
    "words",
    [
        ["--train", "x.txt"],
        ["--no-gpu", "--device", "cuda"],
        ["--plan", "p.yaml", "--use-mixed-precision"],
    ],
)
def test_contradicting_flags_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        settings_of(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["--budget", "lots"],
        ["--budget", "1GiB", "--budget-fraction", "0.5"],
        ["--batch-size", "2"],
        ["--learning-rate", "0"],
        ["--input-dropout", "1"],
        ["--label-smoothing", "nan"],
    ],
)
def test_values_that_make_no_sense_are_usage_errors(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        settings_of(*words)
    assert caught.value.code == 2
