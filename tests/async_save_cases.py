"""What the tests of saves beside training share: a small model, plans of it, and disks that are slow, not ready or full."""

from __future__ import annotations

import errno
import threading
import time

import torch
from tiny_models import PlainGPT

import slidedp
from slidedp.executor.checkpoints.checkpoint_files import FileLayer

OPTIMIZER = slidedp.AdamW(lr=1e-2)
SMALL = 64 * 1024
POLICIES = {
    "host": {"chunks": 3},
    "mixed": {"chunks": 2, "layers": {"L01": {"state": "hbm"}, "prologue": {"state": "hbm"}}},
    "deferred": {"update": "deferred", "chunks": 2, "source": "cast"},
    "speculative": {"update": "speculative", "chunks": 2},
}


def compiled(policy, options=None, **more):
    plan = slidedp.compile(frozen_in_part(), "cpu", optimizer=OPTIMIZER, policy=policy, **more)
    plan._options = options or plan._options
    return plan


def frozen_in_part():
    torch.manual_seed(0)
    model = PlainGPT(width=32)
    for block in model.blocks:
        block.qkv.bias.requires_grad_(False)
    return model


def files_of(path):
    return {f.name: f.read_bytes() for f in path.iterdir()}


class SlowFiles(FileLayer):
    """A disk that takes its time."""

    def write_at(self, fd, data, offset):
        time.sleep(1e-3)
        super().write_at(fd, data, offset)


class HeldFiles(FileLayer):
    """A disk that takes nothing for now."""

    def __init__(self):
        self.go_on = threading.Event()

    def write_at(self, fd, data, offset):
        assert self.go_on.wait(90)
        super().write_at(fd, data, offset)

    def release(self, handle):
        """Once an update is held up."""
        deadline = time.monotonic() + 60
        while handle.stall_s == 0:
            assert time.monotonic() < deadline, "no update waits for the save"
            time.sleep(1e-3)
        self.go_on.set()


class FullDisk(FileLayer):
    """Has no room after some writes."""

    def __init__(self, room=5):
        self.room = room

    def write_at(self, fd, data, offset):
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write_at(fd, data, offset)
