"""The text of PYTORCH_ALLOC_CONF means what PyTorch takes it to mean, or is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.allocator.settings import NUM_INTERVALS, AllocatorSettings
from memfit.errors import UsageError
from memfit.units import GIB, MIB


def test_an_empty_text_gives_the_defaults() -> None:
    settings = AllocatorSettings.parse("")

    assert settings == AllocatorSettings()
    assert not settings.expandable_segments
    assert settings.max_split_size_bytes is None
    assert settings.large_segment_bytes == settings.max_non_split_rounding_bytes == 20 * MIB
    assert settings.garbage_collection_threshold == 0.0
    assert settings.per_process_memory_fraction is None
    assert settings.divisions() == (0,) * NUM_INTERVALS


def test_every_modelled_key_is_read_with_spaces_anywhere() -> None:
    settings = AllocatorSettings.parse(
        " expandable_segments : True, max_split_size_mb:128,max_non_split_rounding_mb:32,"
        "garbage_collection_threshold:0.6,large_segment_size_mb:24,"
        "roundup_power2_divisions: [256:1, 512:2, >:4],per_process_memory_fraction:0.9,"
    )

    assert settings.expandable_segments
    assert settings.max_split_size_bytes == 128 * MIB
    assert settings.max_non_split_rounding_bytes == 32 * MIB
    assert settings.garbage_collection_threshold == 0.6
    assert settings.large_segment_bytes == 24 * MIB
    assert settings.per_process_memory_fraction == 0.9
    assert settings.divisions()[8:11] == (1, 2, 4)


# Read from libc10 of torch 2.13.0, AcceleratorAllocatorConfig::roundup_power2_divisions, after
# the same text was set.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", [8] * 16),
        ("[256:1,512:2,>:4]", [1] * 9 + [2] + [4] * 6),
        ("[64:8,256:4,1024:4,>:1]", [8] * 7 + [0, 4, 0, 4, 1, 1, 1, 1, 1]),
        ("[>:4]", [0] + [4] * 15),
        ("[65536:4]", [4] * 16),
        ("[512:2,64:4,>:1]", [2] * 6 + [4] + [1] * 9),
        ("[128:0,256:2]", [0] * 8 + [2] + [0] * 7),
    ],
)
def test_divisions_cover_the_intervals_that_pytorch_gives_them(text, expected) -> None:
    settings = AllocatorSettings.parse(f"roundup_power2_divisions:{text}")

    assert list(settings.divisions()) == expected


def test_the_rounding_tolerance_follows_the_segment_size_unless_it_is_given() -> None:
    follows = AllocatorSettings.parse("large_segment_size_mb:12,max_split_size_mb:13")
    given_too = AllocatorSettings.parse("max_non_split_rounding_mb:30,large_segment_size_mb:12")

    assert follows.max_non_split_rounding_bytes == 12 * MIB
    assert given_too.max_non_split_rounding_bytes == 30 * MIB


@pytest.mark.parametrize(
    "text",
    [
        "backend:native",
        "pinned_use_background_threads:True",
        "release_lock_on_cudamalloc:True,throw_on_cudamalloc_oom:True",
        "graph_capture_record_stream_reuse:True",
    ],
)
def test_keys_of_other_matters_change_nothing(text) -> None:
    assert AllocatorSettings.parse(text) == AllocatorSettings()


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(UsageError, match=r"'max_split_mb'.*Nearest: max_split_size_mb\."):
        AllocatorSettings.parse("expandable_segments:True,max_split_mb:128")


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("expandable_segments:true", "True or False"),
        ("max_split_size_mb:64MB", "whole number of MiB"),
        ("max_split_size_mb:19", "large_segment_bytes"),
        ("max_non_split_rounding_mb:19", "large_segment_bytes"),
        ("large_segment_size_mb:10", "> 10 MiB"),
        ("garbage_collection_threshold:1.0", r"in \(0, 1\)"),
        ("garbage_collection_threshold:0", r"in \(0, 1\)"),
        ("garbage_collection_threshold:high", "number from 0 to 1"),
        ("per_process_memory_fraction:1.5", r"in \(0, 1\]"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:0", "power of two"),
        ("roundup_power2_divisions:[100:2]", "power of two in MiB"),
        ("roundup_power2_divisions:[128:x]", "whole numbers"),
        ("backend:cudaMallocAsync", "native"),
        ("expandable_segments", "key:value"),
        ("expandable_segments:True;max_split_size_mb:64", "key:value"),
        ("roundup_power2_divisions:[1:2", "key:value"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_what_is_needed(text, needed) -> None:
    with pytest.raises(UsageError, match=needed):
        AllocatorSettings.parse(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"large_segment_bytes": 10 * MIB},
        {"max_split_size_bytes": 20 * MIB - 1},
        {"max_non_split_rounding_bytes": MIB},
        {"garbage_collection_threshold": 1.0},
        {"garbage_collection_threshold": -0.1},
        {"per_process_memory_fraction": 0.0},
        {"roundup_power2_divisions": 6},
        {"roundup_power2_divisions": {3 * MIB: 2}},
        {"roundup_power2_divisions": {64 * GIB: 2}},
        {"roundup_power2_divisions": {512: 2}},
    ],
)
def test_fields_outside_what_pytorch_accepts_are_refused(fields) -> None:
    with pytest.raises(UsageError, match=next(iter(fields))):
        AllocatorSettings(**fields)


@given(st.integers(20, 4096), st.booleans(), st.sampled_from([1, 2, 4, 8, 16]), st.integers(11, 20))
def test_what_is_written_out_is_read_back(split_mib, expandable, divisions, segment_mib) -> None:
    settings = AllocatorSettings.parse(
        f"max_split_size_mb:{split_mib},expandable_segments:{expandable},"
        f"roundup_power2_divisions:{divisions},large_segment_size_mb:{segment_mib}"
    )

    assert settings == AllocatorSettings(
        max_split_size_bytes=split_mib * MIB,
        expandable_segments=expandable,
        roundup_power2_divisions=divisions,
        large_segment_bytes=segment_mib * MIB,
        max_non_split_rounding_bytes=segment_mib * MIB,
    )
