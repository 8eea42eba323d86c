"""What ``memfit train dreams`` does: pre-train, fine-tune, embed, convert, demo, remedies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .settings import CONVERT, EMBED, FINETUNE, PRETRAIN, DreamsSettings

if TYPE_CHECKING:
    from rich.console import Console


def train(settings: DreamsSettings, console: Console) -> dict[str, Any]:
    """Do what the settings say, and return what ``--json`` ends with.

    Raises:
        DataError: if a file or a record cannot be used.
        UsageError: if flags do not fit each other, or the output folder holds another run.
        MissingExtraError: without Lightning, or another package that is needed.
        NoPlanFitsError: if no plan keeps training inside the budget.
    """
    import importlib.util

    from memfit.errors import MissingExtraError

    for package in ("lightning", "torchmetrics", "sklearn", "h5py"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("memfit train dreams", package, "dreams")
    if settings.regime == CONVERT:
        return _convert(settings, console)
    if settings.regime == "remedies":
        from .remedies import show_remedies

        return show_remedies(console)
    if settings.regime == "demo":
        from .demo import demo

        return demo(settings, console)
    if settings.regime == EMBED:
        from .embedding import embed

        return embed(settings, console)
    if settings.regime == FINETUNE and settings.folds is not None:
        from .cross_validation import cross_validate

        return cross_validate(settings, console)
    from .runs import finetune, pretrain

    return {PRETRAIN: pretrain, FINETUNE: finetune}[settings.regime](settings, console)


def _convert(settings: DreamsSettings, console: Console) -> dict[str, Any]:
    """Write all files as one HDF5 file in the output folder."""
    from .ms_data import convert
    from .spectra import BadRecords, OnBadRecord

    bad = BadRecords(OnBadRecord(settings.on_bad_record))
    target = settings.output_dir
    if target.suffix not in {".hdf5", ".h5"}:
        target = target / "spectra.hdf5"
    num_spectra = convert(settings.paths, target, bad)
    skipped = [str(each) for each in bad.found]
    console.print(
        "\n".join([*(f"skipped: {each}" for each in skipped), f"{target}: {num_spectra} spectra"]),
        markup=False,
        soft_wrap=True,
    )
    return {"workload": "dreams", "regime": CONVERT, "path": str(target),
            "metrics": {"num_spectra": num_spectra}, "bad_records": skipped}  # fmt: skip
