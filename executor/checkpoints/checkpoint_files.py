"""Checkpoint directories on disk: written beside, made whole by one rename, checked by size and checksum when read.

    DIR/latest                      name of the newest complete checkpoint
    DIR/step-00000020/              one checkpoint; the name appears only once everything in it is on the disk
    DIR/.step-00000020.partial/     one being written, or left by a killed process; the next save removes it

Whatever moment a process is killed at, some complete checkpoint is found (if there ever was one): files are synced before
the directory is renamed, the rename is synced before `latest` is replaced, and old ones are removed after that.
Source: the rename protocol of LevelDB's CURRENT file; fsync of file and directory as in "All File Systems Are Not Created
Equal" (OSDI 2014).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slidedp.executor.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_BLOCK_BYTES = 2**24


class FileLayer:
    """Every operation that changes the disk, one method each, so that tests can kill a save at any of them."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True)

    def write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Creates the file `path` by calling ``write(path)``, and syncs it."""
        write(path)
        self.sync(path)

    def open(self, path: Path) -> int:
        """Opens a file for `write_at`, creating it if it is not there: several ranks may. The caller closes it, and syncs it."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        """Writes bytes into an open file, which grows as needed."""
        while data.nbytes:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written

    def sync(self, path: Path) -> None:
        """Flushes a file, or a directory's entries, to the disk."""
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        shutil.rmtree(path)


@dataclass(frozen=True, slots=True)
class FileFact:
    """Size in bytes and CRC-32 of a file."""

    num_bytes: int
    crc32: int

    @staticmethod
    def of(path: Path) -> FileFact:
        crc = num_bytes = 0
        with path.open("rb") as f:
            while block := f.read(_BLOCK_BYTES):
                crc, num_bytes = zlib.crc32(block, crc), num_bytes + len(block)
        return FileFact(num_bytes, crc)


def partial_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def new_target(directory: Path, step: int) -> Path:
    """A name that no checkpoint of `directory` has: a second one of the same step gets a suffix."""
    names = [f"step-{step:08d}", *(f"step-{step:08d}.{i}" for i in range(1, 1000))]
    return next(directory / name for name in names if not (directory / name).exists())


def begin(directory: Path, step: int, files: FileLayer) -> Path:
    """An empty partial directory for a checkpoint of `step`; returns the path that it will have. One process calls it."""
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(".step-*.partial"):
        files.remove(leftover)
    target = new_target(directory, step)
    files.make_directory(partial_of(target))
    return target


def publish(target: Path, facts: Mapping[str, FileFact], content: Mapping[str, Any], keep: int, files: FileLayer) -> None:
    """Makes the partial directory of `target`, whose files are written and synced, the newest checkpoint.

    `facts`: of every file in it; `content`: what the manifest also says. The `keep` newest checkpoints stay.
    """
    partial, directory = partial_of(target), target.parent
    listed = {name: {"bytes": fact.num_bytes, "crc32": fact.crc32} for name, fact in sorted(facts.items())}
    manifest = json.dumps({"format": FORMAT, **content, "files": listed}, indent=1)
    files.write(partial / MANIFEST, lambda path: path.write_text(manifest))
    files.sync(partial)
    files.rename(partial, target)
    files.sync(directory)
    replacement = directory / f".{LATEST}.partial"
    files.write(replacement, lambda path: path.write_text(target.name + "\n"))
    files.rename(replacement, directory / LATEST)
    files.sync(directory)
    for old in complete(directory)[keep:]:
        if old != target:
            files.remove(old)


def complete(directory: Path) -> list[Path]:
    """Checkpoints of `directory`, newest first: by step, then by suffix. What `latest` names is only a reader's convenience."""
    found = [(m, p) for p in directory.glob("step-*") if (m := _NAME.fullmatch(p.name)) and p.is_dir()]
    return [p for m, p in sorted(found, key=lambda f: (int(f[0][1]), int(f[0][2] or 0)), reverse=True)]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of one checkpoint. Raises CheckpointError when it is missing, or of another format."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as e:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} cannot be read ({e})") from e
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is not of format {FORMAT}")
    return manifest


def damage(path: Path, manifest: Mapping[str, Any], part: int = 0, num_parts: int = 1) -> str | None:
    """What is wrong with the first bad file of every `num_parts`-th from `part` on; None if nothing is."""
    for name, said in list(manifest["files"].items())[part::num_parts]:
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != said["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, not {said['bytes']}"
        if FileFact.of(file).crc32 != said["crc32"]:
            return f"{name} has another checksum than it was written with"
    return None
