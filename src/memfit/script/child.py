"""The process in which a script is recorded: ``python -m memfit.script.child FOLDER``."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path

from memfit.errors import MemfitError
from memfit.files import write_atomically
from memfit.script.kernel_lock import lock_writes
from memfit.script.outside import Outside
from memfit.script.question import ScriptFailure, ScriptQuestion, ScriptRecording, Workplace
from memfit.script.recorded_run import import_libraries, record_run

_NOT_LOCKED = "Files that compiled code writes are not kept back on this system"


def main(folder: str) -> int:
    """Record the script that a folder's question names, and write what was found there."""
    place = Workplace(folder=Path(folder))
    question: ScriptQuestion = pickle.loads(place.question.read_bytes())
    outside = Outside(question.allows)
    outside.watch()
    import_libraries()
    notes = () if lock_writes([place.folder]) else (_NOT_LOCKED,)
    try:
        found: ScriptRecording | ScriptFailure = record_run(question, place, outside, notes)
    except MemfitError as error:
        found = ScriptFailure(
            what=getattr(error, "what", str(error)),
            remedy=getattr(error, "remedy", ""),
            traceback=traceback.format_exc(),
        )
    write_atomically(place.result, pickle.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the script, and what it registered for the end, are not waited for


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
