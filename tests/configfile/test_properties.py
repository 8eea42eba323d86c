"""Texts made at random: an edit changes the value that it names, and not one character more."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomlkit
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.configfile.independent_parsers import flat

from memfit.configfile.json_text import edit_json, read_json
from memfit.configfile.toml_text import edit_toml, read_toml
from memfit.configfile.tree import Insertion
from memfit.configfile.yaml_text import edit_yaml, read_yaml
from memfit.errors import ConfigFileError

NAMES = st.text("abcxyz_", min_size=1, max_size=4)
SCALARS = st.one_of(
    st.integers(0, 999),
    st.booleans(),
    st.none(),
    st.text("abc é\"'#:{}[],-\\\n\t", max_size=6),
    st.floats(-9, 9, allow_nan=False),
)
GROUPS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
CONTENTS = st.dictionaries(NAMES, GROUPS, min_size=1, max_size=4)
NEW = st.one_of(st.integers(1, 10**6), st.booleans(), st.sampled_from(["bf16-mixed", "no", "32"]))


def slashed(key: tuple[str, ...]) -> str:
    return "/".join(key)


def assert_only(before, after, key, value):
    """Compare what an independent parser reads before and after."""
    assert {name: old for name, old in flat(before).items() if name != slashed(key)} == {
        name: new for name, new in flat(after).items() if name != slashed(key)
    }
    found = flat(after)[slashed(key)]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.slow
@given(CONTENTS, NEW, st.data(), st.sampled_from([None, 1, 4, "\t"]), st.booleans())
def test_one_value_of_json_is_replaced(content, value, data, indent, has_crlf):
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    text = text.replace("\n", "\r\n") if has_crlf else text
    tree = read_json(text)
    if not tree.entries:
        return
    key = data.draw(st.sampled_from(sorted(tree.entries)))
    edited = edit_json(text, tree, {key: value}, [])

    assert_only(content, json.loads(edited), key, value)
    entry = tree.entries[key]
    assert edited.startswith(text[: entry.start])
    assert edited.endswith(text[entry.end :])


@pytest.mark.slow
@given(CONTENTS, NEW, st.data(), st.sampled_from([None, 2, "\t"]))
def test_one_value_is_added_to_json(content, value, data, indent):
    text = json.dumps(content, indent=indent)
    tree = read_json(text)
    named = sorted(key for key in tree.entries if not key[-1].isdigit())
    if not named:
        return
    beside = data.draw(st.sampled_from(named))
    added = Insertion(beside=beside, name="NEW", value=value)
    edited = edit_json(text, tree, {}, [added])

    assert_only(content, json.loads(edited), added.key, value)


@pytest.mark.slow
@given(
    CONTENTS, NEW, st.data(), st.sampled_from([None, False, True]), st.integers(2, 7), st.booleans()
)
def test_one_value_of_yaml_is_replaced(content, value, data, flow, indent, has_crlf):
    text = yaml.safe_dump(content, default_flow_style=flow, indent=indent, allow_unicode=True)
    text = text.replace("\n", "\r\n") if has_crlf else text
    before = yaml.safe_load(text)
    tree = read_yaml(text)
    free = sorted(key for key, entry in tree.entries.items() if not entry.obstacle)
    if not free:
        return
    key = data.draw(st.sampled_from(free))
    edited = edit_yaml(text, tree, {key: value}, [])
    if tree.entries[key].is_quoted and not isinstance(value, bool):
        value = str(value)  # quotes stay where a number or a word is written

    assert_only(before, yaml.safe_load(edited), key, value)


@pytest.mark.slow
@given(CONTENTS, NEW, st.data(), st.sampled_from([None, False, True]))
def test_one_value_is_added_to_yaml(content, value, data, flow):
    text = yaml.safe_dump(content, default_flow_style=flow, allow_unicode=True)
    tree = read_yaml(text)
    free = sorted(
        key for key, entry in tree.entries.items() if not entry.obstacle and not key[-1].isdigit()
    )
    if not free:
        return
    added = Insertion(beside=data.draw(st.sampled_from(free)), name="NEW", value=value)
    edited = edit_yaml(text, tree, {}, [added])

    assert_only(yaml.safe_load(text), yaml.safe_load(edited), added.key, value)


@pytest.mark.slow
@given(
    st.dictionaries(NAMES, st.integers(0, 99) | st.dictionaries(NAMES, st.booleans(), max_size=2)),
    st.data(),
)
def test_one_value_of_toml_is_replaced(content, data):
    text = "# first\n" + tomlkit.dumps(content) + "# last\n"
    tree = read_toml(text)
    if not tree.entries:
        return
    key = data.draw(st.sampled_from(sorted(tree.entries)))
    edited = edit_toml(text, tree, {key: 12345}, [])

    assert_only(content, tomllib.loads(edited), key, 12345)
    assert edited.startswith("# first\n")
    assert edited.endswith("# last\n")


@pytest.mark.slow
@given(st.text("ab:-{}[]&*<\"'#|> \n\t1", max_size=30))
def test_any_text_is_read_as_yaml_or_refused(text):
    try:
        tree = read_yaml(text)
    except ConfigFileError:
        return
    for entry in tree.entries.values():
        assert -1 <= entry.start <= entry.end <= len(text)


def test_nothing_here_imports_torch():
    code = "import sys, memfit.cli.apply, memfit.configfile.applying; print('torch' in sys.modules)"
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, check=True
    )
    assert done.stdout == b"False\n"
