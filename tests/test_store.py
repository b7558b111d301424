"""Mended code kept between starts: used where it is right and safe, and nothing is lost where it isn't."""

import ast
import os
import stat
from pathlib import Path

import pytest

from vllm_rocm_fixes import store
from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patch import Patch, Site, clear, needed
from vllm_rocm_fixes.series import remembered
from vllm_rocm_fixes.survey import survey

pytestmark = pytest.mark.unit
STOCK = b'import functools\n\n@functools.cache\ndef f():\n    return "stock"\n'


def edit(tree):
    tree.body[1].body[0].value.value = "mended"
    tree.body.append(ast.parse("def new():\n    return 'new'\n").body[0])


PATCHES = [
    Patch("p", "m", "", (), "0", None, lambda t: clear("is") if "mended" in ast.dump(t) else needed("was"), edit),
    Patch("q", "m", "", (), "0", None, lambda t: clear("never there"), edit),
]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_FIXES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mended"


def key(source=STOCK, filename="m.py", site=Site()):
    return store.key(source, filename, PATCHES, site)


def keep():
    mended = mend(STOCK, "m.py", PATCHES)
    store.save(key(), mended)
    return mended


def test_what_comes_back_is_what_was_kept(home):
    assert store.load(key(), PATCHES) is None
    kept = keep()
    back = store.load(key(), PATCHES)
    assert back is not None and back.outcomes == kept.outcomes and back.code == kept.code
    assert back.decorated == {"f"} and back.added == kept.added and set(back.added) == {"new"}
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert [p.name for p in home.iterdir()] == [key().hex()]


def test_the_folder_may_be_named_by_a_users_home(home, monkeypatch):
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("ROCM_FIXES_CACHE", "~/cache")
    assert store.folder() == home / "cache" / "mended"


def test_anything_that_could_change_the_edit_changes_the_key(monkeypatch):
    keys = {key(), key(STOCK + b"#"), key(filename="n.py"), key(site=Site(skipped=frozenset({"hip"})))}
    keys.add(key(site=Site(version="0.99.0")))
    monkeypatch.setattr(store, "_own_files", lambda: b"other files")
    keys.add(key())
    assert len(keys) == 6


def others_folder(home):
    os.chown(home, 65534, 65534)


def others_file(home):
    os.chown(next(home.iterdir()), 65534, 65534)


def open_folder(home):
    home.chmod(0o777)


def open_file(home):
    next(home.iterdir()).chmod(0o666)


def linked_folder(home):
    home.rename(home.with_name("elsewhere"))
    home.symlink_to(home.with_name("elsewhere"))


def linked_file(home):
    entry = next(home.iterdir())
    entry.rename(home.parent / "entry")
    entry.symlink_to(home.parent / "entry")


def pipe(home):
    entry = next(home.iterdir())
    entry.unlink()
    os.mkfifo(entry, 0o600)


def huge_file(home):
    os.truncate(next(home.iterdir()), 1 << 40)


SPOILT = [others_folder, others_file, open_folder, open_file, linked_folder, linked_file, pipe, huge_file]


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda f: f.__name__)
def test_what_another_user_could_have_written_is_not_read(home, spoil):
    if os.geteuid() and spoil in (others_folder, others_file):
        pytest.skip("giving a file to another user takes root, as CI runs")
    keep()
    spoil(home)
    assert store.load(key(), PATCHES) is None


def test_every_torn_or_changed_entry_is_refused(home):
    keep()
    entry = next(home.iterdir())
    whole = entry.read_bytes()

    def flipped(i):
        return whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :]

    for damaged in (b"", whole[:31], whole[:64], whole[:-1], flipped(70), flipped(0)):
        entry.write_bytes(damaged)
        assert store.load(key(), PATCHES) is None
    # An entry under another's name: its own key doesn't fit.
    other = key(STOCK + b"#")
    (home / other.hex()).write_bytes(whole)
    assert store.load(other, PATCHES) is None


def test_a_folder_that_cannot_be_written_costs_only_the_entry(home, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where a folder should be")
    keep()
    assert store.load(key(), PATCHES) is None
    monkeypatch.delenv("ROCM_FIXES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    keep()
    assert store.load(key(), PATCHES) is None


def test_what_was_refused_or_failed_is_tried_again(home):
    def breaks(tree):
        raise RuntimeError("why")

    for patch in (PATCHES[0]._replace(refuse=lambda site: "why"), PATCHES[0]._replace(mend=breaks)):
        outcome = store.mended(STOCK, "m.py", [patch], Site())
        assert "why" in (outcome.outcomes[0].refused or outcome.outcomes[0].failed)
    assert not home.exists()


@pytest.mark.parametrize("fails", ["read", "parse", "examine"])
def test_a_look_that_failed_is_taken_again(home, tmp_path, monkeypatch, fails):
    site = Site(tmp_path, "0.23.0")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "m.py").write_bytes(STOCK)

    def look(*_, **__):
        raise {"read": OSError(5, "for now"), "parse": MemoryError("for now"), "examine": RecursionError("for now")}[
            fails
        ]

    series = [p._replace(module="vllm.m") for p in PATCHES]
    broken = [p._replace(examine=look) for p in series] if fails == "examine" else series
    with monkeypatch.context() as patched:
        if fails != "examine":
            patched.setattr(*((Path, "open") if fails == "read" else (ast, "parse")), look)
        found = remembered(broken, site)
    assert [o.verdict.kind for o in found] == ["unknown"] * 2 and "for now" in found[0].verdict.reason
    for found in (remembered(series, site), remembered(series, site), survey(tmp_path, series, "0.23.0")):
        assert [o.verdict.kind for o in found] == ["needed", "clear"]


def test_the_folder_does_not_grow_for_ever(home, monkeypatch):
    monkeypatch.setattr(store, "_MOST", 3)
    for i in range(6):
        store.save(key(STOCK + b"#" * i), mend(STOCK, "m.py", PATCHES))
    assert len(list(home.iterdir())) == 3 and store.load(key(STOCK + b"#" * 5), PATCHES)
