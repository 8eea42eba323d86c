"""DreaMS' data: readers, bad records, formats, HDF5, molecules, splits."""

import base64
import gzip
import pickle
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memfit.errors import DataError, UsageError
from memfit_workloads.dreams.batches import PretrainingDataset, mask
from memfit_workloads.dreams.data_module import (
    molecule_keys,
    precursor_keys,
    rows_of,
    select,
    split_by_group,
)
from memfit_workloads.dreams.elements import SmilesError, atom_counts, formula, has_element
from memfit_workloads.dreams.folds import grouped_folds
from memfit_workloads.dreams.ms_data import MSData, convert, read_spectra, write_hdf5
from memfit_workloads.dreams.settings import DATASETS
from memfit_workloads.dreams.spectra import FORMATS, BadRecords, OnBadRecord, Spectrum, prepared

h5py = pytest.importorskip("h5py")

GOOD = "BEGIN IONS\nPEPMASS=200.5\nCHARGE=1+\nSMILES=CCF\n100 5\n50.5 10\nEND IONS\n"


def spectrum(*mzs: float, **fields) -> Spectrum:
    given = {"precursor_mz": 300.0, **fields}
    return Spectrum(mzs=np.array(mzs), intensities=np.arange(1.0, len(mzs) + 1), **given)


def read_text(tmp_path: Path, text: str, on_bad: OnBadRecord = OnBadRecord.SKIP):
    path = tmp_path / "own.mgf"
    path.write_text(text)
    bad = BadRecords(on_bad)
    return list(read_spectra(path, bad)), [str(each) for each in bad.found]


def mzml(*scans: str) -> str:
    return f'<mzML xmlns="http://psi.hupo.org/ms/mzml"><run>{"".join(scans)}</run></mzML>'


def scan(number: int, mzs, intensities, *, level: int = 2, is_zlib: bool = True, bits: int = 64):
    def array(values, kind: str) -> str:
        data = np.asarray(values, dtype=f"<f{bits // 8}").tobytes()
        text = base64.b64encode(zlib.compress(data) if is_zlib else data).decode()
        names = ("MS:1000574" if is_zlib else "MS:1000576", kind)
        names += ("MS:1000523" if bits == 64 else "MS:1000521",)
        params = "".join(f'<cvParam accession="{name}" value=""/>' for name in names)
        return f"<binaryDataArray>{params}<binary>{text}</binary></binaryDataArray>"

    return (
        f'<spectrum id="scan={number}"><cvParam accession="MS:1000511" value="{level}"/>'
        '<scanList><scan><cvParam accession="MS:1000016" value="2" unitAccession="UO:0000031"/>'
        "</scan></scanList><selectedIon>"
        '<cvParam accession="MS:1000744" value="400.25"/><cvParam accession="MS:1000041" value="3"/>'
        f"</selectedIon><binaryDataArrayList>{array(mzs, 'MS:1000514')}"
        f"{array(intensities, 'MS:1000515')}</binaryDataArrayList></spectrum>"
    )


@pytest.mark.slow
def test_the_spectra_that_ship_are_read_whole():
    counts = {name: len(list(read_spectra(DATASETS[name], BadRecords()))) for name in DATASETS}

    assert counts == {"pesticides": 76, "bsa": 1120, "peptides": 128}


def test_peaks_are_sorted_and_entries_are_read(tmp_path):
    (only,), bad = read_text(tmp_path, GOOD)

    assert only.mzs.tolist() == [50.5, 100]
    assert only.intensities.tolist() == [10, 5]
    assert (only.precursor_mz, only.charge, only.smiles) == (200.5, 1, "CCF")
    assert bad == []


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("BEGIN IONS\nPEPMASS=1\nEND IONS\n", "it has no peaks"),
        ("BEGIN IONS\nPEPMASS=1\n10 nan\nEND IONS\n", "NaN"),
        ("BEGIN IONS\nPEPMASS=1\n10 ten\nEND IONS\n", "line 3 is no peak: '10 ten'"),
        ("BEGIN IONS\nPEPMASS=1\n10 -1\nEND IONS\n", "negative"),
        ("BEGIN IONS\nPEPMASS=1\n-10 1\nEND IONS\n", "not above 0"),
        ("BEGIN IONS\n10 1\nEND IONS\n", "no PEPMASS"),
        ("BEGIN IONS\nPEPMASS=x\n10 1\nEND IONS\n", "PEPMASS='x' is no number"),
        ("BEGIN IONS\nPEPMASS=1\n10 1\n", "cut off"),
    ],
)
def test_a_bad_record_is_named_and_skipped_or_refused(tmp_path, broken, reason):
    first, last = (broken, "") if "END" in broken else ("", broken)
    spectra, bad = read_text(tmp_path, first + GOOD + last)

    assert len(spectra) == 1
    assert len(bad) == 1
    assert reason in bad[0]
    assert "own.mgf, record" in bad[0]
    with pytest.raises(DataError, match=r"record .*skip passes over it"):
        read_text(tmp_path, first + GOOD + last, OnBadRecord.REFUSE)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("is_zlib", [True, False])
def test_mzml_scans_are_decoded(tmp_path, bits, is_zlib):
    path = tmp_path / "run.mzML.gz"
    scans = (scan(1, [1], [1], level=1), scan(2, [3, 2], [4, 5], is_zlib=is_zlib, bits=bits))
    path.write_bytes(gzip.compress(mzml(*scans).encode()))

    (only,) = read_spectra(path, BadRecords())

    assert only.mzs.tolist() == [2, 3]
    assert only.intensities.tolist() == [5, 4]
    assert (only.precursor_mz, only.charge, only.retention_seconds) == (400.25, 3, 120)


def test_a_broken_mzml_gives_what_came_before_and_says_where_it_ends(tmp_path):
    path = tmp_path / "run.mzML"
    text = mzml(scan(1, [1, 2], [1, 2]), scan(2, [1, 2], [1, np.nan]), scan(3, [1], [1]))
    path.write_text(text[: text.index("scan=3") + 200])
    bad = BadRecords(OnBadRecord.SKIP)

    assert len(list(read_spectra(path, bad))) == 1
    assert "scan=2: an m/z or an intensity is no finite number" in str(bad.found[0])
    assert "broken or cut off after scan scan=2" in str(bad.found[1])
    with pytest.raises(DataError, match="scan=2"):
        list(read_spectra(path, BadRecords()))


def test_a_file_of_another_kind_and_one_that_is_missing_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("1")
    (tmp_path / "a.mgf").write_text("nothing")
    for name, reason in (("a.csv", "kind is not known"), ("b.mgf", "no such"), ("a.mgf", "BEGIN")):
        with pytest.raises(DataError, match=reason):
            list(read_spectra(tmp_path / name, BadRecords()))


def test_the_converter_writes_all_or_nothing(tmp_path):
    source, target = tmp_path / "a.mgf", tmp_path / "a.hdf5"
    source.write_text(GOOD + "BEGIN IONS\nPEPMASS=1\nEND IONS\n")
    with pytest.raises(DataError, match="no peaks"):
        convert([source], target, BadRecords())
    assert list(tmp_path.iterdir()) == [source]

    assert convert([source], target, BadRecords(OnBadRecord.SKIP)) == 1
    assert sorted(tmp_path.iterdir()) == [target, source]


@pytest.mark.parametrize("in_mem", [False, True])
def test_hdf5_gives_back_what_was_written_and_reads_peaks_when_asked(tmp_path, in_mem):
    path = tmp_path / "a.hdf5"
    spectra = list(read_spectra(DATASETS["pesticides"], BadRecords()))
    write_hdf5(path, spectra)

    with MSData(path, in_mem=in_mem) as data:
        assert ("spectrum" in data._columns) == in_mem
        for row, expected in enumerate(spectra):
            found = data.spectrum(row)
            assert np.array_equal(found.mzs, expected.mzs)
            assert np.array_equal(found.intensities, expected.intensities)
            assert (found.smiles, found.precursor_mz) == (expected.smiles, expected.precursor_mz)
        copied = pickle.loads(pickle.dumps(data))  # as a loader's worker gets it
        assert copied._file is None
        assert np.array_equal(copied.peaks(3), data.peaks(3))


def test_hdf5_that_lacks_a_column_or_is_cut_off_is_refused(tmp_path):
    path = tmp_path / "a.hdf5"
    with h5py.File(path, "w") as file:
        file["spectrum"] = np.ones((2, 2, 3))
    with pytest.raises(DataError, match="no column precursor_mz"):
        MSData(path)
    with h5py.File(path, "a") as file:
        file["precursor_mz"] = np.ones(3)
    with pytest.raises(DataError, match="differ in length"):
        MSData(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cut off"):
        MSData(path)


def test_bad_rows_of_hdf5_are_named(tmp_path):
    path = tmp_path / "a.hdf5"
    with h5py.File(path, "w") as file:
        peaks = np.ones((2, 2, 3))
        peaks[1, 1, 0] = np.nan
        file["spectrum"], file["precursor_mz"] = peaks, np.ones(2)
    bad = BadRecords(OnBadRecord.SKIP)

    assert select(MSData(path), None, bad).rows == [0]
    assert "a.hdf5, row 1" in str(bad.found[0])
    with pytest.raises(DataError, match="no column smiles"):
        molecule_keys(MSData(path), [0])


def test_a_format_leaves_out_what_is_beyond_its_limits():
    own = replace(spectrum(*range(100, 130)), intensities=np.linspace(0.01, 1, 30), charge=1)
    wide = replace(own, mzs=own.mzs * 10)

    assert FORMATS["A"].objection(own) == ""
    assert FORMATS["A"].objection(replace(own, charge=2)) == "charge above 1"
    assert FORMATS["A"].objection(wide) == "m/z above 1000"
    assert FORMATS["B"].objection(wide) == ""
    assert "peaks" in FORMATS["A"].objection(spectrum(1, 2))
    assert "amplitude" in FORMATS["A"].objection(spectrum(1, 2, 3, 4))


def test_preparation_keeps_the_highest_peaks_in_order_behind_the_precursor():
    mzs, intensities = np.array([10.0, 20, 30, 40, 0]), np.array([5.0, 1, 10, 2, 0])

    kept = prepared(mzs, intensities, 99.0, 3)

    assert kept.tolist() == [[99, 1.1], [10, 0.5], [30, 1], [40, 0.2]]


def test_masks_leave_precursor_and_base_peak_alone_and_follow_intensity():
    tokens = prepared(np.arange(1.0, 21), np.arange(1.0, 21), 50.0, 20)
    draw = np.random.default_rng(0)
    chosen = np.stack([mask(tokens, draw) for _ in range(500)])

    assert chosen.shape == (500, 6)  # 30 % of 20
    assert chosen.min() >= 1
    assert chosen.max() <= 19  # 20 is the base peak
    assert (chosen == 19).sum() > 5 * (chosen == 1).sum()
    lone = prepared(np.array([5.0]), np.array([2.0]), 50.0, 20)
    assert len(mask(lone, draw)) == 0


def test_pairs_are_of_one_run_and_depend_on_the_index_alone(tmp_path):
    path = tmp_path / "a.hdf5"
    seconds = [3.0, 1.0, 2.0, 9.0]
    names = ["x", "x", "x", "alone"]
    spectra = [
        spectrum(*range(10, 30), retention_seconds=second, name=name)
        for second, name in zip(seconds, names, strict=True)
    ]
    write_hdf5(path, spectra)
    rows = rows_of(MSData(path), range(4), 20)
    data = PretrainingDataset(rows, max_mz=1000, mz_bin=0.1, random_seed=1)

    for index in range(40):
        row, partner = data.pair(index)
        item = data[index]
        assert names[partner] == names[row]
        assert (partner == row) == (row == 3)
        assert float(item["is_pair"]) == float(row != 3)
        assert float(item["earlier"]) == float(seconds[row] < seconds[partner])
        again = data[index]
        assert all(np.array_equal(item[key], again[key]) for key in item)
    partners = {data.pair(index)[1] for index in range(0, 40, 4)}
    assert partners == {1, 2}
    assert not np.array_equal(data[0]["positions"], data[4]["positions"])


def test_formulas_are_those_that_rdkit_finds():
    chem = pytest.importorskip("rdkit.Chem")
    from rdkit.Chem.rdMolDescriptors import CalcMolFormula

    smiles = {each.smiles for each in read_spectra(DATASETS["pesticides"], BadRecords())}
    smiles |= {"c1ccc2[nH]ccc2c1", "C[N+](C)(C)C", "CS(=O)(=O)c1ccccc1", "[Na+].[Cl-]", "C%10CC%10"}
    for each in smiles:
        expected = CalcMolFormula(chem.MolFromSmiles(each)).rstrip("+-0123456789") or ""
        assert formula(each).rstrip("0123456789") == expected, each


def test_elements_are_counted_with_implied_hydrogens():
    assert atom_counts("FC(F)(F)c1ccc(Cl)cc1") == {"C": 7, "H": 4, "F": 3, "Cl": 1}
    assert formula("C1=CC=C2C(=C1)NC(=N2)C3=CC=CO3") == "C11H8N2O"
    assert has_element("CCCl", "Cl")
    assert not has_element("C", "Cl")


@pytest.mark.parametrize(
    "text", ["", "C(", "C1CC", "[Xx]", "C?", "=C", "C==C", "1CC1", "(C)", "C)"]
)
def test_a_smiles_that_is_not_understood_is_refused(text):
    with pytest.raises(SmilesError):
        atom_counts(text)


def test_splits_and_folds_keep_molecules_whole():
    data = MSData(DATASETS["pesticides"])
    keys = molecule_keys(data, range(76))
    labels = [float(has_element(each, "F")) for each in data.column("smiles")]

    train, val = split_by_group(keys, 0.2, 0)
    assert sorted(train + val) == list(range(76))
    assert 8 <= len(val) <= 24
    splits = [(train, val), *grouped_folds(labels, keys, 5, 0)]
    for one, other in splits:
        assert not {keys[i] for i in one} & {keys[i] for i in other}
    assert sorted(i for _, test in splits[1:] for i in test) == list(range(76))
    with pytest.raises(UsageError, match="cannot be split into 99 folds"):
        grouped_folds(labels, keys, 99, 0)


def test_ions_of_one_mass_and_charge_are_one_group(tmp_path):
    path = tmp_path / "a.hdf5"
    ions = [(500.0, 2), (500.3, 2), (500.1, 3), (700.0, 2)]
    write_hdf5(path, [spectrum(1, 2, precursor_mz=mz, charge=charge) for mz, charge in ions])

    a, b, c, d = precursor_keys(MSData(path), range(4))

    assert a == b
    assert len({a, c, d}) == 3
