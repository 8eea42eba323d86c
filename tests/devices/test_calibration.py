"""A card is measured in order, its figures are kept whole, and they replace the catalogue's."""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import os
import re
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tests.zoo.machines import machine_with

from memfit.cli.calibrate import CalibrateCommand
from memfit.cli.devices import format_fact
from memfit.cli.main import command_parser, main
from memfit.devices import calibration, measuring
from memfit.devices.calibration import (
    CardIdentity,
    as_facts,
    calibration_path,
    configuration_folder,
    read_calibration,
    write_calibration,
)
from memfit.devices.catalogue import catalogue_name, catalogued_device, load_device
from memfit.devices.detect import CudaDevice
from memfit.devices.measuring import STAGES, measure_card
from memfit.devices.occupancy import ManagedCard
from memfit.errors import DataError, DeviceUnavailableError, UnknownDeviceError, UsageError
from memfit.units import GIB, MIB

T4_BYTES = 15633219584
H200_BYTES = 150109880320
CONTEXT = {"init": 100 * MIB, "cublas": 130 * MIB, "cudnn": 150 * MIB}
WORKSPACE_BYTES = 32 * MIB
LT_BYTES = MIB
BANDWIDTH, LINK, FLOPS, LAUNCH = 4e12, 50e9, 1e14, 4e-6
RESERVED_EXTRA = 7 * MIB


@dataclass
class FakeCard:
    """A card whose figures are known, and which loads its libraries as they are first used."""

    capability: tuple[int, int] = (9, 0)
    memory_bytes: int = H200_BYTES
    driver_name: str = "NVIDIA H200"
    loaded: str = ""
    workspace_bytes: int = 0
    order: list[str] = field(default_factory=list)

    def identity(self):
        return CardIdentity(
            driver_name=self.driver_name,
            memory_bytes=self.memory_bytes,
            num_multiprocessors=132,
            compute_capability=self.capability,
            torch_version="2.11.0+cu130",
            cuda_version="13.0",
            driver_version="580.1",
        )

    def start(self):
        assert not self.loaded
        self.load("init")

    def load(self, stage):
        stages = ["", *CONTEXT]
        self.loaded = max(self.loaded, stage, key=stages.index)
        self.order.append(stage)

    def occupied_bytes(self):
        return CONTEXT[self.loaded] + self.reserved_bytes()

    def allocated_bytes(self):
        return MIB + self.workspace_bytes

    def reserved_bytes(self):
        return self.allocated_bytes() + RESERVED_EXTRA

    def peak_bytes(self, work):
        work()
        return self.allocated_bytes() + 256 * 256 * 4 + LT_BYTES

    def product(self, width, dtype):
        def multiply():
            self.load("cublas")
            self.workspace_bytes = WORKSPACE_BYTES

        multiply.seconds = 2 * width**3 / FLOPS
        self.order.append(dtype)
        return multiply

    def product_with_bias(self, width):
        return lambda: self.load("cublas")

    def convolution(self):
        return lambda: self.load("cudnn")

    def copy(self, num_bytes):
        return timed(2 * num_bytes / BANDWIDTH)

    def copy_from_host(self, num_bytes):
        return timed(num_bytes / LINK)

    def smallest_operator(self):
        return timed(LAUNCH)

    def seconds(self, work, num_repeats):
        return work.seconds * num_repeats

    def release(self):
        self.order.append("release")


def timed(seconds):
    def work():
        pass

    work.seconds = seconds
    return work


H200 = CudaDevice(name="NVIDIA H200", memory_bytes=H200_BYTES)
T4 = CudaDevice(name="Tesla T4", memory_bytes=T4_BYTES)
MI300X = CudaDevice(name="AMD Instinct MI300X", memory_bytes=192 * GIB)


@pytest.fixture(autouse=True)
def config_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path / "config"


def calibrate(*words, cards=(H200,), card=None):
    """Run the command on fakes; gives the exit code, the text and the indexes that were opened."""
    opened = []

    def open_card(index):
        opened.append(index)
        return card or FakeCard()

    command = CalibrateCommand(lambda: machine_with(*cards), open_card)
    text = io.StringIO()
    console = Console(file=text, width=80, highlight=False)
    args = command_parser("calibrate", command).parse_args(words)
    assert isinstance(args, argparse.Namespace)
    return command.run(args, console), text.getvalue(), opened


# --- measuring -------------------------------------------------------------------------------------


def test_every_figure_follows_from_the_readings():
    values = measure_card(FakeCard())
    expected = {
        "memory_bytes": H200_BYTES,
        "num_multiprocessors": 132,
        "context_after_init_bytes": CONTEXT["init"],
        "context_after_cublas_bytes": CONTEXT["cublas"],
        "context_bytes": CONTEXT["cudnn"],
        "cublas_workspace_bytes": WORKSPACE_BYTES,
        "cublaslt_workspace_bytes": LT_BYTES,
        "memory_bandwidth_bytes_per_second": BANDWIDTH,
        "link_bytes_per_second": LINK,
        "launch_seconds": LAUNCH,
    } | {f"matrix_{rate}_flops_per_second": FLOPS for rate in RATES}
    assert values == pytest.approx(expected)


RATES = ("float32", "tf32", "float16", "bfloat16")


def test_the_libraries_are_loaded_one_after_another():
    card = FakeCard()
    measure_card(card)
    loads = [each for each in card.order if each in CONTEXT]
    assert list(dict.fromkeys(loads)) == ["init", "cublas", "cudnn"]


@pytest.mark.parametrize(
    ("capability", "missing"),
    [((9, 0), set()), ((7, 5), {"tf32", "bfloat16"}), ((6, 1), {"tf32", "bfloat16", "float16"})],
)
def test_a_rate_is_measured_only_where_the_card_has_the_dtype(capability, missing):
    values = measure_card(FakeCard(capability=capability))
    rates = {rate for rate in RATES if f"matrix_{rate}_flops_per_second" in values}
    assert rates == set(RATES) - missing


def test_every_announced_measurement_is_made():
    values = measure_card(FakeCard())
    for name, _ in STAGES:
        pattern = re.escape(name).replace("<dtype>", r"\w+")
        assert any(re.fullmatch(pattern, each) for each in values), name


class ProcessorAsCard:
    """Torch whose one card is the processor: the work is real, the counters are not."""

    version = SimpleNamespace(cuda="13.0")

    def __init__(self):
        properties = SimpleNamespace(
            name="NVIDIA H200", total_memory=GIB, multi_processor_count=132, major=9, minor=0
        )
        self.num_waits = self.num_products = 0
        self.cuda = SimpleNamespace(
            get_device_properties=lambda index: properties,
            init=lambda: None,
            set_device=lambda device: None,
            synchronize=self.wait,
            mem_get_info=lambda device: (GIB // 2, GIB),
            memory_allocated=lambda device: 0,
            memory_reserved=lambda device: 0,
            max_memory_allocated=lambda device: 0,
            reset_peak_memory_stats=lambda device: None,
            empty_cache=lambda: None,
        )

    def wait(self, device):
        self.num_waits += 1

    def device(self, kind, index):
        assert kind == "cuda"
        return torch.device("cpu")

    def mm(self, left, right, *, out):
        self.num_products += 1
        return torch.mm(left, right, out=out)

    def zeros(self, *shape, pin_memory=False, **options):
        return torch.zeros(*shape, **options)

    def __getattr__(self, name):
        return getattr(torch, name)


def test_the_work_of_the_real_card_is_work_that_torch_can_do(monkeypatch):
    for name, value in {"_SMALL_WIDTH": 32, "_COPY_BYTES": 4096, "_ROUND_SECONDS": 1e-4}.items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr(measuring, "_NUM_LAUNCHES", 10)
    monkeypatch.setattr(measuring.ManagedCard, "find", lambda uuid: None)
    fake = ProcessorAsCard()
    before = torch.backends.cuda.matmul.fp32_precision
    values = measure_card(measuring.TorchCard(fake))
    assert values["context_bytes"] == GIB // 2
    assert {f"matrix_{rate}_flops_per_second" for rate in RATES} <= set(values)
    assert all(value > 0 for name, value in values.items() if name.endswith("per_second"))
    assert fake.num_waits > 50
    assert fake.num_products > 3 * len(RATES)
    assert torch.backends.cuda.matmul.fp32_precision == before


# --- storing ---------------------------------------------------------------------------------------


def test_stored_figures_are_read_back_as_they_were(tmp_path):
    facts = as_facts(measure_card(FakeCard()), FakeCard().identity(), date(2026, 11, 21))
    write_calibration(tmp_path / "deep" / "h200.toml", facts)
    assert read_calibration(tmp_path / "deep" / "h200.toml") == facts
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["h200.toml"]


def test_a_figure_says_with_what_it_was_measured():
    facts = as_facts({"context_bytes": 5.0}, FakeCard().identity(), date(2026, 11, 21))
    fact = facts["context_bytes"]
    assert fact.source == (
        "measured by memfit calibrate on NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0, driver 580.1"
    )
    assert (fact.read_on, fact.certainty) == ("2026-11-21", "exact")
    assert isinstance(fact.value, int)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MEMFIT_CONFIG_DIR": "/a", "XDG_CONFIG_HOME": "/b"}, "/a"),
        ({"XDG_CONFIG_HOME": "/b"}, "/b/memfit"),
        ({"MEMFIT_CONFIG_DIR": "", "XDG_CONFIG_HOME": ""}, "~/.config/memfit"),
    ],
)
def test_the_configuration_folder_is_found_in_order(environment, expected):
    assert configuration_folder(environment) == Path(expected).expanduser()


def test_without_a_home_folder_nothing_is_stored_and_nothing_breaks(monkeypatch):
    def refuse():
        raise RuntimeError

    monkeypatch.setattr(Path, "home", refuse)
    monkeypatch.delenv("MEMFIT_CONFIG_DIR")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert calibration_path("t4") is None
    assert load_device("t4") is catalogued_device("t4")
    with pytest.raises(UsageError, match="MEMFIT_CONFIG_DIR"):
        calibrate()


# --- merging ---------------------------------------------------------------------------------------


def store(name, **values):
    path = calibration_path(name)
    write_calibration(path, as_facts(values, FakeCard().identity(), date(2026, 11, 21)))
    return path


def test_a_stored_figure_takes_the_place_of_the_catalogues():
    before = load_device("h200")
    store("h200", context_bytes=123, cublas_workspace_bytes=45)
    device = load_device("h200")
    assert device.value("context_bytes") == 123
    assert device.facts["context_bytes"].certainty == "exact"
    assert device.value("cublas_workspace_bytes") == 45
    assert device.value("launch_seconds") == before.value("launch_seconds")
    assert load_device("h100-80gb").facts["context_bytes"].certainty != "exact"


def test_a_device_is_loaded_once_and_again_after_its_file_has_changed():
    store("h200", context_bytes=1)
    first = load_device("h200")
    assert load_device("h200") is first
    path = store("h200", context_bytes=2)
    assert load_device("h200").value("context_bytes") == 2
    path.unlink()
    assert load_device("h200") is catalogued_device("h200")


def test_another_configuration_folder_has_its_own_figures(monkeypatch, tmp_path):
    store("h200", context_bytes=1)
    assert load_device("h200").value("context_bytes") == 1
    monkeypatch.setenv("MEMFIT_CONFIG_DIR", str(tmp_path / "other"))
    assert load_device("h200") is catalogued_device("h200")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[facts", "not valid TOML"),
        ("", "lacks facts"),
        ("facts = 3", "must be a table"),
        ("[facts.context_byte]\nvalue = 1\n", "nearest is 'context_bytes'"),
        ("[facts.context_bytes]\nvalue = 1\n", "lacks source"),
        ("value", "not valid TOML"),
        (b"\xff\xfe", "cannot be read"),
        (calibration.calibration_text(as_facts({"launch_seconds": 1.5}, FakeCard().identity(), date(2026, 1, 1))).replace("1.5", "9" * 400), "above zero"),
        (calibration.calibration_text(as_facts({"launch_seconds": 0}, FakeCard().identity(), date(2026, 1, 1))), "above zero"),
        (calibration.calibration_text(as_facts({"launch_seconds": float("nan")}, FakeCard().identity(), date(2026, 1, 1))), "above zero"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_named_with_two_ways_out(text, message):
    path = calibration_path("t4")
    path.parent.mkdir(parents=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        load_device("t4")
    assert str(caught.value).startswith(f"{path}: ")
    assert f"Delete {path}, or run `memfit calibrate` again" in str(caught.value)


def test_a_malformed_file_does_not_stop_the_next_calibration():
    path = store("h200", context_bytes=1)
    path.write_text("broken")
    assert catalogue_name(H200) == "h200"
    code, _, _ = calibrate()
    assert code == 0
    assert load_device("h200").value("context_bytes") == CONTEXT["cudnn"]


# --- the command -----------------------------------------------------------------------------------


def test_the_command_measures_stores_and_shows_both_figures(config_folder):
    code, text, opened = calibrate()
    assert (code, opened) == (0, [0])
    assert (config_folder / "devices" / "h200.toml").is_file()
    assert load_device("h200").value("launch_seconds") == pytest.approx(LAUNCH)
    assert "758.0 MiB" in text  # what the catalogue says
    assert "150.0 MiB" in text
    assert str(config_folder) in text.replace("\n", "")


def test_the_json_holds_the_figures_that_were_stored(capsys):
    calibrate("--json")
    shown = json.loads(capsys.readouterr().out)
    assert shown["device"] == "h200"
    stored = read_calibration(Path(shown["path"]))
    assert {name: fact["value"] for name, fact in shown["facts"].items()} == {
        name: fact.value for name, fact in stored.items()
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dry_run_names_measurements_and_file_and_touches_nothing(config_folder, capsys, as_json):
    words = ("--dry-run", "--json") if as_json else ("--dry-run",)
    code, text, opened = calibrate(*words)
    text += capsys.readouterr().out
    assert (code, opened) == (0, [])
    assert "cublas_workspace_bytes" in text
    assert str(config_folder / "devices" / "h200.toml") in text
    assert not config_folder.exists()


def test_a_card_is_chosen_by_its_name():
    card = FakeCard(capability=(7, 5), memory_bytes=T4_BYTES, driver_name="Tesla T4")
    _, _, opened = calibrate("--device", "tesla T4", cards=(H200, T4), card=card)
    assert opened == [1]
    assert calibration_path("t4").is_file()
    assert not calibration_path("h200").exists()


@pytest.mark.parametrize(
    ("words", "cards", "error", "message"),
    [
        ((), (), DeviceUnavailableError, "finds no CUDA device"),
        (("--dry-run",), (), DeviceUnavailableError, "finds no CUDA device"),
        (("--device", "h200"), (), DeviceUnavailableError, "h200 is not in this machine"),
        (("--device", "h200"), (T4,), DeviceUnavailableError, "there is: Tesla T4"),
        (("--device", "mi210"), (T4,), UsageError, "Only CUDA cards"),
        (("--device", "mi300x"), (T4,), UsageError, "no measurement was tried"),
        ((), (MI300X,), UsageError, "not mi300x"),
        (("--device", "my-card.toml"), (T4,), UsageError, "a file of your own"),
        (("--device", "h20"), (T4,), UnknownDeviceError, "Nearest: h200"),
        ((), (CudaDevice(name="New 1", memory_bytes=GIB),), UnknownDeviceError, "New 1"),
    ],
)
def test_a_card_that_cannot_be_measured_is_refused(words, cards, error, message):
    with pytest.raises(error, match=re.escape(message)):
        calibrate(*words, cards=cards)


def test_without_a_card_the_program_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr("memfit.devices.detect._cuda_devices", lambda torch: ())
    assert main(["calibrate"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("num_multiprocessors", 132, "132"), ("launch_seconds", 4e-6, "4 us")],
)
def test_a_count_is_shown_without_a_unit(name, value, shown):
    assert format_fact(name, value) == shown


# --- what a process occupies -----------------------------------------------------------------------


class FakeLibrary:
    """The functions of NVML, with one card."""

    def __init__(self, *, pid=None, num_cards=1):
        self.pid, self.num_cards, self.asked_uuid = pid, num_cards, None

    def nvmlInit_v2(self):  # noqa: N802
        return 0

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        count._obj.value = self.num_cards
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, text, handle):  # noqa: N802
        self.asked_uuid = text
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, info):  # noqa: N802
        info._obj.used = 4 * GIB
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle, count, found):  # noqa: N802
        count._obj.value = 1
        found[0].pid, found[0].used_bytes = self.pid or 1, GIB
        return 0

    def nvmlSystemGetDriverVersion(self, text, length):  # noqa: N802
        ctypes.memmove(text, b"580.1\0", 6)
        return 0


def test_a_process_that_the_driver_sees_is_read_by_itself():
    card = ManagedCard.find(library=FakeLibrary(pid=os.getpid()))
    assert card.occupancy().process_bytes == GIB
    assert card.occupancy().card_bytes == 4 * GIB
    assert card.driver_version() == "580.1"


def test_a_process_that_the_driver_does_not_see_has_no_reading_of_its_own():
    card = ManagedCard.find(library=FakeLibrary(pid=os.getpid() + 1))
    assert card.occupancy().process_bytes is None


def test_a_card_is_found_by_its_identifier_or_as_the_only_one():
    library = FakeLibrary(num_cards=2)
    assert ManagedCard.find(library=library) is None
    assert ManagedCard.find("1234-5", library) is not None
    assert library.asked_uuid == b"GPU-1234-5"
