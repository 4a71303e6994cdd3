"""What ops do: one method per op kind, which resolves an op to a closure over the tensors that it touches.

Pattern: torch.fx.Interpreter (a method per opcode); the pre-bound closures are what keeps the issue cost per op small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from slidedp.compiler.decisions import Activation
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import Op, OpGraph, Ref, RowSet, Stream, split_lane
from slidedp.executor.devices.backend import poison
from slidedp.executor.machine.graph_facts import GraphFacts, leaving, read_last
from slidedp.executor.machine.step import Step
from slidedp.executor.machine.step_updates import count_update
from slidedp.executor.native.build import What
from slidedp.executor.optim.clipping import norms_of, norms_of_shard

if TYPE_CHECKING:
    from slidedp.executor.machine.machine import Machine
    from slidedp.executor.optim.adam import BoundUpdate
    from slidedp.executor.optim.clipping import Clipping

Task = Callable[[Step], None]


class Closures:
    """Makes the closures of one graph's ops, on one machine."""

    def __init__(self, graph: OpGraph, layers: LayerGraph, machine: Machine, facts: GraphFacts) -> None:
        self.graph, self.layers, self.machine, self.facts = graph, layers, machine, facts
        self.rank, self.world = machine.rank, machine.world_size
        self.bound: dict[str, tuple[BoundUpdate, int | None]] = {}  # ops that can run without Python: update, first parameter

    def of(self, op: Op) -> Task:
        """The function that the op's stream runs in each step."""
        task: Task = getattr(self, op.kind.value)(op)
        if not self.machine.options.poison:
            return task
        released, device = self.released(op), self.machine.backend.device

        def poisoning(step: Step) -> None:
            task(step)
            for tensor in released:
                poison(tensor, device)

        return poisoning

    def released(self, op: Op) -> list[torch.Tensor]:
        """Test mode: slots that nothing reads any more once `op` has: weights and moved activations whole, gradients by chunk."""
        slots, chunks = read_last(self.graph, op)
        return [*(self.machine.buffers[ref.place] for ref in slots), *map(self.device, chunks)]

    # ---- where things are ----

    def span(self, ref: Ref) -> tuple[int, int]:
        """This rank's `[lo, hi)` of an access, in elements of the group."""
        ranges = ref.ranges(self.graph.group_by_name[ref.group], self.world, self.rank)
        assert len(ranges) == 1, f"{ref} is not one range"
        return ranges[0]

    def device(self, ref: Ref) -> torch.Tensor:
        """The elements of an access to a slot. Staging and reduced shards lie at the start of theirs."""
        lo, hi = self.span(ref)
        slot = self.machine.buffers[ref.place]
        return slot[: hi - lo] if ref.value[:2] in ("T.", "R.") else slot[lo:hi]

    def state(self, ref: Ref) -> Callable[[Step], torch.Tensor]:
        """The elements of an access to `P` or `S` on the host, wherever a step has them."""
        lo, hi = self.span(ref)
        group = ref.group
        flat = self.machine.state.delivered_from(group, cast=ref.value[0] == "P")
        first, second = (side[lo:hi] for side in flat)
        return (lambda step: first) if flat[0] is flat[1] else (lambda step: second if step.side(group) else first)

    def host(self, ref: Ref) -> torch.Tensor:
        lo, hi = self.span(ref)
        return self.machine.host_buffer(ref.value[0], ref.group)[lo:hi]

    def places(self, refs: tuple[Ref, ...], head: str) -> dict[str, str]:
        return {ref.group: ref.place for ref in refs if ref.value.startswith(head)}

    # ---- delivery ----

    def host_cast(self, op: Op) -> Task:
        source, target = self.state(op.reads[0]), self.device(op.writes[0])
        cast, count = self.machine.casting.cast, op.bytes

        def task(step: Step) -> None:
            cast(source(step), target)
            step.count("host_cast", count)

        return task

    def h2d(self, op: Op) -> Task:
        read, target = op.reads[0], self.device(op.writes[0])
        if not read.place:
            return self.copy(self.state(read), target, op)
        staged = self.device(read)
        return self.copy(lambda step: staged, target, op)

    def copy(self, source: Callable[[Step], torch.Tensor], target: torch.Tensor, op: Op) -> Task:
        copy, kind = self.machine.backend.copy, op.kind.value
        assert target.numel() * target.element_size() == op.bytes, f"{op.name} moves {op.bytes} bytes, not {target.nbytes}"

        def task(step: Step) -> None:
            copy(target, source(step))
            step.count(kind, target.nbytes)

        return task

    def all_gather(self, op: Op) -> Task:
        assert op.chunk is not None
        place = op.writes[0].place
        slot, (lo, hi) = self.machine.buffers[place], op.chunk.bounds(self.graph.group_by_name[op.writes[0].group], self.world)
        gather, part = self.machine.collectives.all_gather, slot[lo:hi]

        def task(step: Step) -> None:
            gather(part)
            step.count("all_gather", op.bytes)

        return task

    # ---- compute ----

    def prologue(self, op: Op) -> Task:
        weights = self.machine.buffers.leaves(self.places(op.reads, "W."))
        assert not leaving(self.graph, op), f"{op.name}: nothing can have left before the first stage"

        def task(step: Step) -> None:
            lane = step.lanes[op.lane]

            def attempt() -> None:
                lane.runner.start(step.device_batch(lane), step.training)
                lane.runner.prologue(weights)

            step.fallback.run(step, op, attempt)

        return task

    def forward(self, op: Op) -> Task:
        weights = self.machine.buffers.leaves(self.places(op.reads, "W."))
        kept = {ref.value.partition(".")[0]: ref.place for ref in op.writes}
        act = Activation.SELECTIVE if "sel" in kept else Activation.RECOMPUTE
        if "act" in kept:
            act = Activation.OFFLOAD if kept["act"] else Activation.RETAIN
        left, poisoned = leaving(self.graph, op), self.machine.options.poison
        stays = not any(ref.value in self.facts.moved_by for ref in op.writes[1:])
        lane = op.lane

        def task(step: Step) -> None:
            for value, of in left:
                step.lanes[of].runner.values.leave(value, poisoned=poisoned)
            runner, fallback = step.lanes[lane].runner, step.fallback

            def attempt() -> None:
                runner.forward(op.layer, weights, fallback.activation(lane, op.layer, act), stays)

            fallback.run(step, op, attempt, act)

        return task

    def act_offload(self, op: Op) -> Task:
        (value, lane), buffer = split_lane(op.reads[0].value), self.machine.buffers[op.writes[0].place]
        copy = self.machine.backend.copy

        def task(step: Step) -> None:
            step.count("act_offload", step.lanes[lane].runner.values.offload(value, buffer, copy))

        return task

    def act_reload(self, op: Op) -> Task:
        buffer, slot = self.machine.buffers[op.reads[0].place], self.machine.buffers[op.writes[0].place]
        (value, lane), copy = split_lane(op.writes[0].value.removeprefix("back.")), self.machine.backend.copy

        def task(step: Step) -> None:
            step.count("act_reload", step.lanes[lane].runner.values.reload(value, buffer, slot, copy))

        return task

    def recompute(self, op: Op) -> Task:
        weights, lane = self.machine.buffers.leaves(self.places(op.reads, "W.")), op.lane
        return lambda step: step.fallback.run(step, op, lambda: step.lanes[lane].runner.recompute(op.layer, weights))

    def backward(self, op: Op) -> Task:
        weights, grads = self.machine.buffers.leaves(self.places(op.reads, "W.")), self.gradients(op)
        lane, finish = op.lane, self.rounding(op)

        prologue = op.layer == self.layers.stages[0].name  # torch holds its graph, and has used it up when it fails
        looked_up = [g for g in grads if g in self.facts.split and prologue]

        def task(step: Step) -> None:
            micro = step.lanes[lane]
            present = step.fallback.run(
                step, op, lambda: micro.runner.backward(op.layer, weights, grads, micro.has_tokens), once=prologue)
            finish()
            for group in looked_up if micro.has_tokens else ():
                self.require_gradient(group, present, step)
            step.mark_present(micro, present)

        return task

    def require_gradient(self, group: str, present: Mapping[str, bool], step: Step) -> None:
        """Raises if a split embedding has no gradient: its early updates assume that the loss depends on the rows looked up."""
        name = self.layers.group(group).params[0].name
        if not present[name]:
            raise RuntimeError(f"step {step.number}: {name} has no gradient, though rows of it were looked up (detached?); "
                               f"compile with policy={{'layers': {{'{group}': {{'rows': 'whole'}}}}}}")

    def epilogue(self, op: Op) -> Task:
        weights, grads = self.machine.buffers.leaves(self.places(op.reads, "W.")), self.gradients(op)
        lane, finish = op.lane, self.rounding(op)

        def task(step: Step) -> None:
            micro = step.lanes[lane]
            if step.training:
                loss, present = step.fallback.run(
                    step, op, lambda: micro.runner.epilogue(weights, grads, step.loss_scale(micro), micro.has_tokens))
                finish()
                step.mark_present(micro, present)
            else:
                loss = step.fallback.run(step, op, lambda: micro.runner.evaluate(weights))
            step.keep_loss(micro, loss)

        return task

    def gradients(self, op: Op) -> dict[str, tuple[torch.Tensor, bool]]:
        """Group -> (flat slot of its gradient or of its sum over lanes, whether an op before this one has contributed)."""
        written = {head: [ref for ref in op.writes if ref.value.startswith(head)] for head in ("A.", "G.")}
        return {ref.group: (self.machine.buffers[ref.place], ref.version > 1) for ref in written["A."] or written["G."]}

    def rounding(self, op: Op) -> Callable[[], None]:
        """What the last lane does once it has added to its stage's sums: they become gradients."""
        sums = self.places(op.writes, "A.")
        flat = [(ref.group, self.machine.buffers[ref.place], ref.version > 1) for ref in op.writes if ref.value.startswith("G.")]
        todo = [(group, self.machine.buffers[sums[group]], slot, accumulate) for group, slot, accumulate in flat if sums]

        def finish() -> None:
            for item in todo:
                self.machine.runners.slots.round(*item)

        return finish

    # ---- gradients home, and the update ----

    def reduce(self, op: Op) -> Task:
        source, target = self.device(op.reads[0]), self.device(op.writes[0])
        reduce = self.machine.collectives.reduce

        def task(step: Step) -> None:
            reduce(source, target)
            step.count("reduce", op.bytes)

        return task

    def d2h(self, op: Op) -> Task:
        source = self.device(op.reads[0])
        return self.copy(lambda step: source, self.host(op.writes[0]), op)

    def host_reduce(self, op: Op) -> Task:
        lo, hi = self.span(op.reads[0])
        target, group = self.host(op.writes[0]), op.writes[0].group
        sources = [self.machine.raw_gradient(group, rank)[lo:hi] for rank in range(self.world)]
        reduce = self.machine.summing.reduce

        def task(step: Step) -> None:
            reduce(sources, target)
            step.count("host_reduce", op.bytes)

        return task

    def grad_norm(self, op: Op) -> Task:
        clipping = self.machine.clipping
        assert clipping is not None, "only deferred updates read a norm"
        match op.writes[0].value:
            case "norms":
                return self.norms_home(op)
            case "norm":
                return lambda step: clipping.post(step.home_norms, step.number)
            case "clip":
                return self.clip(clipping)
        return self.partial_norms(op)

    def partial_norms(self, op: Op) -> Task:
        gradient, value = op.reads[0], op.writes[0].value
        if gradient.chunk is None:
            slot = self.machine.buffers[gradient.place]
            params = [slot[p.offset : p.offset + p.numel] for p in self.layers.group(op.layer).params if p.trainable]
            norms = partial(norms_of, params)
        else:
            shard = self.host(gradient) if gradient.value.startswith("H.") else self.device(gradient)
            norms = partial(norms_of_shard, shard)

        def task(step: Step) -> None:
            step.norms[value] = norms()
            step.count("grad_norm", op.bytes)

        return task

    def norms_home(self, op: Op) -> Task:
        values, to_host = [ref.value for ref in op.reads], self.machine.backend.to_host

        def task(step: Step) -> None:
            for device in dict.fromkeys(step.norms[v].device for v in values):
                step.home_norms.append(to_host(torch.cat([step.norms[v] for v in values if step.norms[v].device == device])))

        return task

    def clip(self, clipping: Clipping) -> Task:
        partials = next(o for o in self.graph.ops if o.writes and o.writes[0].value == "norms").reads
        order = clipping.model_order(ref.value.removeprefix("norm.") for ref in partials) if self.world == 1 else None

        def task(step: Step) -> None:
            total = clipping.total_of(step.home_norms[0], order, step.number) if order else clipping.total(step.number)
            step.keep_clip(clipping.decide(total, step))

        return task

    def snapshot(self, op: Op) -> Task:
        (lo, hi), group, saves = self.span(op.reads[0]), op.layer, self.machine.saves

        def task(step: Step) -> None:
            if (snapshot := saves.reading) is not None:
                snapshot.read(group, lo, hi)

        return task

    def cpu_update(self, op: Op) -> Task:
        return self.update(op, What.SPECULATE if op.writes[0].value.startswith("C.") else What.UPDATE)

    def settle(self, op: Op) -> Task:
        return self.update(op, What.SETTLE)

    def update(self, op: Op, what: What) -> Task:
        (lo, hi), group, update, adam = self.span(op.writes[0]), op.layer, self.machine.updates.update, self.machine.adam
        rows, no_gradient = op.writes[0].rows, not op.reads[0].group
        if not adam.native and rows:  # torch's kernel updates a chunk in one go, when the gradient is complete
            if rows is RowSet.UNTOUCHED:
                return lambda step: None
            rows = RowSet.ALL
        options: dict[str, Any] = {"rows": rows, "no_gradient": no_gradient} if rows else {}
        if adam.native:
            first_param = None if rows else self.machine.updates.param_span(group)[0]
            self.bound[op.name] = adam.bind(group, lo, hi, what, **options), first_param

        def task(step: Step) -> None:
            scale = step.update_scale()
            if scale is None or (what is What.SPECULATE and scale != 1.0):  # known by now: nobody would take it
                return
            update(group, lo, hi, step, scale, what, **options)
            if rows is not RowSet.UNTOUCHED:
                count_update(step, what, hi - lo)

        return task

    def gpu_update(self, op: Op) -> Task:
        gradient, (lo, hi), weights = op.reads[0], self.span(op.writes[0]), self.device(op.writes[1])
        source, update, group = self.device(gradient), self.machine.updates.update_resident, op.layer
        last = op is self.graph.on(Stream.UPDATE)[-1]
        reduced = self.facts.reduced_by.get(gradient)

        def task(step: Step) -> None:
            scale = step.update_scale()  # the stream's thread waits for it, the GPU's goes on
            if scale is None:
                return
            if reduced is not None:
                step.tickets[reduced].wait_done()
            update(group, lo, source, weights, step, scale)
            step.count("gpu_update", hi - lo)
            if last and self.machine.resident and not self.machine.clipping:
                step.grad_norms = self.machine.resident.adam.norms()

        return task
