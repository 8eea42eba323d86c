"""What fuzzing has found: inputs that a reader once gave way to, each in as few bytes as it takes."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import fuzz_marks
import numpy as np
import pytest
from fuzz_readers import CODE, LARGE, MOST_BYTES, REFUSED, SLOW, TRACEBACK, outcome_of
from fuzz_readers_list import READERS
from fuzzed_reader import Reader, of

READER = {each.title: each for each in READERS}


def npy(header: str) -> bytes:
    """Return an array's file with a header of one's own."""
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8)


def archived(*, compression: int = zipfile.ZIP_STORED, **arrays: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, array in arrays.items():
            written = io.BytesIO()
            np.save(written, array)
            archive.writestr(f"{name}.npy", written.getvalue())
    return out.getvalue()


def state(**about: Any) -> bytes:
    return archived(facts=np.frombuffer(json.dumps(about).encode(), np.uint8))


def deepspeed(**content: Any) -> bytes:
    return json.dumps(content).encode()


FOUND = [
    (
        "MGF, refusing",
        b"BEGIN IONS\nPEPMASS=5\nCHARGE=" + b"9" * 40 + b"\n50 1\nEND IONS\n",
        "charge",
    ),
    ("entity ids", b"a\t" + b"9" * 40 + b"\n", "the id a number from 0"),
    ("entity ids", b"a\t" + b"9" * 5000 + b"\n", "the id a number from 0"),
    ("entity ids", b"a\t\x1f0\n", "train.txt, line 1"),
    ("CIFAR-10", b"\x80\x04\x8e" + (2**45).to_bytes(8, "little"), "a batch of CIFAR-10"),
    ("frames", npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2,"), "array"),
    ("frames", npy("{'descr': '|u1', 'fortran_order': False, 'shape': (None,), }"), "array"),
    ("frames, archived", archived(a=np.zeros(3)).replace(b"\x14\x00", b"\x6c\x00"), "array"),
    ("influence state", state(facts=[1], num_done=1, checksums={}), "how far which scan"),
    ("influence state", state(facts={}, num_done="1", checksums={}), "how far which scan"),
    (
        "influence state",
        archived(compression=zipfile.ZIP_DEFLATED, facts=np.zeros(2**24, np.uint8)),
        "it is compressed",
    ),
    ("DeepSpeed config", deepspeed(train_batch_size="cpu"), "train_batch_size is 'cpu'"),
    ("DeepSpeed config", deepspeed(train_batch_size={"a": 1}), "a whole number above 0"),
    ("DeepSpeed config", deepspeed(gradient_accumulation_steps=0), "a whole number above 0"),
    ("DeepSpeed config", deepspeed(gradient_clipping=[1]), "a number of at least 0"),
    ("DeepSpeed config", deepspeed(bf16="auto"), "needed is an object"),
    ("DeepSpeed config", deepspeed(zero_optimization=True), "an older form"),
    ("DeepSpeed config", deepspeed(zero_optimization={"stage": "two"}), "0, 1, 2 or 3"),
    ("DeepSpeed config", deepspeed(zero_optimization={"offload_param": "cpu"}), "an object"),
    ("DeepSpeed config", b" " * 2**21 + b"{}", "larger than 1,048,576 bytes"),
    ("DeepSpeed file", b" " * 2**21 + b"{}", "larger than 1,048,576 bytes"),
    ("plan", b"memfit_plan: 1\nreasons:\n" + b"- a\n" * 8001, "at most 8,000 are read"),
    ("plan settings", b"? [{a: 1}]\n: b\n", "a key that is no plain value"),
    ("plan", b"memfit_plan: 1\n? {a: [{}]}\n: 1\n", "plan.yaml: it"),
    ("config YAML", b"a: " + b"b " * 300_000, "longer than 524,288 characters"),
    ("training.json", b" " * 2**23 + b"{}", "larger than 4,194,304 bytes"),
]


@pytest.mark.parametrize(
    ("title", "content", "words"), FOUND, ids=[f"{n} {row[0]}" for n, row in enumerate(FOUND)]
)
def test_what_was_found_is_refused_in_a_line(title, content, words, tmp_path):
    found = outcome_of(READER[title], content, tmp_path)
    assert (found.kind, words in found.told) == (REFUSED, True), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "kind", "most_seconds"),
    [
        (lambda _: fuzz_marks.ran(), CODE, 60),
        (lambda _: b"a" * (2 * MOST_BYTES), LARGE, 60),
        (lambda _: sum(range(10**6)), SLOW, 0.01),
        (lambda _: 1 / 0, TRACEBACK, 60),
    ],
)
def test_a_reader_that_gives_way_is_seen(read, kind, most_seconds, tmp_path: Path):
    reader = Reader(title="x", name="x", read=read, contents=of(b""), most_seconds=most_seconds)
    assert outcome_of(reader, b"", tmp_path).kind == kind
