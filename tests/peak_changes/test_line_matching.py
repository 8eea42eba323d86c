"""Lines of two versions are paired by file, function and text; their numbers say nothing."""

from __future__ import annotations

from collections import Counter

from memfit.peak_changes.comparison import Pair, matched
from memfit.peak_changes.moments import KnownLine


def known(*rows: tuple[str, str, str]) -> list[KnownLine]:
    return [KnownLine(source_line=line, function=name, code=code) for line, name, code in rows]


def pairs(before: list[KnownLine], after: list[KnownLine]) -> list[tuple[str, str]]:
    """Return the names of the lines in each pair, empty where there is none."""
    found: list[Pair] = matched(before, after, {}, {})
    return [tuple("" if side is None else side.source_line for side in pair) for pair in found]


def test_a_line_that_moved_is_the_same() -> None:
    before = known(("app/net.py:9", "Net.forward", "x = self.fc(x)"))
    after = known(("app/net.py:12", "Net.forward", "x = self.fc(x)"))

    assert pairs(before, after) == [("app/net.py:9", "app/net.py:12")]


def test_one_text_in_two_functions_is_two_lines() -> None:
    before = known(("app/net.py:9", "A.forward", "x = self.fc(x)"))
    after = known(
        ("app/net.py:9", "B.forward", "x = self.fc(x)"),
        ("app/net.py:19", "A.forward", "x = self.fc(x)"),
    )

    assert ("app/net.py:9", "app/net.py:19") in pairs(before, after)
    assert ("", "app/net.py:9") in pairs(before, after)


def test_lines_that_read_the_same_in_one_function_are_counted_together() -> None:
    before = known(("app/net.py:9", "Net.forward", "x = F.relu(x)"))
    after = known(
        ("app/net.py:9", "Net.forward", "x = F.relu(x)"),
        ("app/net.py:11", "Net.forward", "x = F.relu(x)"),
    )
    kept = ("net", "saved activations")
    held = {name: Counter({kept: 64}) for name in ("app/net.py:9", "app/net.py:11")}
    ((one, other),) = matched(before, after, {"app/net.py:9": held["app/net.py:9"]}, held)

    assert one is not None
    assert other is not None
    assert other.source_line == "app/net.py:9, 11"
    assert (one.held[kept], other.held[kept]) == (64, 128)


def test_copies_of_a_repository_are_in_folders_of_other_names() -> None:
    before = known(("base/net.py:9", "Net.forward", "x = self.fc(x)"))
    after = known(("head/net.py:9", "Net.forward", "x = self.fc(x)"))

    assert pairs(before, after) == [("base/net.py:9", "head/net.py:9")]


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    rows = [(f"{folder}/layers.py:3", "forward", "return x + y") for folder in ("enc", "dec")]
    before, after = known(*rows), known(*reversed(rows))

    assert set(pairs(before, after)) == {(line, line) for line, _, _ in rows}


def test_an_edited_line_is_paired_with_what_it_was() -> None:
    before = known(
        ("app/net.py:9", "Net.forward", "hidden = self.act(self.fc(x))"),
        ("app/net.py:10", "Net.forward", "y = x.sum()"),
    )
    after = known(
        ("app/net.py:9", "Net.forward", "h = self.act(self.fc(x))"),
        ("app/net.py:10", "Net.forward", "z = torch.fft.fft(mask)"),
    )

    assert ("app/net.py:9", "app/net.py:9") in pairs(before, after)
    assert {("app/net.py:10", ""), ("", "app/net.py:10")} < set(pairs(before, after))


def test_code_that_was_moved_to_another_function_is_the_same() -> None:
    code = "scores = query @ key.transpose(-2, -1)"
    before = known(("app/net.py:9", "Net.forward", code))
    after = known(("app/attention.py:3", "scores_of", code))

    assert pairs(before, after) == [("app/net.py:9", "app/attention.py:3")]


def test_lines_without_their_text_are_known_by_number() -> None:
    before = known(("app/net.py:9", "f", ""), ("app/net.py:10", "f", ""))
    after = known(("app/net.py:10", "f", ""))

    assert set(pairs(before, after)) == {
        ("app/net.py:10", "app/net.py:10"),
        ("app/net.py:9", ""),
    }
