"""The device that people mean is found; one of several variants is never chosen for them."""

import pytest

from memfit.devices.catalogue import device_names, load_device
from memfit.devices.names import by_series, words_of
from memfit.errors import AmbiguousDeviceError, UnknownDeviceError


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("RTX 3090", "rtx-3090"),
        ("3090", "rtx-3090"),
        ("rtx3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("rtx 3090 24 GB", "rtx-3090"),
        ("4090 laptop", "rtx-4090-laptop"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        ("4090 mobile", "rtx-4090-laptop"),
        ("geforce rtx 4070 ti super", "rtx-4070-ti-super"),
        ("4070tis", "rtx-4070-ti-super"),
        ("rtx4080super", "rtx-4080-super"),
        ("3060 12gb", "rtx-3060-12gb"),
        ("tesla t4", "t4"),
        ("A100 80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("h100 sxm", "h100-80gb"),
        ("H100 PCIe", "h100-pcie"),
        ("Quadro RTX 6000", "quadro-rtx-6000"),
        ("RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("RTX PRO 6000 Max-Q", "rtx-pro-6000-max-q"),
        ("a6000", "rtx-a6000"),
        ("a10g", "a10g"),
        ("rx7900xtx", "rx-7900-xtx"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TITAN RTX", "titan-rtx"),
        ("CPU", "cpu"),
    ],
)
def test_a_card_is_found_by_what_people_call_it(typed, name):
    assert load_device(typed).name == name


@pytest.mark.parametrize(
    ("typed", "variants"),
    [
        ("a100", "a100-40gb a100-80gb"),
        ("NVIDIA A100", "a100-40gb a100-80gb"),
        ("h100", "h100-80gb h100-nvl h100-pcie"),
        ("v100", "v100-16gb v100-32gb"),
        ("gh200", "gh200-144gb gh200-96gb"),
        ("rtx 3060", "rtx-3060-12gb rtx-3060-8gb rtx-3060-laptop"),
        ("3080 laptop", "rtx-3080-laptop-16gb rtx-3080-laptop-8gb"),
        ("4060 ti", "rtx-4060-ti-16gb rtx-4060-ti-8gb"),
        (
            "rtx 6000",
            "quadro-rtx-6000 rtx-6000-ada rtx-pro-6000 rtx-pro-6000-max-q rtx-pro-6000-server",
        ),
        ("rtx 8000", "quadro-rtx-8000"),
    ],
)
def test_a_name_that_leaves_the_variant_open_lists_the_variants(typed, variants):
    with pytest.raises(AmbiguousDeviceError) as caught:
        load_device(typed)
    assert caught.value.variants == tuple(variants.split())
    assert all(name in str(caught.value) for name in caught.value.variants)
    assert "GiB" in str(caught.value)


def test_no_part_of_a_name_chooses_between_devices_of_other_memory():
    for name in device_names():
        shorter = name.rpartition("-")[0]
        alike = [each for each in device_names() if each.startswith(f"{shorter}-")]
        if not shorter or shorter in device_names() or len(alike) < 2:
            continue
        sizes = {load_device(each).memory_bytes for each in alike}
        try:
            found = load_device(shorter).memory_bytes
        except UnknownDeviceError:
            continue
        assert sizes == {found}, name


def test_no_two_devices_have_the_same_words():
    words = [words_of(name) for name in device_names()]
    assert all(words)
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("typed", ["titan", "titan v", "quadro p4000", "rtx 3090 48gb", "gtx 1080", "", "-", "gb"])  # fmt: skip
def test_a_card_that_is_not_there_is_not_taken_for_another(typed):
    with pytest.raises(UnknownDeviceError) as caught:
        load_device(typed)
    assert not isinstance(caught.value, AmbiguousDeviceError)
    assert "memfit devices --new" in str(caught.value)


def test_a_name_of_any_length_is_answered_in_one_short_line():
    with pytest.raises(UnknownDeviceError) as caught:
        load_device("rtx " * 5000)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("m3-max", "--device cpu --budget"),
        ("Apple M2 Ultra", "share the system's memory"),
        ("mps", "Apple"),
        ("gb10", "--device rtx-pro-6000"),
        ("arc a770", "Intel"),
        ("tpu-v5e", "XLA"),
        ("cuda:0", "memfit doctor"),
    ],
)
def test_what_is_left_out_on_purpose_says_why_and_what_to_do(typed, message):
    with pytest.raises(UnknownDeviceError, match=message) as caught:
        load_device(typed)
    assert "\n" not in str(caught.value)


def test_series_hold_every_device_once_in_the_order_in_which_people_count():
    titles = {name: load_device(name).title for name in device_names()}
    series = by_series(titles)
    assert sorted(name for names in series.values() for name in names) == list(device_names())
    assert series["Processor"] == ("cpu",)
    assert series["NVIDIA's data centres"][:2] == ("a2", "a10")
