"""What refers to a changed value follows it, is said to, or is refused."""

from __future__ import annotations

import pytest

from memfit.errors import ConfigFileError

TRAINER = "trainer: {accumulate_grad_batches: 2, precision: 32, devices: 1}\n"
FOLLOWING = {
    "a copy": ("eval: {batch_size: '${data.batch_size}'}\n", "eval.batch_size"),
    "a relative copy": ("data_2: {batch_size: '${..data.batch_size}'}\n", "data_2.batch_size"),
    "a copy of the group": ("val: ${data}\n", "val (config.yaml:3)"),
    "a copy of a copy": (
        "eval: {batch_size: '${copy_batch}'}\ncopy_batch: ${data.batch_size}\n",
        "eval.batch_size",
    ),
    "a name": ("run: ${now:%Y}/size-${data.batch_size}\n", "run (config.yaml:3)"),
}
REFUSED = {
    "a choice with a default": ("n: ${oc.select:data.batch_size,4}\n", "it is computed from"),
    "a rate": ("lr: ${mul:${data.batch_size},0.1}\n", "it is computed from"),
    "a rate behind a copy": ("b_batch: ${data.batch_size}\nlr: ${f:${b_batch}}\n", "lr"),
    "a whole batch": ("effective_batch: ${data.batch_size}\n", "it is a copy of"),
    "another thing": ("width: ${data.batch_size}\n", "it is a copy of"),
    "what the accumulation sets": ("warm: ${f:${trainer.accumulate_grad_batches}}\n", "warm"),
    "a rate within a list": ("lrs: [1, '${f:${data[batch_size]}}']\n", "lrs.1"),
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_what_follows_is_said(name, apply):
    text, key = FOLLOWING[name]

    applied = apply(("config.yaml", "data: {batch_size: 8}\n" + TRAINER + text))

    assert [note for note in applied.changes.notes if key in note and "as well" in note]


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_silently_become_another_value_is_refused(name, apply):
    text, words = REFUSED[name]

    with pytest.raises(ConfigFileError, match=words):
        apply(("config.yaml", "data: {batch_size: 8}\n" + TRAINER + text))


def test_what_refers_to_nothing_changed_is_left_alone(apply):
    text = "out: ${oc.env:HOME,.}/${name}\nname: ${data.kind}\nrate: ${mul:${data.rate},2}\n"
    data = "data: {batch_size: 8, kind: a, rate: 0.5}\n"

    assert apply(("config.yaml", data + TRAINER + text)).changes.notes == ()


def test_a_number_is_changed_where_it_comes_from(apply):
    applied = apply(
        ("config.yaml", "size_batch: 8\ndata: {batch_size: '${size_batch}'}\n" + TRAINER)
    )

    (file,) = applied.changes.files
    assert file.changes[0].key == "size_batch"


def test_values_that_refer_to_each_other_are_refused(apply):
    text = "data: {batch_size: '${other}'}\nother: ${data.batch_size}\n"

    with pytest.raises(ConfigFileError, match="it is computed"):
        apply(("config.yaml", text + TRAINER))


def test_a_choice_of_the_defaults_list_that_is_computed_is_refused(apply):
    text = "defaults: [{data: '${name}'}]\nbatch_size: 8\n"

    with pytest.raises(ConfigFileError, match="known when the program runs"):
        apply(("config.yaml", text + TRAINER))


def test_a_switch_that_is_left_to_another_file_is_said_to_be_left_out(apply):
    text = '{"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": "auto"}}'

    applied = apply(("ds.json", text))

    assert "bf16" in [each.strategy for each in applied.changes.left_out]
