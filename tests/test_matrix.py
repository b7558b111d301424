"""The matrix of releases and patches, and that it can fail."""

import shutil

import matrix
import pytest
from releases import tree

from vllm_rocm_fixes.patches import sampler


@pytest.fixture(scope="session")
def made():
    """The releases that docs/support.md knows: one that appears tomorrow is for `make matrix` and `make drift`."""
    return matrix.columns(matrix.listed())


def test_sources_and_patches_agree_in_every_release(made):
    assert len(made) >= 30
    assert [said for column in made for said in column.disagreements] == []


def test_no_release_that_is_out_has_a_shape_nobody_knows(made):
    assert [(c.version, n, c.reasons[n]) for c in made for n, v in c.verdicts.items() if v == "unknown"] == []


def test_the_table_in_docs_is_up_to_date(made):
    assert matrix.SUPPORT.read_text() == matrix.table(made), "docs/support.md is stale: run `make matrix`"


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A copy of one release's sampler, which a test may spoil."""
    place = tmp_path / "vllm/v1/sample/ops/topk_topp_sampler.py"
    place.parent.mkdir(parents=True)
    shutil.copy(tree("0.23.0") / place.relative_to(tmp_path), place)
    monkeypatch.setattr(matrix, "tree", lambda version: tmp_path)
    monkeypatch.setattr(matrix, "SERIES", (sampler.PATCH,))
    return place


def test_a_patch_that_names_the_wrong_release_is_shown_with_both_sides(shelf, monkeypatch):
    assert matrix.column("0.23.0").disagreements == []
    wrong = sampler.PATCH._replace(until="0.23.0")
    monkeypatch.setattr(matrix, "SERIES", (wrong,))
    (said,) = matrix.column("0.23.0").disagreements
    assert "the source says needed" in said and "the patch says since 0.14.0, until 0.23.0" in said


def test_an_unknown_shape_is_shown_by_name_and_breaks_nothing(shelf):
    shelf.write_text(shelf.read_text().replace("class TopKTopPSampler", "class TheSampler"))
    made = matrix.column("0.99.0")
    assert made.verdicts == {"sampler": "unknown"} and "TopKTopPSampler" in made.reasons["sampler"]
    assert made.disagreements == [] and "| 0.99.0 | unknown |" in matrix.table([made])


def test_an_edit_that_fails_is_shown(shelf, monkeypatch):
    monkeypatch.setattr(matrix, "SERIES", (sampler.PATCH._replace(mend=lambda tree: None),))
    (said,) = matrix.column("0.23.0").disagreements
    assert "the edit failed" in said


def test_a_bake_that_differs_from_the_import_is_shown(shelf, monkeypatch):
    monkeypatch.setattr(matrix, "rewrite", lambda source, tree: source)
    said = matrix.column("0.23.0").disagreements
    assert any("bake gives another tree" in line for line in said)
    assert any("mending twice" in line for line in said)


def test_a_release_that_cannot_be_fetched_is_a_row_and_a_failure(monkeypatch):
    monkeypatch.setattr(matrix, "tree", lambda version: 1 / 0)
    made = matrix._contained("0.98.0")
    assert set(made.verdicts.values()) == {"unknown"} and "ZeroDivisionError" in made.disagreements[0]
