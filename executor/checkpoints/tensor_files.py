"""Safetensors files written piece by piece, in any order and by several ranks: where each element goes.

The bytes are those of ``safetensors.torch.save_file`` for the same tensors (format: a little-endian 64-bit length, a JSON header
padded to 8 bytes, then the tensors back to back, all FP32 here and so in the order of their names).
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slidedp.compiler.layergraph import Group
from slidedp.executor.state.state_layout import Buffer

_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class TensorFile:
    """Name, header, and where each tensor begins, in bytes from the start of the file."""

    name: str
    header: bytes
    begins: Mapping[str, int]


def layout(name: str, shapes: Mapping[str, Sequence[int]]) -> TensorFile:
    """The file that holds FP32 tensors of these shapes, by name."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, at = {}, 0
    for tensor in sorted(shapes):
        size = 4
        for n in shapes[tensor]:
            size *= n
        entries[tensor] = {"dtype": "F32", "shape": list(shapes[tensor]), "data_offsets": [at, at + size]}
        begins[tensor], at = at, at + size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return TensorFile(name, header, {tensor: len(header) + begin for tensor, begin in begins.items()})


def tensor_name(buffer: Buffer, param: str) -> str:
    """The name in a file of a parameter's weights, or of one of its moments."""
    return param if buffer is Buffer.MASTER else f"{buffer}.{param}"


def extents(group: Group, lo: int, hi: int, buffer: Buffer, file: TensorFile) -> Iterator[tuple[int, int, int]]:
    """(byte in the file, first, last + 1 element of ``[lo, hi)``, from `lo`) for what these elements of a group's flat buffer
    have of each parameter. Padding between parameters is nowhere in the file.
    """
    for p in group.params:
        a, b = max(lo, p.offset), min(hi, p.offset + p.numel)
        if a < b and (p.trainable or buffer is Buffer.MASTER):
            yield file.begins[tensor_name(buffer, p.name)] + 4 * (a - p.offset), a - lo, b - lo
