"""Ranks agree on one set of decisions: rank 0's. Costs and budgets may differ between ranks, routes and chunks must not."""

from __future__ import annotations

import json
from dataclasses import asdict

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.policy import PLAN_KEYS, apply_policy
from slidedp.executor.collectives import Collectives


def agree_on_decisions(decisions: Decisions, layers: LayerGraph, collectives: Collectives) -> Decisions:
    """Rank 0's `decisions` on every rank, sent as text: no pickle. Collective."""
    if collectives.world_size == 1:
        return decisions
    pins = {key: getattr(decisions, key) for key in PLAN_KEYS}
    pins["layers"] = {name: asdict(d) for name, d in decisions.groups.items()}
    received = json.loads(collectives.broadcast_bytes(json.dumps(pins).encode()))
    return apply_policy(decisions, received, layers, where="rank 0's decisions")
