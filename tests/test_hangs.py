"""Ranks that are alive and of no use: told from slow ones, and named by the others within their time."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from pathlib import Path

import failure_cases
import pytest

import slidedp
from slidedp.compiler.ops import Stream
from slidedp.executor.failures.hangs import Hangs
from slidedp.executor.failures.liveness import Watchdog
from slidedp.executor.shared.segment import SharedSegment
from slidedp.executor.shared.words import Words, WordsLayout
from slidedp.executor.streams.pulse import Pulse

pytestmark = pytest.mark.cpu

DRAINED = 0


class Job:
    """Two ranks whose watchdogs look once a second, on a clock of the test's."""

    def __init__(self, num_ranks=2, **limits):
        layout = WordsLayout(1, num_ranks, 1)
        segment = SharedSegment("control", layout.nbytes)
        self.words = [Words(segment, layout, rank) for rank in range(num_ranks)]
        self.pulses = [Pulse(w) for w in self.words]
        self.stopped = set()
        limits = {"peer_timeout_s": 10.0, "peer_absence_s": 50.0} | limits
        self.hangs = [Hangs(p, lambda: self.words[0].each(DRAINED), lambda: [os.getpid()] * num_ranks,
                            lambda stream: f"user.py:1 in {stream}", **limits) for p in self.pulses]

    def pass_s(self, seconds, *, look_s=1.0, each=lambda: None):
        """The first finding of any rank in that time, with who has it and when."""
        for second in range(seconds):
            each()
            for rank, pulse in enumerate(self.pulses):
                if rank not in self.stopped:
                    pulse.beat(f"train.py:{rank} in main")
                    if finding := self.hangs[rank].look(look_s, 1.0):
                        return rank, second, finding
        return None

    def step(self, number):
        for pulse in self.pulses:
            pulse.arrive(number)
            pulse.begin(number, number, fresh=False)

    def drain(self, number):
        for words in self.words:
            words.publish(DRAINED, number)


def test_an_op_that_never_ends_is_named_by_its_own_rank():
    job = Job()
    job.step(3)
    job.pulses[0].started(Stream.COMM, "reduce.L00.c0")
    job.pulses[1].started(Stream.GPU, "epilogue")
    assert job.pass_s(10) is None
    who, _, finding = job.pass_s(3)
    assert (who, finding.rank, finding.fatal) == (1, 1, True)
    assert finding.text.startswith("rank 1 hangs in step 3: in op epilogue, at user.py:1 in gpu, with nothing done")


def test_a_step_whose_ops_end_now_and_then_does_not_hang():
    job = Job()
    job.step(3)
    ops = iter(range(1000))

    def work():
        if next(ops) % 9 == 0:
            job.pulses[1].started(Stream.GPU, "fwd.L00")
            job.pulses[1].ended(Stream.GPU)

    assert job.pass_s(200, each=work) is None
    job.drain(3)
    assert job.pass_s(200) is None  # nobody waits for anybody


def test_a_stopped_process_is_named_by_the_others():
    job = Job(3)
    job.step(5)
    job.pulses[2].started(Stream.GPU, "bwd.L01")
    job.pulses[0].started(Stream.GPU, "bwd.L01")  # in an op too; it is its watchdog that tells
    job.pass_s(1)
    job.stopped = {2}
    who, second, finding = job.pass_s(20)
    assert (who, finding.rank) == (0, 2)
    assert 10 <= second <= 13
    assert "step 5: its process has not run for" in finding.text
    assert "last in op bwd.L01" in finding.text


def test_without_a_sign_it_is_the_one_that_has_got_least_far():
    job = Job(3)
    job.step(5)
    for rank in (0, 2):
        job.pulses[rank].started(Stream.GPU, "fwd.L00")
        job.pulses[rank].ended(Stream.GPU)
    job.pass_s(1)
    assert job.pass_s(20)[2].rank == 1


@pytest.mark.parametrize("why", ["fresh", "saving"])
def test_first_steps_and_saves_have_longer(why):
    job = Job()
    job.step(1)
    if why == "fresh":
        job.pulses[1].begin(1, 1, fresh=True)
    else:
        job.pulses[1].saving(True)
    job.pulses[1].started(Stream.GPU, "fwd.L00")
    assert job.pass_s(50) is None
    assert job.pass_s(5)[2].rank == 1


def test_a_rank_that_does_not_come_is_warned_of_then_named():
    job = Job()
    job.step(4)
    job.drain(4)
    job.pulses[0].arrive(5)
    who, second, finding = job.pass_s(60)
    assert (who, finding.rank, finding.fatal) == (0, 1, False)
    assert second == 9
    assert "since step 4, while others wait for it; it is in its caller's code, at train.py:1 in main" in finding.text
    who, second, finding = job.pass_s(60)  # warned of once
    assert (who, finding.rank, finding.fatal) == (1, 1, True)
    assert second in (39, 40)
    assert "data loader" in finding.text


@pytest.mark.parametrize("arrived", [False, True])
def test_a_rank_that_hangs_in_its_loader_is_named_once_others_have_their_batch(arrived):
    job = Job()
    job.step(4)
    job.drain(4)
    for pulse in job.pulses:
        pulse.load(True)
    assert job.pass_s(60) is None  # a storage that all wait for
    job.pulses[0].load(False)
    if arrived:
        job.pulses[0].arrive(5)
    who, second, finding = job.pass_s(20)
    assert (who, finding.rank, finding.fatal) == (1, 1, True)
    assert second in (9, 10)
    assert finding.text.startswith("rank 1 hangs in its data loader, at train.py:1 in main: others have had their batch after st")


def test_a_rank_that_hangs_in_its_loader_and_cannot_say_so_is_named_by_the_others():
    job = Job()
    job.step(4)
    job.drain(4)
    job.pulses[1].load(True)
    job.pulses[0].arrive(5)
    job.pass_s(1)
    job.stopped = {1}  # its watchdog does not look; its process is no stopped one
    who, second, finding = job.pass_s(20)
    assert (who, finding.rank, finding.fatal) == (0, 1, True)
    assert 10 <= second <= 12


def test_a_loader_that_is_slow_does_not_hang():
    """Every batch takes rank 1 nine seconds, after fifty in which it evaluates, and only then is there a next step."""
    job, seconds, turns = Job(peer_absence_s=500.0), iter(range(10**6)), iter(range(5, 1000))
    job.step(4)
    job.drain(4)
    job.pulses[0].arrive(5)
    assert job.pass_s(50)[2].fatal is False

    def load():
        if next(seconds) % 9 == 0:
            turn = next(turns)
            job.pulses[1].load(False)
            job.step(turn)
            job.drain(turn)
            job.pulses[0].arrive(turn + 1)
            job.pulses[1].load(True)

    job.pulses[1].load(True)
    assert job.pass_s(200, each=load) is None


def test_one_that_ends_leaves_the_other_save_under_way():
    """`on_all` or `resume` while a save beside training still writes: its steps keep their longer limit."""
    job = Job()
    job.pulses[1].saving(True)
    for now in (True, False):
        job.pulses[1].saving(now)
    job.step(3)
    job.pulses[0].started(Stream.GPU, "fwd.L00")
    assert job.pass_s(49) is None
    job.pulses[1].saving(False)
    assert job.pass_s(1) is not None


@pytest.mark.parametrize("saving", [False, True])
def test_a_stopped_process_is_missed_only_by_those_who_wait(monkeypatch, saving):
    monkeypatch.setattr("slidedp.executor.failures.hangs.is_stopped", lambda pid: True)
    job = Job()
    job.step(4)
    job.drain(4)
    job.pass_s(1)
    job.stopped = {1}
    if saving:
        job.pulses[0].saving(True)
    found = job.pass_s(30)
    if saving:
        assert (found[0], found[2].rank, found[2].fatal) == (0, 1, True)
        assert 9 <= found[1] <= 11
        assert "has been stopped for 10 s; a checkpoint was being written or read, after step 4" in found[2].text
    else:
        assert found is None


def test_a_job_that_was_suspended_as_a_whole_goes_on():
    job = Job()
    job.step(4)
    assert job.pass_s(1, look_s=3600.0) is None
    assert job.pass_s(5) is None


def test_for_ever_means_for_ever():
    job = Job(peer_timeout_s=math.inf, peer_absence_s=1.0)
    job.step(4)
    job.pulses[0].arrive(5)
    assert job.pass_s(2000) is None


def test_a_bad_limit_is_refused():
    with pytest.raises(ValueError, match="peer_timeout_s=0: a positive number of seconds"):
        slidedp.compile(failure_cases.Optional(), "cpu", peer_timeout_s=0)
    with pytest.raises(ValueError, match="peer_absence_s=None: a positive"):
        slidedp.compile(failure_cases.Optional(), "cpu", peer_absence_s=None)


def test_a_place_is_told_outside_of_libraries():
    layout = WordsLayout(1, 1, 1)
    words = Words(SharedSegment("control", layout.nbytes), layout, 0)
    pulse = Pulse(words)
    dog = Watchdog(words, interval_s=0.01, pulse=pulse)
    while not pulse.read(0).place:
        time.sleep(0.01)
    dog.stop()
    assert pulse.read(0).place.startswith("test_hangs.py:")
    assert pulse.read(0).place.endswith("in test_a_place_is_told_outside_of_libraries")


def wait_for(ranks, condition):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, [ranks.output(r) for r in range(2)]
        time.sleep(0.02)


# ---- processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "said"), [
    ("layer", r"PeerError: rank 1 hangs in step 4: in op fwd\.\w+, at failure_cases.py:\d+ in forward, with nothing done"),
    ("loader", r"PeerError: rank 1 hangs in its data loader, at failure_cases.py:\d+ in batches_end: .* after step 3 for"),
    ("closes", "PeerError: rank 1 has closed its plan after step 3 while rank 0 still waits .* a batch short"),
    ("exits", "PeerError: rank 1 has closed its plan after step 3 while rank 0 still waits"),
])  # fmt: skip
@pytest.mark.slow
def test_a_rank_that_is_of_no_use_is_named(start_ranks, tmp_path, how, said):
    ranks = start_ranks(failure_cases.hung, 2, how, str(tmp_path / "ready"))
    wait_for(ranks, lambda: ranks.poll()[0] is not None)  # rank 1 may hang for longer
    value = json.loads((ranks.log_dir / "rank0.json").read_text())
    assert re.search(said, value["message"]), value["message"]
    assert value["trained"]


@pytest.mark.parametrize("how", ["waits for its save", "saves"])
def test_a_process_stopped_in_a_save_ends_it(start_ranks, tmp_path, how):
    """Its disk takes nothing until it has been stopped, so that the save is not complete before."""
    ranks = start_ranks(failure_cases.stopped_in_a_save, 2, how, str(tmp_path))
    wait_for(ranks, lambda: all(Path(f"{tmp_path}/ready.{r}").exists() for r in range(2)))
    os.kill(ranks.pids[1], signal.SIGSTOP)
    wait_for(ranks, lambda: ranks.poll()[0] is not None)
    message = json.loads((ranks.log_dir / "rank0.json").read_text())
    assert re.match(r"PeerError: rank 1 hangs: its process \(pid \d+\) has been stopped for", message), message


def test_a_stopped_process_stops_the_others(start_ranks, tmp_path):
    ranks = start_ranks(failure_cases.hung, 2, "stopped", str(tmp_path / "ready"))
    wait_for(ranks, lambda: all(Path(f"{tmp_path}/ready.{r}").exists() for r in range(2)))
    time.sleep(0.2)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    wait_for(ranks, lambda: ranks.poll()[0] is not None)
    os.kill(ranks.pids[1], signal.SIGCONT)
    zero, one = ranks.wait(60, check=False)
    assert "PeerError: rank 1 hangs" in zero.value["message"]
    assert "its process" in zero.value["message"]
    assert "PeerError: rank 1 hangs" in one.value["message"]  # it has been told, once it could hear
