"""Words between ranks, boards, abort records and the watchdog. Ranks are threads, or processes where one must die."""

import os
import random
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from slidedp.executor.failures.liveness import Watchdog, is_alive, process_start_time
from slidedp.executor.ranks.meetings import Meetings
from slidedp.executor.shared.segment import SharedSegment
from slidedp.executor.shared.words import LEFT, LOSS_DEPTH, NUM_VALUES, AbortReason, Board, PeerError, Words, WordsLayout
from slidedp.executor.streams.tickets import Ticket

pytestmark = pytest.mark.cpu

WAIT_S = 60  # for what must come; nothing waits for so long, however busy the machine is


class SlowReader(Words):
    """Dawdles between seeing that everything is there and reading it."""

    def _poll(self, ready, check, **options):
        super()._poll(ready, check, **options)
        time.sleep(2e-3)


@pytest.fixture(params=[True, False], ids=["native", "numpy"])
def make_ranks(request):
    def make(world_size, num_words=2, num_params=5):
        layout = WordsLayout(num_words, world_size, num_params)
        segment = SharedSegment("control", layout.nbytes)
        return [Words(segment, layout, rank, native=request.param) for rank in range(world_size)]

    return make


def in_threads(ranks, function):
    def run(words):
        try:
            return function(words)
        except BaseException as error:  # or the other threads would wait for ever
            words.abort(words.rank, AbortReason.ERROR, repr(error))
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [f.result(timeout=60) for f in [pool.submit(run, words) for words in ranks]]


def test_a_word_is_reached_when_all_ranks_have_published(make_ranks):
    first, second = make_ranks(2)
    assert first.reached(1, 0)
    first.publish(1, 3)
    assert not first.reached(1, 1)
    second.publish(1, 2)
    assert first.reached(1, 2)
    assert not second.reached(1, 3)
    assert not first.reached(0, 1)


def test_exchange_and_losses_over_many_steps_with_random_delays(make_ranks):
    """Each rank checks every value of every step: a board reused too early would show another step's."""
    num_steps = 100
    ranks = make_ranks(3)
    ranks[0].__class__ = SlowReader

    def run(words):
        delays = random.Random(words.rank)
        for step in range(1, num_steps + 1):
            got = words.exchange(step, [step * 10 + words.rank, -words.rank])
            assert [g[:3] for g in got] == [[step * 10 + r, -r, 0] for r in range(3)]
            words.post_loss(step, step + words.rank / 7)
            if delays.random() < 0.1:
                time.sleep(delays.random() * 2e-3)
            assert words.loss_sum(step) == step + (step + 1 / 7) + (step + 2 / 7)
        return True

    assert in_threads(ranks, run) == [True] * 3


def test_losses_are_added_one_after_the_other(make_ranks):
    """With the bits of a loop on every Python; `sum` would give 2.0 from Python 3.12 on."""
    ranks = make_ranks(4)
    for words, value in zip(ranks, (1.0, 1e100, 1.0, -1e100), strict=True):
        words.post_loss(1, value)
    assert [words.loss_sum(1) for words in ranks] == [0.0] * 4


def test_exchanges_back_to_back_with_one_slow_reader(make_ranks):
    ranks = make_ranks(2)
    ranks[0].__class__ = SlowReader

    def run(words):
        return [words.exchange(step, [step + words.rank]) for step in range(50)]

    for seen in in_threads(ranks, run):
        assert [[g[0] for g in got] for got in seen] == [[step, step + 1] for step in range(50)]


def test_meetings_carry_lists_and_bytes_of_any_length_beside_the_steps(make_ranks):
    ranks = make_ranks(2)
    ranks[0].__class__ = SlowReader

    def run(words):
        out = []
        for board in (Board.SAVE, Board.STEP, Board.SAVE):
            meetings = Meetings(words, board, lambda: None, lambda e: e)
            out.append((meetings.gather_ints([words.rank * 100 + i for i in range(19)]), meetings.exchange_ints([words.rank]),
                        meetings.broadcast_bytes(b"" if words.rank else b"x" * 77), meetings.barrier()))  # fmt: skip
            assert words.exchange(len(out), [7]) == [[7] + [0] * (NUM_VALUES - 1)] * 2
        return out

    want = ([list(range(19)), list(range(100, 119))], [0], b"x" * 77, None)
    assert in_threads(ranks, run) == [[want] * 3] * 2


def test_an_error_of_a_rank_ends_no_meeting_of_a_save(make_ranks):
    """A rank that has failed may yet write what it has read; one that is gone, which `check` says, will not."""
    first, second = make_ranks(2)
    second.abort(1, AbortReason.ERROR, "out of memory")
    with pytest.raises(PeerError, match="out of memory"):
        Meetings(first, Board.STEP, lambda: None, lambda e: e).barrier()
    looks = iter([None, None, PeerError(1, "rank 1 hangs")])

    def check():
        if error := next(looks):
            raise error

    with pytest.raises(RuntimeError, match="said of PeerError: rank 1 hangs"):
        Meetings(first, Board.SAVE, check, lambda e: RuntimeError(f"said of PeerError: {e}")).barrier()


def test_a_loss_may_be_read_late_but_not_too_late(make_ranks):
    (words,) = make_ranks(1)
    for step in range(LOSS_DEPTH):
        words.post_loss(step, float(step))
    assert [words.loss_sum(step) for step in range(LOSS_DEPTH)] == [float(s) for s in range(LOSS_DEPTH)]
    words.post_loss(LOSS_DEPTH, 9.0)
    with pytest.raises(AssertionError, match="step 0 was read too late"):
        words.loss_sum(0)


def test_ranks_at_different_steps_are_named(make_ranks):
    def run(words):
        with pytest.raises(PeerError, match=r"rank [01] is at step [78], rank [01] at step [78]: the ranks have diverged"):
            words.exchange(7 + words.rank, [])
        return True

    assert in_threads(make_ranks(2), run) == [True] * 2


def test_presence_flags_are_kept_per_rank_and_step(make_ranks):
    first, second = make_ranks(2)
    first.present(4)[0, 1] = 1
    second.present(4)[1, 3] = 1
    assert first.any_present(4, 0, 5).tolist() == [False, True, False, True, False]
    assert second.any_present(4, 2, 4).tolist() == [False, True]
    assert not first.any_present(5, 0, 5).any()


def test_parts_do_not_overlap(make_ranks):
    ranks = make_ranks(3, num_words=7, num_params=70)
    ranks[0].present(0)[:] = 255
    ranks[0].present(1)[:] = 255
    for words in ranks:
        words.post_loss(1, 1.0)
        words.alive[words.rank, :2] = 5
    assert all(words.aborted() is None for words in ranks)
    assert ranks[1].reached(6, 0)
    assert not ranks[1].reached(6, 1)
    ranks[2].abort(2, AbortReason.ERROR, "x" * 5000)
    assert ranks[0].aborted().text == "x" * 1000
    assert (ranks[0].alive[:, :2] == 5).all()
    assert ranks[0].loss_sum(1) == 3.0


def test_abort_reaches_every_wait(make_ranks):
    ranks = make_ranks(3)

    def run(words):
        if words.rank == 2:
            words.abort(2, AbortReason.ERROR, "layer 3: out of memory")
            words.abort(2, AbortReason.DIED, "not this one")
            return True
        with pytest.raises(PeerError, match=r"^rank 2 stopped the run: layer 3: out of memory$") as caught:
            (words.exchange(1, []) if words.rank else words.wait(0, 1))
        return caught.value.rank == 2

    assert in_threads(ranks, run) == [True] * 3
    assert ranks[0].aborted().reason is AbortReason.ERROR


def test_wait_calls_check(make_ranks):
    first, _ = make_ranks(2)

    def check():
        raise KeyError("stop")

    with pytest.raises(KeyError):
        first.wait(0, 1, check)


def test_a_rank_that_closed_is_not_waited_for(make_ranks):
    first, second = make_ranks(2)
    second.publish(0, 1)
    second.store(second.alive[1], 0, LEFT)
    first.publish(0, 1)
    first.wait(0, 1)  # it had done this before it left
    with pytest.raises(PeerError, match=r"rank 1 has closed its plan after step 0 while rank 0 still waits"):
        first.wait(0, 2)


# ---- watchdog ---------------------------------------------------------------------------------------------------


def test_liveness_of_a_process_and_of_its_zombie():
    process = subprocess.Popen(["sleep", "60"])
    started = process_start_time(process.pid)
    assert is_alive(process.pid, started)
    assert not is_alive(process.pid, started - 1)  # the id has been given to another process
    process.kill()
    while is_alive(process.pid, started):  # it stays a zombie until waited for
        time.sleep(0.01)
    assert os.path.exists(f"/proc/{process.pid}/stat")
    process.wait()
    assert not is_alive(process.pid, started)


def two_with_a_dead_peer(make_ranks):
    first, second = make_ranks(2)
    process = subprocess.Popen(["sleep", "60"])
    second.alive[1, :2] = process.pid, process_start_time(process.pid)
    return first, process


def test_a_dead_peer_is_reported_and_a_stuck_process_ended(make_ranks, capfd):
    words, peer = two_with_a_dead_peer(make_ranks)
    ended = threading.Event()
    dog = Watchdog(words, interval_s=0.01, grace_s=0.05, exit_process=lambda code: ended.set())
    assert dog.verdict(0.05) is None
    dog.check()
    peer.kill()
    peer.wait()
    assert ended.wait(WAIT_S)  # the owner, this thread, has not called check
    assert f"rank 1 (pid {peer.pid}) died" in capfd.readouterr().err
    with pytest.raises(PeerError, match=rf"rank 1 \(pid {peer.pid}\) died"):
        dog.check()
    assert words.aborted(own=True).reason is AbortReason.DIED
    dog.stop()


def test_who_ended_because_another_had_died_is_not_blamed(make_ranks):
    """Rank 0 has seen rank 1 die, said so and ended before rank 2 looks."""
    first, second, third = make_ranks(3)
    for words in (first, second):
        process = subprocess.Popen(["sleep", "60"])
        words.alive[words.rank, :2] = process.pid, process_start_time(process.pid)
        process.kill()
        process.wait()
    first.abort(1, AbortReason.DIED, "rank 1 (pid 7) died")
    dog = Watchdog(third, interval_s=0.01, grace_s=60, exit_process=lambda code: None)
    assert dog.verdict(WAIT_S).rank == 1
    with pytest.raises(PeerError, match=r"rank 1 \(pid 7\) died"):
        dog.check()
    dog.stop()


def test_a_rank_that_has_noticed_is_left_alone(make_ranks):
    words, peer = two_with_a_dead_peer(make_ranks)
    ended = threading.Event()
    noticed = threading.Event()  # its grace begins after that
    dog = Watchdog(words, interval_s=0.01, grace_s=0.1, exit_process=lambda code: ended.set(),
                   on_failure=lambda error: noticed.wait(WAIT_S))
    peer.kill()
    peer.wait()
    with pytest.raises(PeerError, match="died"):
        words.wait(0, 1, dog.check)
    assert dog.verdict(WAIT_S).rank == 1
    noticed.set()
    assert not ended.wait(0.3)
    dog.stop()
    dog.stop()


def test_a_stuck_rank_has_time_to_notice(make_ranks):
    words, peer = two_with_a_dead_peer(make_ranks)
    ended = threading.Event()
    dog = Watchdog(words, interval_s=0.01, grace_s=60, exit_process=lambda code: ended.set())
    peer.kill()
    peer.wait()
    while words.aborted(own=True) is None:
        time.sleep(0.01)
    assert not ended.wait(0.2)
    dog.stop()


def test_a_rank_in_its_callers_code_is_not_ended_because_another_hangs(make_ranks):
    first, second = make_ranks(2)
    ended, call = threading.Event(), Ticket()

    def exit_process(code):
        ended.set()
        call._mark_done()

    dog = Watchdog(first, interval_s=0.01, grace_s=0.05, exit_process=exit_process)
    told = threading.Thread(target=second.abort, args=[1, AbortReason.HUNG, "rank 1 hangs"])  # this one is in no call of ours
    told.start()
    assert not ended.wait(0.3)
    assert call.wait_done(WAIT_S)
    assert ended.is_set()
    told.join()
    dog.stop()


def train_until_killed() -> None:
    """One of three ranks, one of which the test kills: rank 0 waits for a word, rank 2 is stuck where nothing can reach it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def exchange(ints):
        tensor = torch.tensor(ints, dtype=torch.int64)
        dist.broadcast(tensor, src=0)
        return tensor.tolist()

    layout = WordsLayout(1, 3, 1)
    segment = SharedSegment("control", layout.nbytes, rank=rank, exchange=exchange)
    dist.barrier()
    words = Words(segment, layout, rank)
    dog = Watchdog(words, interval_s=0.1, grace_s=0.5)
    dist.barrier()
    print("ready", flush=True)
    if rank == 0:
        words.wait(0, 1, dog.check)
    time.sleep(1000)


def test_after_sigkill_of_one_rank_the_others_exit_naming_it(start_ranks):
    ranks = start_ranks(train_until_killed, 3)
    deadline = time.monotonic() + 60
    while not all("ready" in ranks.output(r) for r in range(3)):
        assert time.monotonic() < deadline, [ranks.output(r) for r in range(3)]
        time.sleep(0.05)
    os.kill(ranks.pids[1], signal.SIGKILL)
    results = ranks.wait(60, check=False)  # raises when any still runs
    assert [r.returncode for r in results] == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        assert f"rank 1 (pid {ranks.pids[1]}) died" in results[rank].output
    assert not [f for f in os.listdir("/dev/shm") if "slidedp" in f]
