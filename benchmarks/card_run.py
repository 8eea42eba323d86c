"""Makes the most of a few minutes on a card: checks, operators, then recorded steps.

Run: PYTHONPATH=src python benchmarks/card_run.py --out FOLDER          (under ten minutes)

Plans of the checks are found on the processor while operators are timed on the card; one process at
a time has the card. `--short` only tries each part, in under 100 seconds. `--device cpu` tries the
whole here, with tiny models. Written are `card_checks.json`, `operators.json`, `rows.jsonl`,
`rows.failures.jsonl`, `snapshots.tar` and `log.txt`, each whole at any time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).parent
_LOCK = "MEMFIT_CARD_LOCK"


def main(words: Sequence[str] | None = None) -> int:
    """Run everything inside the time; what fails is left in the log."""
    args = _parser().parse_args(words)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="memfit-card-run-") as folder:
        os.environ[_LOCK] = str(Path(folder) / "lock")
        with (args.out / "log.txt").open("w", encoding="utf-8") as log:
            driver = _Driver(args, Path(folder), log)
            try:
                driver.run()
            finally:
                driver.end()
    print((args.out / "log.txt").read_text("utf-8", errors="replace")[-9000:])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("--seconds", type=float, help="for everything; 570, or 95 with --short")
    parser.add_argument("--short", action="store_true", help="only try each part")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--revision", default="unknown", help="commit to write into rows")
    return parser


class _Driver:
    """Starts the parts, waits for them, and ends them where their time is over."""

    def __init__(self, args: argparse.Namespace, folder: Path, log: object) -> None:
        self._args, self._folder, self._log = args, folder, log
        self._until = time.monotonic() + (args.seconds or (95 if args.short else 570))
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        """Time operators while plans are found; then the cases; then record steps."""
        started = time.monotonic()
        checks = self._start("check_card.py", *self._check_words())
        operators = self._start("record_operators.py", *self._operator_words())
        self._wait(operators, 40 if self._args.short else 90)
        self._wait(checks, (60 if self._args.short else 262) - (time.monotonic() - started))
        left = self._until - time.monotonic() - 8
        if left > 15:
            record = self._start("record_gpu.py", *self._record_words(left))
            self._wait(record, left + 5)
        self._pack()

    def end(self) -> None:
        """End whatever still runs."""
        for process in self._processes:
            if process.poll() is None:
                _kill(process)

    def _check_words(self) -> list[str]:
        is_card = self._args.device == "cuda"
        words = ["--out", str(self._args.out / "card_checks.json"), "--device", self._args.device]
        words += ["--size", "card" if is_card and not self._args.short else "tiny"]
        if self._args.short:
            return [*words, "--minutes", "0.95", "--most", "4"]
        return [*words, "--minutes", "4.3"]

    def _operator_words(self) -> list[str]:
        words = ["--out", str(self._args.out / "operators.json"), "--device", self._args.device]
        small = ["--scale", "0.03", "--size", "tiny"]
        if self._args.short:
            return [*words, *small, "--seconds", "15", "--most", "12"]
        return [*words, "--seconds", "52", *(small if self._args.device == "cpu" else [])]

    def _record_words(self, seconds: float) -> list[str]:
        words = ["--out", str(self._args.out / "rows.jsonl"), "--revision", self._args.revision]
        words += ["--minutes", f"{seconds / 60:.3f}", "--device", self._args.device]
        words += ["--snapshot-folder", str(self._folder / "snapshots"), "--preparing", "12"]
        if self._args.device == "cpu":
            return [*words, "--only", "tagger-*", "--preparing", "1"]
        return [*words, "--only", "[mt][la]*", "--preparing", "4"] if self._args.short else words

    def _start(self, script: str, *words: str) -> subprocess.Popen[bytes]:
        self._say(f"--- {script} {' '.join(words)}")
        process = subprocess.Popen(
            [sys.executable, "-u", str(BENCHMARKS / script), *words],
            stdin=subprocess.DEVNULL,
            stdout=self._log,  # type: ignore[arg-type]
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def _wait(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        left = min(seconds, self._until - time.monotonic())
        try:
            process.wait(max(1.0, left))
            self._say(f"--- {Path(str(process.args[2])).name}: exit code {process.returncode}")  # type: ignore[index]
        except subprocess.TimeoutExpired:
            self._say("--- stopped: its time is over")
            _kill(process)

    def _say(self, text: str) -> None:
        self._log.write(f"{text}\n")  # type: ignore[attr-defined]
        self._log.flush()  # type: ignore[attr-defined]

    def _pack(self) -> None:
        """Put the snapshots into one file."""
        folder = self._folder / "snapshots"
        if folder.is_dir():
            with tarfile.open(self._args.out / "snapshots.tar", "w") as tar:
                for path in sorted(folder.iterdir()):
                    tar.add(path, arcname=path.name)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a part: politely, so that it ends its own children, then not."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
