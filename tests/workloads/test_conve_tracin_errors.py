"""What ``memfit tracin`` refuses: one line that names the file, and nothing half written."""

import errno
import json
import re

import pytest
import torch
from tests.workloads.traced import write_checkpoint, write_run

from memfit.cli.main import main
from memfit_workloads.conve.model import build_model
from memfit_workloads.conve.sizes import ConvESizes
from memfit_workloads.conve.tracin import writing


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path)


def refused(run, capsys, *words, code: int = 1) -> str:
    """Run the command, which ends with an error in one line, and writes nothing."""
    output = run.parent / "out" / "found.json"
    output.parent.mkdir(exist_ok=True)
    given = ["--device", "cpu", "--output", str(output), *map(str, words)]
    if "--model-path" not in words:
        given = ["--model-path", str(run), *given]
    found = main(["tracin", *given])
    said = capsys.readouterr().err

    assert found == code, said
    assert said.count("\n") == 1, said
    assert not output.exists()
    return said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--train-indices", "7000"), "train.txt: it has .* triples, 0 to .* asks for 7000"),
        (("--test-indices", "2", "5"), "test.txt: it has 5 triples, 0 to 4, and .* for 5"),
        (("--embedding-dim", "200"), r"epoch_2.pt: its model has embedding_dim 12, and --embed"),
        (("--output-channels", "32"), "its model has output_channels 2, and --output-channels"),
        (("--last-layer-names", "fc"), "no parameter or module called fc"),
        (("--dataset", "umls"), "trained on 12 entities and 3 relations, and the graph of .*135"),
        (("--train", "none.txt"), "none.txt: it cannot be read"),
    ],
)
def test_what_does_not_fit_is_named(words, message, run, capsys) -> None:
    assert re.search(message, refused(run, capsys, *words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--train-indices", "0-99999999999"), "a range has at most 10,000,000 numbers"),
        (("--test-indices", "x"), "--test-indices takes numbers"),
        (("--test-indices", "7-3"), "the range ends before it begins"),
        (("--mode", "single", "--test-indices", "1-3"), "takes one of --test-indices, not 3"),
        (("--mode", "self", "--max-test-triples", "3"), "--mode self asks about training triples"),
        (("--mode", "self", "--output-per-triple"), "--output-per-triple writes"),
        (("--loss", "target", "--triple-loss", "row"), "Leave one of them out"),
        (("--dataset", "umls", "--train", "a.txt"), "--dataset brings its own files"),
        (("--checkpoints", "3"), "no checkpoint of epoch 3; it has 2, 10"),
        (("--checkpoints", "few"), "all, some, or epochs"),
        (("--csv-output", "."), "is a folder"),
    ],
)
def test_flags_that_make_no_sense_are_usage_errors(words, message, run, capsys) -> None:
    assert message in refused(run, capsys, *words, code=2)


def test_outputs_are_different_files(run, capsys) -> None:
    words = ("--csv-output", run.parent / "out" / "found.json")

    assert "are one file" in refused(run, capsys, *words, code=2)


def test_checkpoints_have_to_be_there_and_whole(run, tmp_path, capsys) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"PK\x03\x04 cut off")
    other = tmp_path / "other.pt"
    torch.save({"weights": torch.zeros(3)}, other)
    missing = tmp_path / "none.pt"

    assert "no checkpoint_epoch_N.pt" in refused(run, capsys, "--model-path", empty)
    assert "cannot be read as a checkpoint" in refused(run, capsys, "--model-path", broken)
    assert "no checkpoint of ConvE" in refused(run, capsys, "--model-path", other)
    assert "there is no such checkpoint" in refused(run, capsys, "--model-path", missing)


def test_checkpoints_are_of_one_model(run, capsys) -> None:
    sizes = ConvESizes(num_entities=12, num_relations=3, embedding_dim=12, output_channels=4,
                       embedding_height=3, embedding_width=4)  # fmt: skip
    path = run / "checkpoints" / "checkpoint_epoch_2.pt"
    write_checkpoint(path, build_model(sizes, 0), 2)

    said = refused(run, capsys)
    assert "epoch_10.pt: it is of another model than" in said
    assert "output_channels 2 and not 4" in said


def test_sizes_and_weights_have_to_agree(run, capsys) -> None:
    path = run / "checkpoints" / "checkpoint_epoch_2.pt"
    content = torch.load(path)
    del content["model_config"]["output_channels"], content["model_config"]["kernel_height"]
    torch.save(content, path)
    assert "model_config is unusable" in refused(run, capsys)

    content["model_config"] |= {"output_channels": 2, "kernel_height": 3}
    del content["model_state_dict"]["encoder.1.1.weight"]
    torch.save(content, path)
    assert "these weights do not fit the model" in refused(run, capsys)


def test_a_graph_has_to_be_named(run, tmp_path, capsys) -> None:
    alone = tmp_path / "alone" / "deep"
    alone.mkdir(parents=True)
    model = alone / "some.pt"
    model.write_bytes((run / "checkpoints" / "checkpoint_epoch_10.pt").read_bytes())

    assert "lies in no run folder" in refused(run, capsys, "--model-path", model, code=2)


def test_an_empty_test_set_is_an_error(run, tmp_path, capsys) -> None:
    (tmp_path / "test.txt").write_text("\n")

    assert "test.txt: it has no triples" in refused(run, capsys)


def test_names_of_another_graph_are_an_error(run, tmp_path, capsys) -> None:
    (tmp_path / "test.txt").write_text("aspirin\tr0\te1\n")

    assert "test.txt, line 1: the entity 'aspirin' is not in" in refused(run, capsys)


def test_a_configuration_that_says_nothing_is_an_error(run, capsys) -> None:
    (run / "config.json").write_text("[]")

    assert "config.json: it does not say how a model was trained" in refused(run, capsys)


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("--node-name-dict", "e1 without a tab\n", "map, line 1: found 'e1 without a tab', needed"),
        ("--edge-map", "{", "map: it is no JSON"),
        ("--edge-map", "[1]", "map: it is no object of texts"),
        ("--edge-map", '{"a": "r0", "b": "r0"}', "map: the relation 'r0' is listed twice"),
        ("--entity-to-id", "e1\tone\n", "map, line 1: found"),
    ],
)
def test_malformed_maps_are_named_with_their_line(
    flag, text, message, run, tmp_path, capsys
) -> None:
    (tmp_path / "map").write_text(text)

    assert message in refused(run, capsys, flag, tmp_path / "map")


@pytest.mark.slow
def test_a_full_disk_leaves_what_was_there(run, tmp_path, capsys, monkeypatch) -> None:
    output = tmp_path / "found.json"
    output.write_text("before")
    write = writing.write_atomically
    is_full = True

    def full(path, content):
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(writing, "write_atomically", full)
    given = ["tracin", "--model-path", str(run), "--device", "cpu", "--output", str(output)]
    assert main(given) == 1
    said = capsys.readouterr().err
    assert "found.json: it cannot be written (No space left on device)" in said
    assert output.read_text() == "before"

    is_full = False
    assert main(given) == 0
    assert json.loads(output.read_text())["results"]


@pytest.mark.slow
def test_a_folder_that_cannot_be_used_is_named(run, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "tracin.json").write_text("{")

    assert "progress cannot be kept" in refused(run, capsys, "--folder", tmp_path / "file" / "in")
    assert "does not say whose" in refused(run, capsys, "--folder", tmp_path / "there")


@pytest.mark.slow
def test_scores_that_are_no_numbers_are_an_error(run, capsys) -> None:
    path = run / "checkpoints" / "checkpoint_epoch_10.pt"
    content = torch.load(path)
    content["model_state_dict"]["encoder.1.1.weight"].fill_(torch.nan)
    torch.save(content, path)

    assert "no finite number under the checkpoint checkpoint_epoch_10.pt" in refused(run, capsys)


def test_another_device_is_refused_but_for_a_dry_run(run, capsys) -> None:
    assert "--device is cpu or cuda" in refused(run, capsys, "--device", "a100-40gb")


@pytest.mark.slow
def test_a_folder_of_others_is_neither_claimed_nor_removed(run, tmp_path, capsys) -> None:
    mine = tmp_path / "found.json.progress" / "notes.txt"
    mine.parent.mkdir()
    mine.touch()
    said = refused(run, capsys, "--output", tmp_path / "found.json")
    assert "it holds notes.txt, which no tracing has written" in said
    assert mine.exists()
