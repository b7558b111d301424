"""The switches, and what is said of a wrong one."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_rocm_fixes import settings

pytestmark = pytest.mark.unit
NAMES = ["sampler", "hip", "all2all_utils"]


@pytest.mark.parametrize(
    ("environ", "off", "strict", "skip"),
    [
        ({}, False, False, set()),
        ({"ROCM_FIXES": "off"}, True, False, set()),
        ({"ROCM_FIXES": "0"}, True, False, set()),
        ({"ROCM_FIXES": ""}, False, False, set()),
        ({"ROCM_FIXES_STRICT": "1"}, False, True, set()),
        ({"ROCM_FIXES_SKIP": "sampler, hip,"}, False, False, {"sampler", "hip"}),
    ],
)
def test_what_is_understood(environ, off, strict, skip):
    read = settings.read(NAMES, environ)
    assert (read.off, read.strict, read.skip, read.complaints) == (off, strict, skip, ())


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"ROCM_FIXES": "of"}, "ROCM_FIXES=of is left aside"),
        ({"ROCM_FIXES_STRICT": "maybe"}, "ROCM_FIXES_STRICT=maybe is left aside"),
        ({"ROCM_FIXES_SKIP": "samplr"}, "did you mean sampler?"),
        ({"ROCM_FIXES_SKIP": "xyzzy"}, "there are: all2all_utils, hip, sampler"),
        ({"ROCM_FIXES_SKPI": "hip"}, "did you mean ROCM_FIXES_SKIP?"),
    ],
)
def test_what_is_not_understood_is_said_and_changes_nothing(environ, said):
    read = settings.read(NAMES, environ)
    assert len(read.complaints) == 1 and said in read.complaints[0]
    assert not read.off and not read.strict and not read.skip


WORDS = [
    "1",
    "on",
    "TRUE",
    " yes ",
    "0",
    "off",
    "False",
    "no",
    "",
    "2",
    "of",
    "none",
    "sampler",
    "sampler,hip",
    ",",
    "*",
]
VALUES = st.one_of(st.sampled_from(WORDS), st.text(st.characters(exclude_characters="\0"), max_size=30))
VARIABLES = [
    *settings.SWITCHES,
    "ROCM_FIXES_",
    "ROCM_FIXES_SKPI",
    "ROCM_FIXESX",
    "ROCM_FIX",
    "VLLM_PLUGINS",
    "rocm_fixes",
]
TAKE_ANYTHING = ("ROCM_FIXES_CACHE",)


@given(st.dictionaries(st.sampled_from(VARIABLES), VALUES))
@example({"ROCM_FIXES": "\udcff", "ROCM_FIXES_SKIP": "\udcff,\n,sampler", "ROCM_FIXES_STRICT": "\n1"})
def test_every_wrong_value_says_so_and_none_raises_or_counts(environ):
    read = settings.read(NAMES, environ)
    right = {"1": True, "on": True, "true": True, "yes": True, "0": False, "off": False, "false": False, "no": False}
    wrong = 0
    for name, value in environ.items():
        word = value.strip().lower()
        if name.startswith("ROCM_FIXES") and name not in settings.SWITCHES:
            wrong += 1
            assert any(line.startswith(f"{name} isn't a switch") for line in read.complaints)
        elif name == "ROCM_FIXES_SKIP":
            unknown = {part.strip() for part in value.split(",")} - {"", *NAMES}
            wrong += len(unknown)
            assert all(any(line.startswith(f"{name}={part} ") for line in read.complaints) for part in unknown)
        elif name in settings.SWITCHES and name not in TAKE_ANYTHING and word and word not in right:
            wrong += 1
            assert any(line.startswith(f"{name}={value} ") for line in read.complaints)
    assert len(read.complaints) == wrong
    assert read.off == (right.get(environ.get("ROCM_FIXES", "").strip().lower()) is False)
    assert read.strict == (right.get(environ.get("ROCM_FIXES_STRICT", "").strip().lower()) is True)
    assert read.skip <= set(NAMES)
