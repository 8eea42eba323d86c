"""The card is there, has a driver, and is seen by torch."""

from __future__ import annotations

import pytest
from tests.zoo.machines import machine_with
from tests.zoo.made_up_machine import MadeUpMachine, healthy

from memfit.doctor.finding import Finding, Status


@pytest.fixture
def made(tmp_path) -> MadeUpMachine:
    return healthy(tmp_path)


def card_of(made: MadeUpMachine) -> Finding:
    (found,) = (each for each in made.findings() if each.name == "card")
    return found


def without_driver(made: MadeUpMachine, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    (made.root / "dev/nvidia0").unlink()
    made.probe["host"] = machine_with()
    made.write("/sys/bus/pci/devices/0000:01:00.0/vendor", f"{vendor}\n")
    made.write("/sys/bus/pci/devices/0000:01:00.0/class", f"{kind}\n")


def test_a_card_that_torch_sees_is_in_order(made):
    assert card_of(made).status is Status.OK


def test_a_card_that_torch_does_not_see(made):
    made.probe["host"] = machine_with()
    found = card_of(made)
    assert found.status is Status.WARNING
    assert "torch.cuda.is_available() is False" in found.found
    assert (found.needed != "", found.command) == (True, "nvidia-smi")


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_card_that_is_hidden_by_intent_is_another_finding(made, value):
    made.probe["host"] = machine_with()
    made.variables["CUDA_VISIBLE_DEVICES"] = value
    assert card_of(made).status is Status.OK


def test_a_card_without_its_driver(made):
    without_driver(made)
    found = card_of(made)
    assert found.status is Status.WARNING
    assert "0000:01:00.0" in found.found
    assert "--gpus all" in found.remedy


@pytest.mark.parametrize(("vendor", "kind"), [("0x1002", "0x030000"), ("0x10de", "0x040300")])
def test_other_makers_and_the_sound_of_a_card_are_no_card(made, vendor, kind):
    without_driver(made, vendor, kind)
    assert card_of(made).status is Status.NOT_APPLICABLE


def test_a_driver_that_is_too_old_is_one_fault(made):
    made.add_card("470.57.02")
    made.probe["host"] = machine_with()
    assert set(made.faults()) == {"driver"}
