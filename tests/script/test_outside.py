"""What cannot be dropped is refused by name before it happens: programs, connections, files."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import textwrap
from contextlib import ExitStack

import pytest

from memfit.script.outside import Outside

CODE = """
    import sys
    from pathlib import Path
    from memfit.script.outside import Outside
    outside = Outside({allows})
    outside.watch()
    with outside:
        try:
            {act}
        except PermissionError as error:
            print(error)
        else:
            print("passed")
    print([(each.kind, each.what) for each in outside.refused])
"""


def _try(act: str, allows: str = "[]") -> list[str]:
    code = textwrap.dedent(CODE).format(act=act, allows=allows)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "kind", "what"),
    [
        ("import subprocess; subprocess.run(['true', '-x'])", "subprocess", "true -x"),
        ("import os; os.system('true')", "subprocess", "true"),
        (
            "import socket; socket.create_connection(('192.0.2.1', 80), 1)",
            "network",
            "a connection to 192.0.2.1",
        ),
    ],
)
def test_programs_and_connections_are_refused_and_listed(act, kind, what):
    said, refused = _try(act)
    assert (
        said
        == f"{what} is not done while the script is recorded; `--allow-outside {kind}` lets it pass"
    )
    assert refused == str([(kind, what)])


@pytest.mark.slow
def test_what_is_allowed_passes():
    assert _try("import os; os.system('true')", allows="['subprocess']") == ["passed", "[]"]


def test_it_is_off_outside_of_its_context():
    outside = Outside()
    outside._hook("os.system", (b"true",))
    with outside, pytest.raises(PermissionError):
        outside._hook("os.system", (b"true",))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_of_multiprocessing_is_refused_however_it_starts(method):
    outside = Outside()
    process = multiprocessing.get_context(method).Process(target=print)
    with outside, ExitStack() as stack:
        for replacement in outside.replacements():
            stack.enter_context(replacement)
        with pytest.raises(PermissionError, match=r"another process \(print\)"):
            process.start()
    assert [each.what for each in outside.refused] == ["another process (print)"]


def test_the_kernel_keeps_compiled_code_from_writing_elsewhere(tmp_path):
    code = f"""
    import ctypes, os, sys
    from pathlib import Path
    from memfit.script.kernel_lock import lock_writes
    inside, elsewhere = Path({str(tmp_path / "in")!r}), Path({str(tmp_path / "out")!r})
    if not lock_writes([inside]):
        print("no lock")
        sys.exit()
    libc = ctypes.CDLL(None, use_errno=True)
    flags = os.O_CREAT | os.O_WRONLY
    print(libc.open(str(inside / "x").encode(), flags, 0o600) >= 0)
    print(libc.open(str(elsewhere / "x").encode(), flags, 0o600) >= 0)
    """
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", textwrap.dedent(code)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    if said[0] == "no lock":
        pytest.skip("this kernel has no Landlock")
    assert said[:2] == ["True", "False"]
    assert not (tmp_path / "out" / "x").exists()
