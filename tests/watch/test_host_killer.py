"""The signs of the host's out-of-memory killer are read where Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.units import MIB
from memfit.watch.host_killer import HostKillerSigns, LastSample

MEMINFO = "MemTotal:       1024000 kB\nMemAvailable:    {} kB\nHugePages_Total:       0\n"
VERSION_2 = ("0::/user/job", "sys/fs/cgroup/user/job", "memory.events", "memory.max")
VERSION_1 = (
    "12:cpu,cpuacct:/\n4:memory:/user/job\n0::/",
    "sys/fs/cgroup/memory/user/job",
    "memory.oom_control",
    "memory.limit_in_bytes",
)
each_version = pytest.mark.parametrize("version", [VERSION_1, VERSION_2], ids=["v1", "v2"])


class Host:
    """A made-up root of a system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/vmstat", "nr_free_pages 5\noom_kill 3\n")
        self.write("proc/meminfo", MEMINFO.format(800_000))
        self.write("dev/kmsg", "6,1,1,-;Killed process 77 (old)\n")

    def write(self, name: str, text: str, mode: str = "w") -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode) as file:
            file.write(text)


@pytest.fixture
def host(tmp_path) -> Host:
    return Host(tmp_path)


def sample(resident_bytes=MIB, available_bytes=None) -> LastSample:
    return LastSample(
        process_ids=frozenset({77}), resident_bytes=resident_bytes, available_bytes=available_bytes
    )


def found_after(host: Host, change, last=None) -> tuple[str, ...]:
    signs = HostKillerSigns(host.root)
    try:
        change()
        return signs.found(last or sample())
    finally:
        signs.close()


def test_where_nothing_has_changed_there_is_no_sign(host):
    assert found_after(host, lambda: None) == ()


def test_the_hosts_counter_that_grows_is_a_sign(host):
    found = found_after(host, lambda: host.write("proc/vmstat", "oom_kill 4\n"))
    assert found == ("oom_kill in /proc/vmstat grew from 3 to 4",)


@each_version
@pytest.mark.parametrize("level", ["", "/.."], ids=["own", "above"])
def test_the_counter_of_a_control_group_that_grows_is_a_sign(host, version, level):
    membership, folder, counter, _ = version
    host.write("proc/self/cgroup", membership)
    name = f"{Path(folder).parent if level else folder}/{counter}"
    host.write(f"{folder}/present", "")
    host.write(name, "low 0\noom 9\noom_kill 1\n")
    found = found_after(host, lambda: host.write(name, "low 0\noom 10\noom_kill 2\n"))
    assert found == (f"oom_kill in /{name} grew from 1 to 2",)


@each_version
def test_memory_near_the_limit_of_a_control_group_is_a_sign(host, version):
    membership, folder, _, limit = version
    host.write("proc/self/cgroup", membership)
    host.write(f"{folder}/{limit}", f"{100 * MIB}\n")
    (found,) = found_after(host, lambda: None, sample(95 * MIB))
    assert found == "95.0 MiB were resident at the last look, of 100.0 MiB in the control group"
    assert found_after(host, lambda: None, sample(80 * MIB)) == ()


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n"])
def test_no_limit_is_not_a_limit(host, text):
    host.write("proc/self/cgroup", "0::/")
    host.write("sys/fs/cgroup/memory.max", text)
    assert found_after(host, lambda: None, sample(500 * MIB)) == ()
    (found,) = found_after(host, lambda: None, sample(990 * MIB))
    assert found.endswith("of 1,000.0 MiB on the host")


def test_a_host_with_nothing_left_is_a_sign(host):
    assert found_after(host, lambda: None, sample(available_bytes=100 * MIB)) == ()
    (found,) = found_after(host, lambda: None, sample(available_bytes=20 * MIB))
    assert found == "the host had 20.0 MiB left at the last look"
    assert HostKillerSigns(host.root).available_bytes() == 800_000 * 1024


def test_the_kernels_log_counts_from_the_beginning_of_the_command_for_its_processes(host):
    line = "3,9,9,-;Out of memory: Killed process {} (python) total-vm:9kB\n"
    others = found_after(host, lambda: host.write("dev/kmsg", line.format(78), "a"))
    assert others == ()
    (found,) = found_after(host, lambda: host.write("dev/kmsg", line.format(77), "a"))
    assert found == "the kernel's log has: Killed process 77 (python) total-vm:9kB"


def test_a_system_that_tells_nothing_has_no_signs(tmp_path):
    signs = HostKillerSigns(tmp_path)
    assert signs.found(sample(available_bytes=1)) == ()
    assert signs.available_bytes() is None
    signs.close()


def test_this_system_can_be_asked():
    signs = HostKillerSigns()
    assert signs.available_bytes() > MIB
    assert all("oom_kill" not in sign for sign in signs.found(sample()))
    signs.close()
