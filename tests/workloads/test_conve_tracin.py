"""``memfit tracin`` on a tiny graph: scores of a dense loop, files, and how a tracing goes on."""

import csv
import json
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.workloads.traced import ENTITIES, EPOCHS, RATES, RELATIONS, SMOOTHING, write_run

from memfit.cli.main import main
from memfit.influence import walk
from memfit_workloads.conve.checkpoints import load_model
from memfit_workloads.conve.tracin import losses
from memfit_workloads.conve.tracin.findings import COLUMNS

pytestmark = pytest.mark.slow

DEFINITIONS = {
    "row": ("--loss", "training", "--sides", "tail"),
    "own part of the row": ("--triple-loss", "target", "--sides", "tail"),
    "target": ("--loss", "target", "--sides", "tail"),
    "both sides": ("--triple-loss", "row", "--sides", "both"),
    "single": ("--triple-loss", "row", "--sides", "tail", "--training-target", "single"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("traced"))


def traced(run, capsys, *words) -> dict:
    """Run the command, and return what it gives."""
    given = ["tracin", "--model-path", str(run), "--device", "cpu", "--json", *map(str, words)]
    code = main(given)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return {**json.loads(captured.out), "said": captured.err}


def triples_in(run, name):
    text = (run.parent / f"{name}.txt").read_text().split()
    numbers = torch.tensor([int(word[1:]) for word in text])
    return numbers.view(-1, 3)


def loss_of(model, triple, train, definition):
    """Return the loss of one triple, as the definitions are written down."""
    head, relation, tail = triple.tolist()
    total = 0.0
    inverse = (tail, relation + RELATIONS, head)
    sides = [(head, relation, tail), inverse]
    for own_head, own_relation, own_tail in sides if definition == "both sides" else sides[:1]:
        scores = model(torch.tensor([own_head]), torch.tensor([own_relation]))[0]
        if definition == "target":
            total = total + F.softplus(-scores[own_tail])
            continue
        known = {own_tail}
        if definition != "single":
            for other in train.tolist():
                first, second, third = other
                if (first, second) == (own_head, own_relation):
                    known.add(third)
                if (third, second + RELATIONS) == (own_head, own_relation):
                    known.add(first)
        label = torch.zeros(ENTITIES, dtype=torch.float64)
        label[list(known)] = 1.0
        label = (1 - SMOOTHING) * label + SMOOTHING / ENTITIES
        terms = F.binary_cross_entropy_with_logits(scores, label, reduction="none")
        total = total + (terms[own_tail] / ENTITIES if "part" in definition else terms.mean())
    return total


def dense_gradients(model, triples, train, definition):
    rows = []
    for triple in triples:
        loss = loss_of(model, triple, train, definition)
        found = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        rows.append(torch.cat([each.flatten() for each in found]))
    return torch.stack(rows)


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_scores_are_those_of_a_dense_loop(definition, run, capsys) -> None:
    train, test = triples_in(run, "train"), triples_in(run, "test")
    expected, own = 0.0, 0.0
    for epoch in EPOCHS:
        model = load_weights(run / "checkpoints" / f"checkpoint_epoch_{epoch}.pt")
        of_train = dense_gradients(model, train, train, definition)
        of_test = dense_gradients(model, test, train, definition)
        expected = expected + RATES[epoch] * (of_test @ of_train.T)
        own = own + RATES[epoch] * of_train.square().sum(dim=1)

    found = traced(run, capsys, "--top-k", len(train), *DEFINITIONS[definition])
    scores, found_own = np.zeros(expected.shape), np.zeros(len(train))
    for row, each in enumerate(found["results"]):
        for entry in [*each["helpful"], *each["harmful"]]:
            scores[row, entry["index"]] = entry["score"]
            found_own[entry["index"]] = entry["self_influence"]
    alone = traced(run, capsys, "--mode", "self", *DEFINITIONS[definition])["self_influence"]

    assert error(scores, expected) < 1e-12
    assert error(found_own, own) < 1e-12
    assert [each["score"] for each in alone] == sorted(found_own.tolist(), reverse=True)
    assert found["unread"] == {}


def test_triples_that_share_a_row_are_compared_once(run, capsys) -> None:
    train = triples_in(run, "train")
    num_rows = len({(head, relation) for head, relation, _ in train.tolist()})
    found = traced(run, capsys, "--dry-run")
    assert found["num_train_rows"] == num_rows < len(train) == found["num_train"]
    assert "rows, against" in found["said"]
    both = traced(run, capsys, "--dry-run", "--sides", "both")
    assert both["num_train_rows"] == len(train)


@pytest.mark.parametrize("sides", ["tail", "both"])
def test_pairs_of_answers_give_the_scores_of_padded_lists(sides, run, capsys, monkeypatch) -> None:
    words = ("--triple-loss", "row", "--sides", sides, "--batch-size", "4", "--top-k", "9")
    padded = traced(run, capsys, *words)["results"]
    monkeypatch.setattr(losses, "_MOST_PADDED", 1)
    paired = traced(run, capsys, *words)
    assert scores_of(paired["results"]) == pytest.approx(scores_of(padded), rel=1e-12)
    assert paired["measured_peak_bytes"] == pytest.approx(paired["predicted_peak_bytes"], abs=2048)


def scores_of(results) -> dict[tuple[int, int], float]:
    """Return scores by test and training triple."""
    return {
        (each["test"]["index"], row["index"]): row["score"]
        for each in results
        for kind in ("helpful", "harmful")
        for row in each[kind]
    }


@pytest.mark.parametrize("mode", ["test", "self"])
def test_some_training_triples_have_the_scores_that_they_have_among_all(mode, run, capsys) -> None:
    every = len(triples_in(run, "train"))
    words = ("--mode", mode, "--top-k", str(every), "--loss", "training", "--sides", "tail")
    some = traced(run, capsys, *words, "--train-indices", "9", "2-5", "--max-train-triples", "4")
    whole = traced(run, capsys, *words)
    assert some["num_train"] == 4
    if mode == "self":
        found, expected = (
            {row["index"]: row["score"] for row in each["self_influence"]} for each in (some, whole)
        )
    else:
        found, expected = scores_of(some["results"]), scores_of(whole["results"])
    assert {key if mode == "self" else key[1] for key in found} == {2, 3, 4, 5}
    assert found == pytest.approx({key: expected[key] for key in found}, rel=1e-12)


def load_weights(path):
    """Load a model in double precision."""
    content = torch.load(path, weights_only=True)
    content |= {"optimizer_state_dict": {}}
    whole = path.with_suffix(".whole")
    torch.save(content, whole)
    model = load_model(whole).double()
    model.load_state_dict(content["model_state_dict"])
    whole.unlink()
    return model


def error(found, expected) -> float:
    expected = expected.detach().numpy()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_files_tell_the_same_and_a_page_has_the_names(run, tmp_path, capsys) -> None:
    pytest.importorskip("jinja2", reason="pages need the html extra")
    names = "".join(f"e{number}\tthing {number}\n" for number in range(ENTITIES))
    (tmp_path / "names.txt").write_text(names)
    edges = {
        json.dumps({"predicate": "biolink:treats", "qualifier": "mild"}): "r0",
        '"causes"': "r1",
        "is <near>": "r2",
    }
    (tmp_path / "edges.json").write_text(json.dumps(edges))
    words = ("--node-name-dict", tmp_path / "names.txt", "--edge-map", tmp_path / "edges.json")
    files = {name: tmp_path / f"found.{name}" for name in ("json", "csv", "html")}
    outputs = ("--output", files["json"], "--csv-output", files["csv"], "--page", files["html"])
    found = traced(
        run, capsys, "--top-k", 3, "--max-test-triples", 2, "--output-per-triple", *words, *outputs
    )
    written = json.loads(files["json"].read_text())
    with files["csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))

    assert written["results"] == found["results"]
    assert tuple(rows[0]) == COLUMNS
    assert (
        *("TestHead", "TestHead_label", "TestRel", "TestRel_label", "TestTail", "TestTail_label"),
        *("TrainHead", "TrainHead_label", "TrainRel", "TrainRel_label", "TrainTail"),
        *("TrainTail_label", "TracInScore", "SelfInfluence"),
    ) == COLUMNS
    first = found["results"][0]["helpful"][0]
    assert float(rows[0]["TracInScore"]) == first["score"]
    assert rows[0]["TrainHead_label"] == f"thing {rows[0]['TrainHead'][1:]}"
    labels = {"r0": "treats (qualifier mild)", "r1": '"causes"', "r2": "is <near>"}
    assert all(labels[row["TrainRel"]] == row["TrainRel_label"] for row in rows)
    page = files["html"].read_text()
    assert f"{first['head_label']} — " in page
    assert "is <near>" not in page
    assert "is &lt;near&gt;" in page
    single = json.loads((tmp_path / "found_test_1.json").read_text())
    assert single["results"] == found["results"][1:]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("names.txt", "edges.json", "found.json", "found.csv", "found.html"),
        *(f"found_test_{row}.{kind}" for row in (0, 1) for kind in ("json", "csv")),
    }


def test_one_test_triple_gets_a_score_of_every_training_triple(run, capsys) -> None:
    found = traced(run, capsys, "--mode", "single", "--test-indices", 3)

    assert (found["loss"], found["triple_loss"], found["sides"]) == ("training", "row", "tail")
    (only,) = found["results"]
    assert only["test"]["index"] == 3
    assert len(only["helpful"]) + len(only["harmful"]) == 25


def test_the_page_of_self_influence_lists_triples_to_check(run, tmp_path, capsys) -> None:
    pytest.importorskip("jinja2", reason="pages need the html extra")
    path = tmp_path / "own.html"
    found = traced(run, capsys, "--mode", "self", "--top-k", 4, "--page", path)

    assert len(found["self_influence"]) == 4
    assert (found["loss"], found["triple_loss"], found["sides"]) == ("target", "target", "both")
    assert "Triples worth checking" in path.read_text()


def test_graph_and_definition_may_be_given_instead_of_a_run_folder(run, tmp_path, capsys) -> None:
    model = tmp_path / "some.pt"
    model.write_bytes((run / "checkpoints" / "checkpoint_epoch_10.pt").read_bytes())
    files = [
        word
        for name in ("train", "test")
        for word in (f"--{name}", str(run.parent / f"{name}.txt"))
    ]
    maps = [
        word
        for name in ("entity", "relation")
        for word in (f"--{name}-to-id", str(run / f"{name}_to_id.txt"))
    ]
    sizes = ["--embedding-dim", "12", "--output-channels", "2", "--label-smoothing", "0.1"]
    found = traced(model, capsys, *files, *maps, *sizes)
    same = traced(run, capsys, "--checkpoints", "10")

    assert found["results"] == same["results"]
    assert found["checkpoints"][0]["learning_rate"] == RATES[10]


def test_some_checkpoints_are_spread_and_a_rate_may_be_given(run, capsys) -> None:
    words = ("--checkpoints", "some", "--learning-rate", "0.125", "--dry-run")
    found = traced(run, capsys, *words)["checkpoints"]

    assert [(each["epoch"], each["learning_rate"]) for each in found] == [(2, 0.125), (10, 0.125)]


def test_last_layers_alone_are_compared(run, capsys) -> None:
    last = traced(run, capsys, "--use-last-layers-only", "--num-last-layers", 1)
    named = traced(run, capsys, "--last-layer-names", "entity_bias", "encoder.1.1")

    assert last["parameters"] == ["encoder.1.3.weight", "encoder.1.3.bias"]
    assert named["parameters"] == ["entity_bias", "encoder.1.1.weight", "encoder.1.1.bias"]


def test_flags_without_effect_say_why_and_change_nothing(run, capsys) -> None:
    plain = traced(run, capsys)
    flags = (
        *("--enable-multi-gpu", "--use-torch-compile", "--disable-vectorized-gradients"),
        *("--disable-test-gradient-caching", "--disable-memory-cleanup"),
        *("--use-optimized-tracin", "--use-gradient-checkpointing"),
    )
    found = traced(run, capsys, *flags)

    assert found["results"] == plain["results"]
    said = " ".join(found["said"].split())
    assert all(f"{flag} is not needed: " in said for flag in flags)


def test_mixed_precision_is_near(tmp_path, capsys) -> None:
    run = write_run(tmp_path, dtype=torch.float32)
    plain = traced(run, capsys, "--mode", "self")["self_influence"]
    mixed = traced(run, capsys, "--mode", "self", "--use-mixed-precision")["self_influence"]
    scores = {each["index"]: each["score"] for each in plain}

    assert [each["score"] for each in mixed] != [each["score"] for each in plain]
    for each in mixed:
        assert each["score"] == pytest.approx(scores[each["index"]], rel=0.1)


def test_a_dry_run_predicts_and_writes_nothing(run, tmp_path, capsys) -> None:
    words = ("--output", tmp_path / "found.json", "--dry-run")
    found = traced(run, capsys, *words)
    card = traced(run, capsys, *words, "--device", "a100-40gb")

    assert found["predicted_peak_bytes"] > 0
    assert found["predicted_seconds"] > 0
    assert "results" not in found
    assert card["device"] == "a100-40gb"
    assert card["predicted_process_bytes"] > card["predicted_peak_bytes"]
    assert not list(tmp_path.iterdir())


def test_a_budget_chooses_the_chunk(run, capsys) -> None:
    plain = traced(run, capsys, "--dry-run")
    peak = plain["predicted_peak_bytes"]
    small = traced(run, capsys, "--dry-run", "--budget", f"{int(0.7 * peak)}B")
    code = main(["tracin", "--model-path", str(run), "--device", "cpu", "--budget", "1000B"])

    assert small["predicted_peak_bytes"] <= 0.7 * peak
    assert small["train_chunk"] < plain["train_chunk"]
    assert code == 3


def test_ctrl_c_leaves_progress_from_which_the_same_command_goes_on(
    run, tmp_path, capsys, monkeypatch
) -> None:
    # The rows of triples would be fewer than triples, and one test triple's chunk the only one.
    expected = traced(run, capsys, "--batch-size", 7, "--sides", "both")["results"]
    words = ("--batch-size", "7", "--sides", "both", "--output", tmp_path / "found.json")
    given = ["tracin", "--model-path", str(run), "--device", "cpu", *map(str, words)]
    monkeypatch.setattr(walk, "_SECONDS_BETWEEN_SAVES", 0.0)
    block = walk.Walk._block
    asked: list[range] = []

    def pressed(self, held, rows, checkpoint):
        asked.append(rows)
        if len(asked) == 3:
            signal.raise_signal(signal.SIGINT)
        return block(self, held, rows, checkpoint)

    monkeypatch.setattr(walk.Walk, "_block", pressed)
    assert main(given) == 130
    said = " ".join(capsys.readouterr().out.split())
    assert "Nothing was written. The same command goes on" in said
    assert [path.name for path in tmp_path.iterdir()] == ["found.json.progress"]
    assert main([*given, "--loss", "target"]) == 1
    assert "loss is training there and target here" in capsys.readouterr().err
    asked.extend([range(0)] * 3)
    before = len(asked)
    found = traced(run, capsys, *words)

    pairs = len(asked) - before - 2 * -(-len(rows_of(found)) // 7)
    assert pairs == 8 - 3  # chunks of two checkpoints, of which three were done
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert found["results"] == expected


def rows_of(found) -> set[int]:
    """Return the training triples that a result lists."""
    return {
        row["index"]
        for each in found["results"]
        for kind in ("helpful", "harmful")
        for row in each[kind]
    }
