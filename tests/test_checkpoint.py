"""Checkpoints: the same bits after a resume, on any number of ranks; killed, damaged and foreign ones."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path

import pytest
import rank_cases
import torch
from tiny_models import PlainGPT, family, lm_batch
from torch import nn
from training import state_of

import slidedp
from slidedp import checkpoints
from slidedp.executor.checkpoints.checkpoint_files import FileLayer, complete, partial_of
from slidedp.executor.errors import CheckpointError

pytestmark = pytest.mark.cpu

OPTIMIZER = slidedp.AdamW(lr=1e-2)


def compiled(model, **options):
    return slidedp.compile(model, "cpu", optimizer=OPTIMIZER, **options)


def bits(plan):
    state = state_of(plan)
    parts = {"weight": state.params, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []


def test_interrupted_equals_uninterrupted(tmp_path):
    """Dropout too: the generators come back. The resumed plan moves differently (chunks, source) on purpose."""
    model, batches = PlainGPT(dropout=0.3), [lm_batch(seed=i) for i in range(8)]
    torch.manual_seed(3)
    with compiled(copy.deepcopy(model)) as plan:
        want = [plan.run(b).loss for b in batches]
        want_state = bits(plan)
    torch.manual_seed(3)
    with compiled(copy.deepcopy(model)) as plan:
        got = [plan.run(b).loss for b in batches[:5]]
        path = plan.save(tmp_path, extra={"position": 5})
        plan.run(batches[5])  # lost
    torch.manual_seed(99)
    with compiled(copy.deepcopy(model), policy={"chunks": 3, "source": "cast"}) as plan:
        found = plan.resume(tmp_path)
        assert (found.path, found.step, found.extra, found.passed_over) == (path, 5, {"position": 5}, ())
        results = [plan.run(b) for b in batches[found.extra["position"] :]]
        got += [r.loss for r in results]
        assert [r.step for r in results] == [6, 7, 8]
        assert_same_bits(bits(plan), want_state)
    assert got == want


def test_a_running_plan_goes_back(tmp_path):
    with compiled(PlainGPT()) as plan:
        plan.run(lm_batch(seed=0))
        plan.save(tmp_path)
        before = bits(plan)
        want = [plan.run(lm_batch(seed=i)).loss for i in (1, 2)]
        assert plan.resume(tmp_path).step == 1
        assert_same_bits(bits(plan), before)
        results = [plan.run(lm_batch(seed=i)) for i in (1, 2)]
        assert [r.loss for r in results] == want
        assert [r.step for r in results] == [2, 3]


@pytest.mark.parametrize(("saved_on", "resumed_on"), [(1, 2), (3, 1)])
def test_other_numbers_of_ranks(run_ranks, tmp_path, saved_on, resumed_on):
    """Some state in HBM on one side, none or other on the other."""
    saved = run_ranks(rank_cases.save_checkpoint, saved_on, str(tmp_path), ["L00", "shared0"])[0].value
    for rank in run_ranks(rank_cases.resume_checkpoint, resumed_on, str(tmp_path), ["L00", "L01"]):
        assert rank.value == saved


def test_where_the_state_lives_changes_no_bit_of_a_checkpoint(tmp_path):
    """Saved from HBM, resumed on the host, and the other way round: as if nobody had stopped."""
    model, batches = PlainGPT(), [lm_batch(seed=i) for i in range(4)]
    homes = {"host": {}, "hbm": {"state": "hbm"}}

    def train(start, policy, count):
        with compiled(copy.deepcopy(model), policy=policy, example=batches[0], update_kernel="torch") as plan:
            if start:
                plan.resume(tmp_path)
            for batch in batches[start : start + count]:
                plan.run(batch)
            plan.save(tmp_path)
            return {n: p.clone() for n, p in plan.model.named_parameters()}

    torch.set_num_threads(1)
    want = train(0, homes["host"], 4)
    for first, second in (("host", "hbm"), ("hbm", "host"), ("hbm", "hbm")):
        for old in complete(tmp_path):
            shutil.rmtree(old)
        train(0, homes[first], 2)
        assert_same_bits(train(2, homes[second], 2), want)


def test_a_frozen_layer_in_hbm_has_no_moments(tmp_path):
    """Nor is there any memory for them, if no other state lives there."""
    model = PlainGPT()
    model.blocks[0].requires_grad_(False)
    with compiled(model, policy={"layers": {"L00": {"state": "hbm"}}}, example=lm_batch(), update_kernel="torch") as plan:
        plan.run(lm_batch())
        plan.save(tmp_path)
        want = plan.run(lm_batch()).loss
        plan.resume(tmp_path)
        assert plan.run(lm_batch()).loss == want


def test_a_directory_that_transformers_loads(tmp_path):
    from transformers import AutoModelForCausalLM

    model = family("llama")
    with compiled(model) as plan:
        plan.run(lm_batch())
        path = plan.save(tmp_path)
        weights = {n: p.clone() for n, p in plan.model.state_dict().items()}
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert_same_bits(loaded.state_dict(), weights)


class Normed(nn.Module):
    """Running statistics are part of a model's state."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_buffers_come_back(tmp_path):
    def loss(out, batch):
        return out.square().sum(), out.numel()

    batch = {"x": torch.randn(16, 8)}
    with compiled(Normed(), loss_fn=loss) as plan:
        plan.run(batch)
        plan.save(tmp_path)
        want = {n: b.clone() for n, b in plan.model.named_buffers()}
    with compiled(Normed(), loss_fn=loss, example=batch) as plan:
        plan.resume(tmp_path)
        assert_same_bits(dict(plan.model.named_buffers()), want)


class Killed(BaseException):
    """Not an Exception: nothing on the way may clean up after it, as after SIGKILL."""


class KilledFiles(FileLayer):
    """Dies at the `at`-th operation, before it; a write dies half way."""

    def __init__(self, at):
        self.at, self.done = at, 0

    def _tick(self):
        self.done += 1
        if self.done > self.at:
            raise Killed

    def make_directory(self, path):
        self._tick()
        super().make_directory(path)

    def write(self, path, write):
        write(path)
        try:
            self._tick()
        except Killed:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            raise

    def rename(self, source, target):
        self._tick()
        super().rename(source, target)

    def remove(self, path):
        try:
            self._tick()
        except Killed:
            for file in list(path.iterdir())[:1]:
                file.unlink()
            raise
        super().remove(path)

    def sync(self, path):
        self._tick()


def test_a_kill_at_every_file_operation(tmp_path):
    """Two checkpoints there, a third being saved: whatever it dies at, the second or the third is found, whole."""
    with compiled(PlainGPT()) as plan:
        states = {}
        for step in (1, 2):
            plan.run(lm_batch(seed=step))
            states[step] = bits(plan)
            plan.save(tmp_path / "0")
        plan.run(lm_batch(seed=3))
        states[3] = bits(plan)
        found, at = [], 0
        while True:
            directory = tmp_path / str(at + 1)
            for path in (tmp_path / "0").rglob("*"):
                if path.is_file():
                    (target := directory / path.relative_to(tmp_path / "0")).parent.mkdir(parents=True, exist_ok=True)
                    target.hardlink_to(path)
            (directory / ".step-00000009.partial").mkdir()  # an earlier kill's
            files = KilledFiles(at)
            try:
                checkpoints.save(plan._machine, directory, None, 2, files)
            except Killed:
                found.append(resumed(directory, states))
                at += 1
                continue
            break
        assert resumed(directory, states) == 3
        assert [p.name for p in complete(directory)] == ["step-00000003", "step-00000002"]
        assert (directory / "latest").read_text() == "step-00000003\n"
        assert not list(directory.glob(".*"))
    assert len(found) == files.done >= 15
    assert found == sorted(found)
    assert set(found) == {2, 3}


def resumed(directory, states):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with compiled(PlainGPT(), example=lm_batch()) as plan:
            step = plan.resume(directory).step
            assert_same_bits(bits(plan), states[step])
    return step


@pytest.fixture
def two_saved(tmp_path):
    with compiled(PlainGPT()) as plan:
        for step in (1, 2):
            plan.run(lm_batch(seed=step))
            plan.save(tmp_path)
    return tmp_path


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("harm", "said"), [
    (lambda d: flip(next(d.glob("model-*"))), r"model-00001.* has another checksum"),
    (lambda d: next(d.glob("moments-*")).unlink(), r"moments-00001.* is missing"),
    (lambda d: (d / "training.json").write_text("{"), r"training.json has 1 bytes, not \d+"),
    (lambda d: (d / "manifest.json").write_text("{"), r"manifest.json cannot be read"),
])  # fmt: skip
def test_a_damaged_one_is_named_and_passed_over(two_saved, harm, said):
    harm(two_saved / "step-00000002")
    with compiled(PlainGPT(), example=lm_batch()) as plan:
        with pytest.warns(UserWarning, match=f"step-00000002 is damaged .*{said}.*trying the one before"):
            found = plan.resume(two_saved)
        assert found.step == 1
        assert len(found.passed_over) == 1
        with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match=said):
            plan.resume(two_saved / "step-00000002")


def test_bad_requests_lose_nothing(two_saved):
    with compiled(PlainGPT(width=64)) as plan:
        with pytest.raises(CheckpointError, match="no such directory"):
            plan.resume(two_saved / "elsewhere")
        with pytest.raises(ValueError, match="has not seen a batch"):
            plan.save(two_saved)
        with pytest.raises(CheckpointError, match=r"another model: parameter .* has shape \[.*\] there and \[.*\] here"):
            plan.resume(two_saved)
        plan.run(lm_batch())
    with compiled(PlainGPT(layers=6)) as plan:
        plan.resume(two_saved)  # of which it has all; that it has more shows when it is traced
        with pytest.raises(CheckpointError, match=r"another model: parameter .* has shape \(none\) there and \[.*\] here"):
            plan.run(lm_batch())
    with compiled(PlainGPT()) as plan:
        plan.run(lm_batch())
        with pytest.raises(ValueError, match="JSON"):
            plan.save(two_saved, extra={"loader": object()})
        with pytest.raises(ValueError, match="keep=0"):
            plan.save(two_saved, keep=0)
        plan.run(lm_batch())
        assert plan.save(two_saved, keep=3).name == "step-00000002.1"  # an own one, although step 2 was there
        assert plan.resume(two_saved).path.name == "step-00000002.1"
    assert not partial_of(two_saved / "step-00000002").exists()
    manifest = json.loads(Path(two_saved / "step-00000002.1" / "manifest.json").read_text())
    assert manifest["ranks"] == 1
