"""A user's own file describes a card; one that does not is refused in one line."""

import os
import re
from importlib import resources

import pytest

from memfit.devices.catalogue import load_device
from memfit.errors import DataError

TEXT = (resources.files("memfit.devices") / "data" / "rtx-4090.toml").read_text("utf-8")


@pytest.fixture
def write(tmp_path):
    def writer(content: str | bytes) -> str:
        path = tmp_path / "my-card.toml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return writer


def test_a_file_is_a_device_whose_name_finds_it_again(write):
    path = write(TEXT.replace("value = 25253904384", "value = 50000000000"))
    device = load_device(path)
    assert device.memory_bytes == 50_000_000_000
    assert device.name == path
    assert load_device(device.name) is device


def test_a_file_is_read_again_once_it_has_changed(write):
    path = write(TEXT)
    before = load_device(path).memory_bytes
    write(TEXT.replace("value = 25253904384", "value = 5000000000"))
    assert load_device(path).memory_bytes == 5_000_000_000 < before


def fact(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


WITHOUT_LAUNCHES = re.sub(r"\[facts\.launch_seconds\].*?(?=\n\[)", "", TEXT, flags=re.DOTALL)
HOSTILE = {
    "empty": ("", "lacks title, kind, facts"),
    "no toml": ("facts = [", "not valid TOML"),
    "not text": (b"\xff\xfe\x00", "cannot be read"),
    "too large": ("#" * 100_000, "more than 64.0 KiB"),
    "too deep": ("a = " + "[" * 20_000, "nested too deeply"),
    "too many digits": (fact("value = 25253904384", "value = " + "9" * 5000), "not valid TOML"),
    "unknown key": (fact("title =", "titel ="), "nearest is 'title'"),
    "long key": (f'"{"x" * 5000}" = 1\n' + TEXT, "unknown key"),
    "key with control characters": (f'"\\u001b[2J" = 1\n{TEXT}', r"'\x1b[2J'"),
    "unknown figure": (fact("[facts.memory_bytes]", "[facts.memory]"), "unknown key 'memory'"),
    "missing figure": (WITHOUT_LAUNCHES, "lacks launch_seconds"),
    "figures as a number": ('title = "X"\nkind = "cuda"\nfacts = 3\n', "must be a table"),
    "figure as a number": (
        WITHOUT_LAUNCHES.replace("[facts.mem", "[facts]\nlaunch_seconds = 1\n[facts.mem", 1),
        "must be a table",
    ),
    "title as a number": (re.sub(r"title = .*", "title = 3", TEXT), "title is 3"),
    "long title": (re.sub(r"title = .*", f'title = "{"x" * 200}"', TEXT), "at most 100"),
    "title with control characters": (
        re.sub(r"title = .*", r'title = "\\u001b]0;owned\\u0007"', TEXT),
        "one line to be read",
    ),
    "source as a number": (re.sub(r"source = .*", "source = 1", TEXT, count=1), "source is 1"),
    "source with control characters": (
        re.sub(r"source = .*", r'source = "\\u001b[31m"', TEXT, count=1),
        "one line to be read",
    ),
    "processor": (fact('kind = "cuda"', 'kind = "cpu"'), "describes a 'cuda' card"),
    "list as kind": (fact('kind = "cuda"', "kind = []"), "kind is []"),
    "list as certainty": (fact('certainty = "table"', "certainty = [1]"), "certainty is [1]"),
    "table as platform": (fact('kind = "cuda"', 'kind = "cuda"\nplatform = {}'), "platform is {}"),
    "no capability": (re.sub(r"compute_capability.*", "", TEXT), "compute_capability is missing"),
    "wrong capability": (fact('"8.9"', '"ada"'), 'such as "8.6"'),
    "capability as a number": (fact('"8.9"', "8.9"), 'such as "8.6"'),
    "driver names as text": (re.sub(r"cuda_names = \[[^]]*\]", 'cuda_names = "x"', TEXT), "list"),
    "no memory": (fact("value = 25253904384", "value = 0"), "must be between"),
    "negative": (fact("value = 25253904384", "value = -1"), "must be between"),
    "undefined": (fact("value = 1008e9", "value = nan"), "must be between"),
    "infinite": (fact("value = 1008e9", "value = inf"), "must be between"),
    "too large a number": (fact("value = 25253904384", "value = 1" + "0" * 400), "must be"),
    "in gigabytes": (fact("value = 25253904384", "value = 24"), "without prefixes"),
    "true": (fact("value = 25253904384", "value = true"), "must be a number"),
    "date": (fact('read_on = "2026-11-21"', "read_on = 2026-11-21"), "write a date as"),
    "context as large as the card": (
        fact("value = 698351616", "value = 25253904384"),
        "leaves nothing",
    ),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_or_incomplete_file_is_refused_in_one_line(write, content, message):
    path = write(content)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        load_device(path)
    shown = str(caught.value)
    assert shown.startswith(f"{path}: ")
    assert len(shown) < len(path) + 400
    assert shown.isprintable()


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    for name in ("pipe.toml", "folder.toml"):
        with pytest.raises(DataError, match="no regular file"):
            load_device(str(tmp_path / name))
    with pytest.raises(DataError, match=r"no such file; `memfit devices --new"):
        load_device("no-such.toml")
    with pytest.raises(DataError, match="cannot be read"):
        load_device("a\0b.toml")
