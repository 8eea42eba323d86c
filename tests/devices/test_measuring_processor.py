"""A processor's figures follow from what was timed, and take the place of the catalogue's."""

from __future__ import annotations

import json

import pytest

from memfit.cli.main import main
from memfit.devices.catalogue import catalogued_device, load_device
from memfit.devices.measuring_processor import PROCESSOR_STAGES, measure_processor
from memfit.units import MIB

CACHE, MEMORY, RATE, CALL = 40e9, 10e9, 50e9, 3e-6


class FakeProcessor:
    """A processor with 8 MiB of cache that multiplies bfloat16 a hundred times slower."""

    def product(self, width, dtype):
        return 2 * width**3 / (RATE / (100 if "16" in dtype else 1))

    def addition(self, num_bytes):
        return num_bytes / (CACHE if num_bytes <= 8 * MIB else MEMORY)

    def smallest_operator(self):
        return CALL

    def seconds(self, work, num_repeats):
        return work * num_repeats


def test_rates_are_what_was_done_by_the_time_it_took():
    values = measure_processor(FakeProcessor())
    assert values["cache_bytes"] == 8 * MIB
    assert values["cache_bandwidth_bytes_per_second"] == pytest.approx(CACHE)
    assert values["memory_bandwidth_bytes_per_second"] == pytest.approx(MEMORY)
    assert values["link_bytes_per_second"] == pytest.approx(MEMORY / 2)
    assert values["matrix_float32_flops_per_second"] == pytest.approx(RATE)
    assert values["matrix_bfloat16_flops_per_second"] == pytest.approx(RATE / 100)
    assert values["launch_seconds"] == pytest.approx(CALL)


def test_caches_that_a_step_has_no_use_for_are_left_out(monkeypatch):
    monkeypatch.setattr(FakeProcessor, "addition", lambda self, num_bytes: num_bytes / MEMORY)
    assert measure_processor(FakeProcessor())["cache_bytes"] == 0


def test_the_processor_is_measured_and_used_from_then_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MEMFIT_CONFIG_DIR", str(tmp_path))
    monkeypatch.setattr(
        "memfit.devices.measuring_processor.TorchProcessor", lambda torch: FakeProcessor()
    )
    monkeypatch.setattr(
        "memfit.measurement.class_shares.measure_class_shares", lambda device: {"copy_share": 0.5}
    )
    assert main(["calibrate", "--device", "cpu", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["device"], shown["path"]) == ("cpu", str(tmp_path / "devices" / "cpu.toml"))
    assert shown["facts"]["copy_share"]["value"] == 0.5
    assert "torch" in shown["facts"]["launch_seconds"]["source"]
    device = load_device("cpu")
    assert device.matrix_flops_per_second("float32") == pytest.approx(RATE)
    assert device.traffic_seconds(8 * MIB) == pytest.approx(8 * MIB / CACHE)
    assert device.memory_bytes == catalogued_device("cpu").memory_bytes


def test_a_dry_run_names_what_would_be_measured_of_a_processor(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MEMFIT_CONFIG_DIR", str(tmp_path))
    assert main(["calibrate", "--device", "cpu", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name, _ in PROCESSOR_STAGES)
    assert not list(tmp_path.iterdir())
