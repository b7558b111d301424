"""The switches, and what is said of a wrong one."""

import pytest

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
