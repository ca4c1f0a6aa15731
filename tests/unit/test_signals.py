"""scripts/training/signals.py: no signal ends a job that has not got its handlers yet; a start ends at once."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dist.console import BY_CTRL_C
from scripts.training import signals as module
from scripts.training.signals import (
    ASKS,
    CHECKPOINT,
    END,
    INTERRUPTED,
    NOTHING,
    QUIT,
    TIME_IS_UP,
    WAITING,
    Clock,
    Signals,
    let_wait,
)

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parents[2]


@pytest.fixture
def handlers():
    """The handlers and the mask are as before, after the test."""
    before, mask = {number: signal.getsignal(number) for number in ASKS}, signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_came_during_the_imports_is_counted(handlers):
    let_wait()
    # To this thread: other tests have left threads that let the signal through.
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    assert signal.SIGUSR1 in signal.sigpending()
    signals = Signals(None)
    assert signals.requested() == CHECKPOINT
    assert signals.requested() == NOTHING
    assert not signal.sigpending() & {*WAITING}


def test_before_the_first_step_has_ended_a_wish_for_the_end_is_met_at_once(handlers):
    ended = []
    signals = Signals(lambda *said: ended.append(said))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not ended
    os.kill(os.getpid(), signal.SIGTERM)
    [(text, code)] = ended
    assert code == INTERRUPTED
    assert text.startswith("SIGTERM ends the run before its first step")
    assert text.count("\n") == 1
    signals.requested()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert len(ended) == 1
    assert signals.requested() == END


def test_ctrl_c_asks_for_the_end_and_the_second_one_is_met_at_once(handlers, monkeypatch):
    """What comes within moments of the first is the same press, which a launcher has handed on as well."""
    now, ended = [10.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    signals = Signals(lambda *said: ended.append(said))
    signals.requested()
    for now[0] in (10.0, 10.1):
        os.kill(os.getpid(), signal.SIGINT)
        assert not ended
    assert signals.requested() == QUIT > END
    now[0] = 11.0
    os.kill(os.getpid(), signal.SIGINT)
    [(text, code)] = ended
    assert code == BY_CTRL_C
    assert text.startswith("second Ctrl-C: the run ends at once")


def test_sigterm_is_known_while_the_main_thread_is_held_up(handlers):
    """In a call that neither returns nor lets Python run a handler, as one of MPI that waits for a dead rank."""
    signals, seen = Signals(None), []
    signals.requested()
    assert not signals.has_sigterm()

    def ask():
        time.sleep(0.1)
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.pthread_kill(threading.main_thread().ident, number)
            time.sleep(0.1)
            seen.append((signals.has_sigterm(), signals.requested()))

    thread = threading.Thread(target=ask)
    thread.start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)
    thread.join()
    assert seen == [(False, NOTHING), (True, NOTHING)]
    assert signals.has_sigterm()
    assert signals.requested() == END
    signals.close()
    os.kill(os.getpid(), signal.SIGTERM)


def test_ctrl_c_during_the_imports_is_no_traceback():
    program = (
        "import os, signal\n"
        "from scripts.training.signals import let_wait\n"
        "let_wait()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (-signal.SIGINT, b"")


def test_train_waits_before_it_imports():
    """A signal that Python has pending when the imports begin does not end the process."""
    program = (
        "import os, runpy, signal, sys\n"
        "import scripts.training.signals as signals\n"
        "def let_wait():\n"
        "    whole()\n"
        "    assert 'numpy' not in sys.modules and 'mpi4py' not in sys.modules\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "whole, signals.let_wait, sys.argv = signals.let_wait, let_wait, ['train.py', '--help']\n"
        "runpy.run_path('scripts/train.py', run_name='__main__')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_the_clock_asks_for_checkpoints_and_then_for_the_end(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    clock, never = Clock(checkpoint_minutes=0.5, minutes=2), Clock(0, 0)
    asked = []
    for now[0] in range(1000, 1130, 10):
        asked.append(clock.requested())
        assert never.requested() == NOTHING
    due = {3: CHECKPOINT, 6: CHECKPOINT, 9: CHECKPOINT, 12: TIME_IS_UP}
    assert asked == [due.get(tick, NOTHING) for tick in range(13)]
    assert CHECKPOINT < TIME_IS_UP < END
    now[0] = 1090.0
    assert (clock.left_s(), never.left_s()) == (30.0, None)
