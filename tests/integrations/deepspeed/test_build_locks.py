"""A lock that a killed build has left is named, before DeepSpeed waits for it without end."""

from __future__ import annotations

import warnings

import pytest

from memfit.errors import MemfitError, MemfitWarning
from memfit.integrations.deepspeed.starting import check_build_locks


@pytest.fixture
def lock(tmp_path):
    """Return the lock of a build that every engine on the CPU loads."""
    found = tmp_path / "builds" / "deepspeed_shm_comm" / "lock"
    found.parent.mkdir(parents=True)
    found.touch()
    return found


def check(lock, device="cpu", wait=lambda _: None, **options):
    check_build_locks(device, root=lock.parent.parent, wait=wait, **options)


def test_a_lock_that_nobody_holds_is_refused_with_the_command_that_helps(lock):
    with pytest.raises(MemfitError, match=f"rm {lock}"):
        check(lock)


def test_what_the_run_may_not_need_is_a_warning(lock):
    with pytest.warns(MemfitWarning, match="would wait for it without end"):
        check(lock, "cuda")


def test_a_build_that_goes_on_is_left_alone(lock):
    with lock.open(), warnings.catch_warnings():
        warnings.simplefilter("error")
        check(lock)


def test_a_build_that_ends_meanwhile_is_no_matter(lock):
    check(lock, wait=lambda _: lock.unlink())


def test_nothing_is_said_where_the_system_does_not_tell(lock, tmp_path):
    check(lock, processes=tmp_path / "missing")
