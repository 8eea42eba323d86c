"""What DreaMS learns on the spectra that ship: the table of the workload's README.

Run: python benchmarks/bench_dreams_learning.py [FOLDER]     (about an hour on one core)

Runs that FOLDER has already are kept, so that what was interrupted goes on. Nothing here was chosen
on the folds that are tested: a probe's strength is chosen inside each training part, the range of
strengths and the number of peaks on folds inside the training part of the first fold. The runs
`bsa_scan`, `has_F_scratch` and `has_Cl_scratch` are not in the results yet.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from results_file import save_result

_BSA = (
    "pretrain --dataset_pth bsa --dformat none --max_peaks_n 32 --batch_size 16 --lr 1e-3 "
    "--warmup_steps 100 --max_epochs 70"
)
_SIZES = "--d_fourier 112 --n_layers 3 --fourier_width 128"
_FOLDS = "finetune --dataset_pth pesticides --dformat none --folds 5 --seeds 3"
_PROBE = (
    "--max_peaks_n 24 --probe 0.003 --probe 0.01 --probe 0.03 --probe 0.1 --probe 0.3 "
    "--unfreeze_backbone_at_epoch 1 --max_epochs 1 --lr 1e-6"
)
_TUNED = (
    "--max_peaks_n 24 --probe 0.003 --probe 0.01 --probe 0.03 --probe 0.1 --probe 0.3 "
    "--batch_size 16 --max_epochs 10 --lr 5e-4"
)
_TRAINED = (
    "--max_peaks_n 60 --batch_size 16 --max_epochs 10 --lr 5e-4 --d_fourier 240 --d_peak 16 "
    "--n_layers 1 --fourier_width 512 --mz_accuracy 1e-3 --dropout 0.3"
)
_PRE_TRAINED = "--pre_trained_pth {folder}/elements/final_model.pt"
RUNS = {
    "generated": "convert --dataset_pth generated:20000",
    "elements": "finetune --dataset_pth {folder}/generated/spectra.hdf5 --in_mem --dformat none "
    "--train_objective elements --max_peaks_n 24 --batch_size 32 --max_epochs 6 --lr 1e-3 "
    f"--warmup_steps 300 --dropout 0 {_SIZES} --fourier_chunk 0 --val_frac 0.05",
    "has_F_pre_trained": f"{_FOLDS} --train_objective has_F {_PROBE} {_PRE_TRAINED}",
    "has_Cl_pre_trained": f"{_FOLDS} --train_objective has_Cl {_PROBE} {_PRE_TRAINED}",
    "has_F_random": f"{_FOLDS} --train_objective has_F {_PROBE} {_SIZES}",
    "has_Cl_random": f"{_FOLDS} --train_objective has_Cl {_PROBE} {_SIZES}",
    "has_F_pre_trained_tuned": f"{_FOLDS} --train_objective has_F {_TUNED} {_PRE_TRAINED}",
    "has_F_random_tuned": f"{_FOLDS} --train_objective has_F {_TUNED} {_SIZES}",
    "bsa_group": f"{_BSA} --split_by group",
    "bsa_scan": f"{_BSA} --split_by scan",
    "has_F_scratch": f"{_FOLDS} --train_objective has_F {_TRAINED}",
    "has_Cl_scratch": f"{_FOLDS} --train_objective has_Cl {_TRAINED}",
}


def main() -> None:
    """Carry out what is missing, and keep what each run reports."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/dreams-learning")
    rows = [row for name, flags in RUNS.items() if (row := _row(name, flags, folder))]
    save_result("dreams_learning", {"rows": rows})


def _row(name: str, flags: str, folder: Path) -> dict[str, Any] | None:
    """Return what a run reports; the converter reports nothing to keep."""
    own = folder / name
    told = own / ("spectra.hdf5" if flags.startswith("convert") else "results.json")
    if not told.is_file():
        words = flags.format(folder=folder).split()
        command = [sys.executable, "-m", "memfit", "train", "dreams", *words, "-o", str(own)]
        subprocess.run([*command, "--overwrite", "--no-gpu"], check=True)
    if told.suffix == ".hdf5":
        return None
    result = json.loads(told.read_text())
    kept = ("metrics", "num_train", "num_val")
    return {"run": name, "flags": flags, **{key: result[key] for key in kept if key in result}}


if __name__ == "__main__":
    main()
