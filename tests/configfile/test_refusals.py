"""What cannot be changed safely is refused with its reason, and nothing is written."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from memfit.configfile.applying import apply_plan
from memfit.configfile.changes import Wishes
from memfit.errors import (
    ConfigFileError,
    MemfitError,
    MissingExtraError,
    NoExactFactorsError,
    PlanFileError,
    UsageError,
)

ARGUMENTS = "output_dir: out\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 2\n"
TRAINER = "trainer:\n  accumulate_grad_batches: 2\n  precision: 32\n"

REFUSED = {
    "an anchor that another key shares": (
        "a.yaml",
        "data: {batch_size: &n 8, eval_batch_size: *n}\n" + TRAINER,
        "shared by several keys through the anchor &n",
    ),
    "an alias": (
        "a.yaml",
        "n: &n 8\ndata: {batch_size: *n}\n" + TRAINER,
        "shared by several keys",
    ),
    "a group that is shared whole": (
        "a.yaml",
        "data: &d\n  batch_size: 8\neval: *d\n" + TRAINER,
        "shared by several keys through the anchor &d",
    ),
    "a merge": (
        "a.yaml",
        "base: &b\n  batch_size: 8\ndata:\n  <<: *b\n" + TRAINER,
        "through the merge <<: *b",
    ),
    "a list of merges": (
        "a.yaml",
        "x: &x {batch_size: 8}\ny: &y {w: 1}\ndata:\n  <<: [*y, *x]\n" + TRAINER,
        "through the merge",
    ),
    "a key that occurs twice in YAML": (
        "a.yaml",
        ARGUMENTS + "per_device_train_batch_size: 16\n",
        "occurs twice, the second time in line 4",
    ),
    "a key that occurs twice in JSON": (
        "a.json",
        '{"per_device_train_batch_size": 8,\n\n "per_device_train_batch_size": 4}',
        "occurs twice, the second time in line 3",
    ),
    "a key that occurs twice in TOML": ("a.toml", "a = 1\na = 2\n", "it is no TOML"),
    "a keyword of two calls": (
        "a.py",
        "TrainingArguments(per_device_train_batch_size=8)\n" * 2,
        "several calls of TrainingArguments (lines 1 and 2)",
    ),
    "a name that is set twice": (
        "a.py",
        "t = Trainer(accumulate_grad_batches=2)\nBATCH_SIZE = 8\nBATCH_SIZE = 4\n",
        "set several times (lines 2 and 3)",
    ),
    "a computed keyword": (
        "a.py",
        "a = TrainingArguments(\n    per_device_train_batch_size=int(8),\n)\n",
        "it is computed, as int(8)",
    ),
    "a call with further settings": (
        "a.py",
        "a = TrainingArguments(per_device_train_batch_size=8, **more)\n",
        "given a ** of settings",
    ),
    "an interpolation": (
        "a.yaml",
        "data:\n  batch_size: ${oc.env:BS,8}\n" + TRAINER,
        "it is computed, as ${oc.env:BS,8}",
    ),
    "a schedule of accumulation": (
        "a.yaml",
        "data: {batch_size: 8}\ntrainer:\n  accumulate_grad_batches: {0: 8, 4: 4}\n",
        "is a group of values, such as a schedule",
    ),
    "broken YAML": ("a.yaml", "a: [1, 2\nb: 3\n", "it is no YAML"),
    "broken JSON": ("a.json", '{"a": 1,}', "it is no JSON"),
    "broken Python": ("a.py", "a = (1,\n", "it is no Python"),
    "broken TOML": ("a.toml", "a = \n", "it is no TOML"),
    "a list at the top": ("a.json", "[1, 2]", "no JSON object"),
    "an unknown format": ("a.ini", "[a]\nb = 1\n", "is no format that memfit edits"),
    "an unknown kind": ("a.yaml", "colour: red\n", "Say which key holds what"),
    "a key that is nearly right": (
        "a.yaml",
        "base_model: b\nmicro_batch_size: 8\ngradient_accumulation_step: 4\n",
        "no key gradient_accumulation_steps, but gradient_accumulation_step",
    ),
    "two keys that could be meant": (
        "a.yaml",
        "data: {batch_size: 8}\ndatamodule: {batch_size: 4}\n" + TRAINER,
        "could be any of",
    ),
    "two groups of arguments": (
        "a.yaml",
        "a:\n  per_device_train_batch_size: 8\nb:\n  per_device_train_batch_size: 4\n",
        "is in it 2 times (a.per_device_train_batch_size, b.per_device_train_batch_size)",
    ),
    "a number in another notation": (
        "a.yaml",
        "output_dir: o\nper_device_train_batch_size: 010\n",
        "a whole number of at least 1 is needed",
    ),
    "no number": (
        "a.yaml",
        "output_dir: o\nper_device_train_batch_size: many\n",
        "is 'many', and a whole number",
    ),
    "a number over several lines": (
        "a.yaml",
        "output_dir: o\nper_device_train_batch_size: |\n  8\ngradient_accumulation_steps: 2\n",
        "a whole number of at least 1 is needed",
    ),
    "a file without a micro-batch": (
        "a.yaml",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: 'no'\n",
        "no micro-batch was found",
    ),
    "a batch that is left to the framework": (
        "a.json",
        '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}',
        "no micro-batch was found",
    ),
    "aliases without end": ("a.yaml", "a: &a [*a]\n", "ever more values"),
    "a key in the long form, beside which nothing can be written": (
        "a.yaml",
        "? per_device_train_batch_size\n: 8\n? output_dir\n: o\n",
        "would change more than that",
    ),
    "an accumulation in a group that is not known": (
        "a.yaml",
        "output_dir: o\nper_device_train_batch_size: 8\nloop:\n  gradient_accumulation_steps: 4\n",
        "loop.gradient_accumulation_steps (a.yaml:4), in a group that memfit does not know",
    ),
    "an accumulation of a trainer that is not known": (
        "a.yaml",
        "data: {batch_size: 8}\ntrainer: {max_steps: 1}\nx: {accumulate_grad_batches: 4}\n",
        "x.accumulate_grad_batches (a.yaml:3), in a group",
    ),
    "several documents without a batch": ("a.yaml", "a: 1\n---\nb: 2\n", "Say which key"),
}


@pytest.mark.parametrize(("file", "text", "reason"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_and_nothing_is_written(file, text, reason, apply, folder):
    with pytest.raises(ConfigFileError) as refused:
        apply((file, text), write=True)

    assert reason in str(refused.value)
    assert file in str(refused.value)
    assert "Nothing has been written" in str(refused.value)
    assert (folder / file).read_bytes() == text.encode()
    assert [each.name for each in folder.iterdir() if "backup" in each.name] == []


def test_a_text_that_is_not_utf8_is_refused(apply, folder):
    (folder / "a.yaml").write_bytes(b"a: \xff\n")

    with pytest.raises(ConfigFileError, match="not written in UTF-8"):
        apply_plan(Path("plan.yaml"), [Path("a.yaml")], Wishes())


def test_files_that_contradict_each_other_are_refused(apply):
    deepspeed = '{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}'

    with pytest.raises(ConfigFileError, match="contradict each other"):
        apply(("a.yaml", ARGUMENTS), ("ds.json", deepspeed))


def test_an_identity_of_deepspeed_that_does_not_hold_is_refused(apply):
    text = (
        '{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 8, '
        '"gradient_accumulation_steps": 4}'
    )

    with pytest.raises(ConfigFileError, match=r"said to be 100, but .* 8 x 1 x 4 = 32"):
        apply(("ds.json", text))


@pytest.mark.parametrize("devices", ["auto", "-1", "null"])
def test_devices_that_are_left_to_the_machine_have_to_be_told(devices, apply):
    text = f"data: {{batch_size: 8}}\ntrainer:\n  devices: {devices}\n  max_steps: 1\n"
    file = ("a.yaml", text)

    with pytest.raises(UsageError, match="how many there are with --devices N"):
        apply(file)
    assert apply(file, num_devices=2).changes.after.product() == "4 x 2 x 2 = 16"


def test_a_number_of_devices_that_a_file_contradicts_is_refused(apply):
    text = "data: {batch_size: 8}\ntrainer: {devices: 2, accumulate_grad_batches: 1}\n"

    with pytest.raises(UsageError, match="2 and 4 at once"):
        apply(("a.yaml", text), num_devices=4)


def test_a_batch_without_exact_factors_names_those_that_are_near(apply, folder):
    text = ARGUMENTS.replace(": 8", ": 45").replace(": 2", ": 5")

    with pytest.raises(NoExactFactorsError) as refused:
        apply(("a.yaml", text), write=True)

    assert refused.value.exit_code == 3
    assert refused.value.offers == (
        "--micro-batch 3 keeps it (3 x 1 x 75 = 225)",
        "--effective-batch 224 changes it (4 x 1 x 56 = 224)",
        "--effective-batch 228 changes it (4 x 1 x 57 = 228)",
    )
    assert (folder / "a.yaml").read_text() == text
    assert apply(("a.yaml", text), micro_batch_size=3).changes.after.effective_size == 225
    assert apply(("a.yaml", text), effective_size=224).changes.after.accumulation == 56


def test_a_constant_that_several_loaders_take_is_what_is_changed(apply):
    text = (
        "BATCH_SIZE = 8\nt = Trainer(accumulate_grad_batches=2)\n"
        "a = DataLoader(x, batch_size=BATCH_SIZE)\nb = DataLoader(y, batch_size=BATCH_SIZE)\n"
    )
    (file,) = apply(("a.py", text)).changes.files

    assert file.content.decode().startswith("BATCH_SIZE = 4\n")
    assert b"accumulate_grad_batches=4" in file.content


def test_toml_without_its_library_names_the_pip_line(apply, monkeypatch):
    monkeypatch.setitem(sys.modules, "tomlkit", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'memfit\[toml\]'"):
        apply(("a.toml", 'output_dir = "o"\nper_device_train_batch_size = 8\n'))


def test_stages_that_are_named_too_are_left_as_they_are(apply):
    stage = ("01_stage.yaml", "name: s\nn_positives: 32\nn_negatives: 24\n")
    changes = apply(("a.yaml", "data: {batch_size: 8}\n" + TRAINER), stage).changes

    assert [file.path.name for file in changes.files] == ["a.yaml"]


def test_what_a_file_leaves_to_deepspeed_is_left_to_it(apply):
    text = '{"per_device_train_batch_size": 8, "deepspeed": {"train_batch_size": "auto", '
    text += '"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}}'
    changes = apply(("a.json", text)).changes

    assert changes.after.product() == "4 x 1 x 2 = 8"
    assert changes.files[0].content.count(b'"auto"') == 3


def test_a_plan_without_micro_batches_leaves_the_batch_alone(apply, folder):
    (folder / "plan.yaml").write_text("memfit_plan: 1\nstrategies: [{name: bf16}]\n")
    changes = apply(("a.yaml", ARGUMENTS)).changes

    (file,) = changes.files
    assert [(each.key, each.after) for each in file.changes] == [("bf16", True)]
    assert changes.after is None


def test_a_plan_of_the_whole_batch_needs_no_accumulation(apply, folder):
    (folder / "plan.yaml").write_text("memfit_plan: 1\nprediction: {batch_size: 16}\n")

    assert apply(("a.yaml", ARGUMENTS)).changes.after.product() == "16 x 1 x 1 = 16"


def test_conditions_of_the_plan_and_a_finder_of_batch_sizes_are_said(apply, folder):
    with (folder / "plan.yaml").open("a") as plan:
        plan.write("reasons: [holds while no row is empty]\n")
    notes = " ".join(apply(("a.yaml", ARGUMENTS + "auto_find_batch_size: true\n")).changes.notes)

    assert "The plan: holds while no row is empty" in notes
    assert "auto_find_batch_size (a.yaml) makes the micro-batch smaller" in notes


@pytest.mark.parametrize(
    ("optim", "is_written"), [("", True), ("optim: adamw_torch\n", True), ("optim: lion\n", False)]
)
def test_an_eight_bit_optimizer_takes_the_place_of_adamw_alone(optim, is_written, apply, folder):
    (folder / "plan.yaml").write_text("memfit_plan: 1\nstrategies: [{name: eight-bit-optimizer}]\n")
    changes = apply(("a.yaml", ARGUMENTS + optim)).changes

    written = [each.after for file in changes.files for each in file.changes]
    assert written == (["adamw_bnb_8bit"] if is_written else [])
    assert bool(changes.left_out) is not is_written


def test_a_micro_batch_beyond_the_plan_is_refused(apply):
    with pytest.raises(UsageError, match="8 is more than the 4 of the plan"):
        apply(("a.yaml", ARGUMENTS), micro_batch_size=8)


@pytest.mark.parametrize("name", ["batchnorm-replay", "cached-gradients"])
def test_a_plan_that_accumulation_does_not_carry_out_is_refused(name, apply, folder):
    plan = f"memfit_plan: 1\nstrategies:\n- name: {name}\n  micro_batch_size: 4\n"
    (folder / "plan.yaml").write_text(plan)

    with pytest.raises(ConfigFileError, match="so the results would change"):
        apply(("a.yaml", ARGUMENTS))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\n", "does not say memfit_plan: 1"),
        ("[", "it is no YAML"),
        ("memfit_plan: 1\nstrategies: [{micro: 1}]\n", "needs a name"),
        (
            "memfit_plan: 1\nstrategies: [{name: micro-batching, micro_batch_size: 0}]\n",
            "at least 1, not 0",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text, reason, apply, folder):
    (folder / "plan.yaml").write_text(text)

    with pytest.raises(PlanFileError, match=reason):
        apply(("a.yaml", ARGUMENTS))


def test_a_file_that_was_changed_after_the_plan_is_refused_unless_memfit_wrote_it(apply, folder):
    apply(("a.yaml", ARGUMENTS), write=True)
    hour_ago_seconds = time.time() - 3600
    os.utime(folder / "plan.yaml", (hour_ago_seconds, hour_ago_seconds))
    again = [Path("plan.yaml"), [Path("a.yaml")], Wishes()]

    assert apply_plan(*again).changes.files == ()

    (folder / "a.yaml").write_text(ARGUMENTS + "# by hand\n")
    with pytest.raises(ConfigFileError, match=r"changed .* after plan.yaml was saved"):
        apply_plan(*again)
    assert apply_plan(*again, even_if_changed=True).changes.files


@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_link_that_leads_out_of_the_folder_is_refused(place, apply, folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "a.yaml").write_text(ARGUMENTS)
    if place == "file":
        (folder / "a.yaml").symlink_to(outside / "a.yaml")
        config = Path("a.yaml")
    else:
        (folder / "conf").symlink_to(outside)
        config = Path("conf/a.yaml")

    for write in (False, True):
        with pytest.raises(ConfigFileError, match="leads out of"):
            apply_plan(Path("plan.yaml"), [config], Wishes(), write=write)
    assert (outside / "a.yaml").read_text() == ARGUMENTS
    assert list(outside.iterdir()) == [outside / "a.yaml"]


def test_a_link_inside_the_folder_stays_a_link(apply, folder):
    (folder / "real.yaml").write_text(ARGUMENTS)
    (folder / "a.yaml").symlink_to("real.yaml")

    apply_plan(Path("plan.yaml"), [Path("a.yaml")], Wishes(), write=True)

    assert (folder / "a.yaml").is_symlink()
    assert "per_device_train_batch_size: 4" in (folder / "real.yaml").read_text()


MAPPINGS = {
    'micro_batch = "a"\n': "does not say which key holds the accumulation",
    'micro_batch = "a"\naccumulation = "b"\nmicrobatch = "c"\n': "Nearest: micro_batch",
    'micro_batch = "loader.sise"\naccumulation = "every"\n': "Nearest: loader.size",
    'micro_batch = "loader.size"\naccumulation = 3\n': "no single word",
}


@pytest.mark.parametrize(("mapping", "reason"), MAPPINGS.items())
def test_a_mapping_that_names_what_is_not_there_is_refused(mapping, reason, apply):
    with pytest.raises(ConfigFileError, match=reason):
        apply(("a.yaml", "loader: {size: 8}\nevery: 2\n"), mapping=mapping)


def test_refusals_are_errors_that_the_command_line_shows_in_one_line():
    assert issubclass(ConfigFileError, MemfitError)


@pytest.mark.parametrize("folder_name", ["curriculum", "text_curriculum"])
def test_a_stage_that_sets_its_own_batch_is_refused(folder_name, apply, folder):
    stage = folder / "conf" / folder_name / "01_stage.yaml"
    stage.parent.mkdir(parents=True)
    stage.write_text("n_positives: 32\ndata_loader:\n  batch_size: 2\n")

    with pytest.raises(ConfigFileError, match=r"01_stage.yaml: this stage sets its own"):
        apply(("conf/config.yaml", "data_loader: {batch_size: 8}\n" + TRAINER))
