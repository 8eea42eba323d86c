"""Words that mean several devices: lists, patterns, and all cards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import memfit.devices
from memfit.devices.catalogue import device_names
from memfit.devices.several import devices_meant
from memfit.errors import UnknownDeviceError, UsageError

OWN = Path(memfit.devices.__file__).parent / "data" / "t4.toml"


def names(*words: str) -> list[str]:
    return [device.name for device in devices_meant(words)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["t4"], ["t4"]),
        (["cpu,t4", "t4"], ["cpu", "t4"]),
        (["a100-*"], ["a100-40gb", "a100-80gb"]),
        (["A100-?0gb, cpu"], ["a100-40gb", "a100-80gb", "cpu"]),
    ],
)
def test_each_device_is_meant_once_in_its_order(words: list[str], expected: list[str]) -> None:
    assert names(*words) == expected


def test_all_means_every_card_and_no_processor() -> None:
    assert set(names("all")) == set(device_names()) - {"cpu"}


def test_the_path_of_a_file_of_ones_own_may_have_a_comma_and_stand_in_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a,b.toml", "own.toml"):
        shutil.copy(OWN, name)

    assert names("a,b.toml", "own.toml,t4") == ["a,b.toml", "own.toml", "t4"]


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"No device is named like 'rtx-99\*'"):
        devices_meant(["rtx-99*"])
    with pytest.raises(UnknownDeviceError):
        devices_meant(["t4,nonsense"])
