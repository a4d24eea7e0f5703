"""A signal during an import waits for its end, and interrupts then."""

import os
import signal

import pytest

from octet.interrupts import held_back


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_block(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    reached = []
    with pytest.raises(KeyboardInterrupt), held_back():
        os.kill(os.getpid(), number)
        reached.append("end")
    assert reached == ["end"]
    assert signal.getsignal(number) == before


def test_an_error_inside_comes_first() -> None:
    with pytest.raises(ModuleNotFoundError), held_back():
        os.kill(os.getpid(), signal.SIGINT)
        import no_such_module_anywhere  # type: ignore[import-not-found]  # noqa: F401
