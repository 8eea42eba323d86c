"""The device catalogue: every figure has a source, and nothing misspelt slips in."""

from __future__ import annotations

import os
import re
import sys
from datetime import date
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.zoo.machines import machine_with

from memfit.devices import catalogue, detect
from memfit.devices.catalogue import (
    all_devices,
    catalogue_name,
    current_device_name,
    device_names,
    load_device,
)
from memfit.devices.detect import CudaDevice, host, host_memory_bytes
from memfit.devices.device_file import check_own_device, parse_device
from memfit.devices.facts import OPTIONAL_FACTS, REQUIRED_FACTS
from memfit.errors import DataError, UnknownDeviceError
from memfit.units import GIB

# fmt: off
PROMISED = (
    "rtx-2060-6gb", "rtx-2060-12gb", "rtx-2060-super", "rtx-2070", "rtx-2070-super", "rtx-2080",
    "rtx-2080-super", "rtx-2080-ti", "titan-rtx", "rtx-3050-8gb", "rtx-3060-8gb", "rtx-3060-12gb",
    "rtx-3060-ti", "rtx-3070", "rtx-3070-ti", "rtx-3080-10gb", "rtx-3080-12gb", "rtx-3080-ti",
    "rtx-3090", "rtx-3090-ti", "rtx-4060", "rtx-4060-ti-8gb", "rtx-4060-ti-16gb", "rtx-4070",
    "rtx-4070-super", "rtx-4070-ti", "rtx-4070-ti-super", "rtx-4080", "rtx-4080-super",
    "rtx-4090", "rtx-4090-laptop", "rtx-5060", "rtx-5060-ti-8gb", "rtx-5060-ti-16gb", "rtx-5070",
    "rtx-5070-ti", "rtx-5080", "rtx-5090", "rtx-3060-laptop", "rtx-3080-laptop-8gb",
    "rtx-3080-laptop-16gb", "rtx-4050-laptop", "rtx-4070-laptop", "rtx-4080-laptop",
    "rtx-5070-ti-laptop", "rtx-5090-laptop", "quadro-rtx-6000", "quadro-rtx-8000", "rtx-a4000",
    "rtx-a4500", "rtx-a5000", "rtx-a6000", "rtx-4000-ada", "rtx-4500-ada", "rtx-5000-ada",
    "rtx-6000-ada", "rtx-pro-4000", "rtx-pro-4500", "rtx-pro-6000", "p100-16gb", "v100-16gb",
    "v100-32gb", "t4", "a10", "a10g", "a30", "a40", "a100-40gb", "a100-80gb", "l4", "l40", "l40s",
    "h100-80gb", "h100-pcie", "h100-nvl", "h200", "h200-nvl", "b200", "gb200", "gh200-96gb",
    "gh200-144gb", "mi210", "mi250", "mi300x", "mi325x", "mi355x", "rx-7900-xtx", "rx-7900-xt",
    "rx-9070-xt", "w7900", "cpu",
)
# fmt: on


def data_text(name: str) -> str:
    return (resources.files("memfit.devices") / "data" / f"{name}.toml").read_text("utf-8")


@pytest.fixture
def fresh_catalogue():
    catalogue.catalogued_device.cache_clear()
    yield
    catalogue.catalogued_device.cache_clear()


def test_the_catalogue_holds_the_promised_devices():
    assert set(PROMISED) <= set(device_names())
    assert tuple(device.name for device in all_devices()) == tuple(sorted(device_names()))


@pytest.mark.parametrize("device", all_devices(), ids=lambda device: device.name)
def test_every_figure_has_a_positive_value_a_source_a_date_and_a_certainty(device):
    assert set(REQUIRED_FACTS) <= set(device.facts) <= {*REQUIRED_FACTS, *OPTIONAL_FACTS}
    for fact_name, fact in device.facts.items():
        assert fact.value > 0, fact_name
        assert len(fact.source) > 20, fact_name
        assert date.fromisoformat(fact.read_on) >= date(2026, 1, 1), fact_name
        assert fact.certainty in ("exact", "table", "guess"), fact_name
        says_guess = fact.source.startswith("Guess")
        if fact_name != "context_bytes":
            assert says_guess == (fact.certainty == "guess"), fact_name
        if "sparsity" in fact.source:
            assert "dense" in fact.source, fact_name


def test_every_card_has_what_a_users_own_file_must_have():
    for name in device_names():
        if name != "cpu":
            assert check_own_device(name, data_text(name)).name == name


def test_a_card_that_is_named_by_the_memory_on_its_box_has_that_memory():
    for device in all_devices():
        told = re.search(r"-(\d+)gb$", device.name)
        if told:
            assert device.title.endswith(f" {told[1]} GB"), device.name


def test_only_amds_cards_run_on_rocm_and_have_no_compute_capability():
    for device in all_devices():
        assert (device.platform == "rocm") == device.title.startswith("AMD"), device.name
        assert (device.platform == "cuda") == (device.compute_capability is not None), device.name


@pytest.mark.parametrize(
    ("name", "dtype", "flops_per_second"),
    [
        ("a100-80gb", "bfloat16", 312e12),
        ("a100-80gb", "tf32", 156e12),
        ("h100-80gb", "bfloat16", 989.4e12),
        ("h200", "float16", 989.4e12),
        ("l4", "float16", 121e12),
        ("rtx-4090", "bfloat16", 165.2e12),
        ("t4", "float16", 65e12),
    ],
)
def test_rates_are_the_dense_ones(name, dtype, flops_per_second):
    assert load_device(name).matrix_flops_per_second(dtype) == flops_per_second


def test_cards_before_ampere_have_neither_bfloat16_nor_tf32_rates():
    for device in all_devices():
        if device.platform != "cuda":
            continue
        is_old = float(device.compute_capability or 0) < 8
        for dtype in ("bfloat16", "tf32"):
            assert (f"matrix_{dtype}_flops_per_second" not in device.facts) == is_old, device.name
        if is_old:
            rates = {device.matrix_flops_per_second(dtype) for dtype in ("bfloat16", "float32")}
            assert len(rates) == 1


def test_rates_stand_in_the_order_of_their_widths():
    for device in all_devices():
        rates = [device.matrix_flops_per_second(dtype) for dtype in ("float64", "float32")]
        if "matrix_float16_flops_per_second" in device.facts:
            rates.append(device.matrix_flops_per_second("float16"))
        assert rates == sorted(rates), device.name


def test_usable_memory_is_below_the_nominal_memory_in_the_name():
    for device in all_devices():
        nominal = re.search(r"(\d+) GB$", device.title)
        if nominal:
            assert 0.88 < device.memory_bytes / (int(nominal[1]) * GIB) < 1.01, device.name


def test_names_are_kebab_case():
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in device_names())


def test_a_device_is_loaded_once():
    assert load_device("t4") is load_device("t4")


def test_a_card_may_be_named_with_its_memory():
    assert load_device("a10-24gb") is load_device("a10")
    for name in ("a10-48gb", "a10-gb", "-24gb", "a100-24gb"):
        with pytest.raises(UnknownDeviceError):
            load_device(name)


def test_an_unknown_device_is_refused_with_the_nearest_names():
    with pytest.raises(UnknownDeviceError, match="Nearest: a100-40gb"):
        load_device("a100-40")


def test_a_path_is_no_device_name():
    with pytest.raises(UnknownDeviceError):
        load_device("../data/t4")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[facts.memory_bytes]", "[facts.memory_byte]", "nearest is 'memory_bytes'"),
        ("title =", "titel =", "nearest is 'title'"),
        ("certainty =", "certainity =", "nearest is 'certainty'"),
        ('kind = "cuda"', "", "lacks kind"),
        ('kind = "cuda"', 'kind = "gpu"', "must be 'cpu' or 'cuda'"),
        ('certainty = "table"', 'certainty = "sure"', "must be one of exact, table, guess"),
        ('read_on = "2026', 'read_on = "26', "write a date as"),
        ("value = 320e9", 'value = "fast"', "must be a number"),
        ("value = 320e9", "value = true", "must be a number"),
        ("value = 320e9", "value = ", "not valid TOML"),
    ],
)
def test_a_malformed_file_is_refused_with_what_is_wrong(old, new, message):
    text = data_text("t4")
    assert old in text
    with pytest.raises(DataError, match=re.escape(message)):
        parse_device("t4", text.replace(old, new, 1))


def test_figures_that_are_missing_are_refused():
    with pytest.raises(DataError, match="must be a table"):
        parse_device("x", 'title = "X"\nkind = "cuda"\nfacts = 3\n')
    text = re.sub(r"\[facts\.launch_seconds\].*?(?=\n\[)", "", data_text("t4"), flags=re.DOTALL)
    with pytest.raises(DataError, match="facts lacks launch_seconds"):
        parse_device("t4", text)


def test_the_cpu_has_the_memory_of_this_machine():
    memory = load_device("cpu").facts["memory_bytes"]
    assert memory.value == host_memory_bytes()
    assert memory.certainty == "exact"


@pytest.mark.usefixtures("fresh_catalogue")
def test_a_system_that_does_not_tell_its_memory_gives_a_guess(monkeypatch):
    monkeypatch.setattr(catalogue, "host_memory_bytes", lambda: None)
    memory = load_device("cpu").facts["memory_bytes"]
    assert memory.value > 0
    assert memory.certainty == "guess"
    assert "budget" in memory.source


@pytest.mark.parametrize(
    ("limit", "memory_bytes"),
    [(f"{4096**2 // 2}\n", 4096**2 // 2), ("max\n", 4096**2), (None, None)],
    ids=["container", "container without a limit", "no such setting"],
)
def test_the_memory_is_that_of_the_machine_or_of_its_container(
    monkeypatch, tmp_path, limit, memory_bytes
):
    def pages(_: str) -> int:
        if limit is None:
            raise ValueError
        return 4096

    (tmp_path / "memory.max").write_text(limit or "max\n")
    files = (tmp_path / "absent", tmp_path / "memory.max")
    monkeypatch.setattr(detect, "_CONTAINER_LIMIT_FILES", files)
    monkeypatch.setattr(os, "sysconf", pages, raising=False)
    assert host_memory_bytes() == memory_bytes


def test_a_cuda_device_is_matched_by_its_exact_name():
    card = load_device("a100-40gb").memory_bytes
    assert catalogue_name(CudaDevice(name="NVIDIA A100-SXM4-40GB", memory_bytes=card)) == (
        "a100-40gb"
    )
    part = CudaDevice(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", memory_bytes=card)
    assert catalogue_name(part) is None
    assert catalogue_name(CudaDevice(name="A100", memory_bytes=card)) is None


def test_cards_that_share_a_name_are_told_apart_by_their_memory():
    name = "NVIDIA GeForce RTX 3060"
    assert catalogue_name(CudaDevice(name=name, memory_bytes=12 * GIB)) == "rtx-3060-12gb"
    assert catalogue_name(CudaDevice(name=name, memory_bytes=8 * GIB)) == "rtx-3060-8gb"
    assert catalogue_name(CudaDevice(name=name, memory_bytes=6 * GIB)) is None


def test_a_card_with_the_memory_and_the_names_of_another_is_not_taken_for_it():
    for device in all_devices():
        for name in catalogue._cuda_names(device.name):
            card = CudaDevice(name=name, memory_bytes=device.memory_bytes)
            assert catalogue_name(card) == device.name


def test_a_driver_that_reports_a_little_less_memory_still_matches():
    ecc_bytes = int(44.43 * GIB)
    card = CudaDevice(name="NVIDIA RTX 6000 Ada Generation", memory_bytes=ecc_bytes)
    assert catalogue_name(card) == "rtx-6000-ada"


def test_every_cuda_device_of_the_catalogue_can_be_found_by_a_driver_name():
    names = catalogue._names_by_cuda_name()
    found = {name for matches in names.values() for name in matches}
    assert found == {device.name for device in all_devices() if device.kind == "cuda"}
    assert all(len(set(matches)) == len(matches) for matches in names.values())


def test_the_current_device_is_the_cpu_without_a_cuda_device():
    assert current_device_name(machine_with()) == "cpu"


def test_the_current_device_is_the_first_cuda_device():
    t4 = CudaDevice(name="Tesla T4", memory_bytes=load_device("t4").memory_bytes)
    l4 = CudaDevice(name="NVIDIA L4", memory_bytes=load_device("l4").memory_bytes)
    assert current_device_name(machine_with(l4, t4)) == "l4"


def test_a_cuda_device_outside_the_catalogue_is_an_error_and_not_the_cpu():
    with pytest.raises(UnknownDeviceError, match="Unheard Of 9000"):
        current_device_name(machine_with(CudaDevice(name="Unheard Of 9000", memory_bytes=GIB)))


def test_the_host_names_its_cuda_devices(monkeypatch):
    cards = [SimpleNamespace(name="Tesla T4", total_memory=15 * GIB)] * 2
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(cards),
        get_device_properties=cards.__getitem__,
    )
    with monkeypatch.context() as patch:  # what is done after a test imports torch
        patch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.11.0", cuda=cuda))
        found = host()
    assert found.torch_version == "2.11.0"
    assert found.cuda_devices == (CudaDevice(name="Tesla T4", memory_bytes=15 * GIB),) * 2
    assert found.num_cpus >= 1


def test_a_host_without_torch_says_why_and_does_not_raise(monkeypatch):
    with monkeypatch.context() as patch:  # what is done after a test imports torch
        patch.setitem(sys.modules, "torch", None)
        found = host()
    assert found.torch_version is None
    assert "torch" in (found.torch_problem or "")
    assert found.cuda_devices == ()


def test_the_devices_package_imports_nothing_itself():
    source = Path(detect.__file__).with_name("__init__.py").read_text("utf-8")
    assert "import" not in source


def test_free_memory_is_what_the_tightest_limit_leaves(monkeypatch):
    monkeypatch.setattr(detect, "_free_bytes", lambda: 900)
    limits = [(detect.Path("memory.max"),), (detect.Path("memory.current"),)]
    monkeypatch.setattr(detect, "_CONTAINER_LIMIT_FILES", limits[0])
    monkeypatch.setattr(detect, "_CONTAINER_USAGE_FILES", limits[1])
    monkeypatch.setattr(
        detect, "_limit_bytes", lambda path: {"memory.max": 700, "memory.current": 300}[path.name]
    )
    assert detect.free_memory_bytes() == 400
