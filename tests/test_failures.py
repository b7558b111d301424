"""What of an error counts as somebody's wish to stop the process."""

import functools
import signal

import pytest

from vllm_rocm_fixes.failures import is_interruption

pytestmark = pytest.mark.unit


def plain(number, frame):
    raise SystemExit


def named(number, frame):
    number = signal.Signals(number)
    raise SystemExit(128 + number)


def tidy(number, frame):
    del frame
    raise SystemExit


def chained(number, frame):
    del frame
    plain(number, None)


class Server:
    def stop(self, number, frame):
        frame = None
        raise SystemExit(frame)


HANDLERS = {
    "plain": plain,
    "named": named,
    "tidy": tidy,
    "chained": chained,
    "method": Server().stop,
    "partial": functools.partial(Server.stop, None),
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_signal_handlers_exit_is_an_interruption(handler):
    before = signal.signal(signal.SIGTERM, HANDLERS[handler])
    try:
        with pytest.raises(SystemExit) as raised:
            signal.raise_signal(signal.SIGTERM)
        assert is_interruption(raised.value)
        error = RuntimeError("a build that failed")
        error.__context__ = raised.value
        assert is_interruption(error)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_exit_of_a_package_is_none():
    with pytest.raises(SystemExit) as raised:
        exec("def build():\n    raise SystemExit('a build that failed')\nbuild()")
    assert not is_interruption(raised.value) and not is_interruption(ImportError())
    assert is_interruption(KeyboardInterrupt())
