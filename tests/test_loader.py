"""Documents, rows and the loader: what counts, one order for all rank counts, and a resume in the middle of an epoch."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from train_cases import tiny_tokenizer

from slidedp.training import documents
from slidedp.training.documents import read_documents
from slidedp.training.loader import Split, StatefulLoader, in_order, order_of
from slidedp.training.packed_rows import Rows, prepare

pytestmark = pytest.mark.null

EOS = 2


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def rows_of(tmp_path: Path, tokenizer, lines: list[dict], seq: int = 8, packing="concat", **options) -> Rows:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    folder, facts = prepare(tmp_path / "data", [path], tokenizer, seq=seq, packing=packing,
                            **{"assistant_only": False, **options})  # fmt: skip
    return Rows(folder, facts)


def numbered(tmp_path: Path, tokenizer, count: int, seq: int = 8) -> Rows:
    """`count` rows, each of which begins with its own number in letters."""
    texts = [chr(97 + i // 26) + chr(97 + i % 26) + "xyz"[i % 3] * (seq - 3) for i in range(count)]
    return rows_of(tmp_path, tokenizer, [{"text": t} for t in texts], seq, "none")


def texts(tokenizer, batch) -> list[str]:
    """Of the rows that count."""
    return [tokenizer.decode(ids[:2]) for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
            if (labels != -100).any()]  # fmt: skip


# ---- documents ----


def counted(tokenizer, ids, counts) -> str:
    return tokenizer.decode([i for i, c in zip(ids, counts, strict=True) if c])


@pytest.mark.parametrize(
    ("record", "whole", "counting", "assistant_only"),
    [
        ({"text": "abc"}, "abc</s>", "abc</s>", False),
        ({"prompt": "ab", "completion": "cd"}, "abcd</s>", "cd</s>", False),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}, "<u>hi|<a>yo|", None, False),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                       {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]},
         "<u>a|<a>b|<u>c|<a>d|", "b|d|", True),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
         "<u>a|<a>b|", "b|", False),
    ],
)  # fmt: skip
def test_records(tokenizer, record, whole, counting, assistant_only):
    document = documents.from_record(record, tokenizer, assistant_only)
    assert tokenizer.decode(document.ids) == whole
    assert counted(tokenizer, document.ids, document.counts) == (whole if counting is None else counting)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"data\.jsonl:2: not JSON"),
        ("[1]", r"data\.jsonl:2: expected an object with 'text'.*got list"),
        ('{"txt": "a"}', "data.jsonl:2: expected an object with .*it has 'txt'"),
        ('{"prompt": "a"}', "it has 'prompt'"),
        ('{"messages": []}', "messages: expected a list of messages"),
        ('{"messages": [{"role": "user"}]}', "messages: expected a list of messages"),
        ('{"prompt": "a", "completion": 3}', "prompt: expected a list of messages"),
    ],
)
def test_bad_lines_are_named(tmp_path, tokenizer, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=message):
        list(read_documents([path], tokenizer))


def test_bad_files_are_named(tmp_path, tokenizer):
    (tmp_path / "a.parquet").write_text("x")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    for name, message in (("a.parquet", "data is .jsonl"), ("b.txt", "b.txt: cannot be read"), ("c.txt", "c.txt: cannot be read"),
                          ("c.jsonl", "c.jsonl: cannot be read")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            list(read_documents([tmp_path / name], tokenizer))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no token to learn from"):
        prepare(tmp_path, [tmp_path / "empty.jsonl"], tokenizer, seq=8, packing="concat", assistant_only=False)
    assert not list(tmp_path.glob(".*"))


def test_without_a_template_or_an_end(tokenizer):
    bare = tiny_tokenizer()
    bare.chat_template = bare.eos_token = None
    with pytest.raises(ValueError, match="messages need a chat template"):
        documents.from_record({"messages": [{"role": "user", "content": "a"}]}, bare, False)
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        documents.from_record({"text": "a"}, bare, False)


def test_a_long_text_in_pieces_is_one_document(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("one line\n\nanother\nand the last")
    whole = list(read_documents([path], tokenizer))
    monkeypatch.setattr(documents, "PIECE_CHARS", 7)
    pieces = list(read_documents([path], tokenizer))
    assert len(pieces) == 3
    assert [p.begins for p in pieces] == [True] + [False] * (len(pieces) - 1)
    ids = list(chain.from_iterable(p.ids for p in pieces))
    assert ids == list(chain.from_iterable(d.ids for d in whole))
    assert tokenizer.decode(ids) == path.read_text() + "</s>"


# ---- rows ----


def test_concat_cuts_what_follows_one_another(tmp_path, tokenizer):
    rows = rows_of(tmp_path, tokenizer, [{"text": "abcde"}, {"prompt": "fg", "completion": "hijklm"}])
    batch = rows.batch([0, 1], 3)
    assert [tokenizer.decode(r) for r in batch["input_ids"]] == ["abcde</s>fg", "hijklm</s></s>", "</s>" * 8]
    ignored = batch["labels"] == -100
    assert ignored[0].tolist() == [False] * 6 + [True] * 2
    assert ignored[1].tolist() == [False] * 7 + [True]
    assert ignored[2].all()
    assert torch.equal(batch["labels"][~ignored], batch["input_ids"][~ignored])
    assert rows.num_valid([0, 1]) == 5 + 6
    assert set(batch) == {"input_ids", "labels"}


def test_documents_have_positions_of_their_own(tmp_path, tokenizer):
    rows = rows_of(tmp_path, tokenizer, [{"text": "abcd"}, {"text": "efghi"}], packing="documents")
    batch = rows.batch([0, 1], 2)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3, 4]]
    assert (batch["labels"] == -100).tolist() == [[True, *[False] * 4, True, False, False], [*[False] * 3, *[True] * 5]]


def test_a_row_that_counts_nothing_is_left_out(tmp_path, tokenizer):
    rows = rows_of(tmp_path, tokenizer, [{"prompt": "a" * 20, "completion": "bcd"}])
    assert (len(rows), rows.facts.num_dropped) == (1, 2)
    assert rows.num_valid([0]) == 4


def test_rows_are_prepared_once_and_anew_for_other_data(tmp_path, tokenizer):
    first = rows_of(tmp_path, tokenizer, [{"text": "abc"}])
    stamp = (tmp_path / "data" / first.facts.fingerprint / "ids.bin").stat().st_mtime_ns
    again = rows_of(tmp_path, tokenizer, [{"text": "abc"}])
    assert again.facts == first.facts
    assert (tmp_path / "data" / first.facts.fingerprint / "ids.bin").stat().st_mtime_ns == stamp
    for other in (rows_of(tmp_path, tokenizer, [{"text": "abd"}]), rows_of(tmp_path, tokenizer, [{"text": "abc"}], seq=9),
                  rows_of(tmp_path, tokenizer, [{"text": "abc"}], packing="none")):  # fmt: skip
        assert other.facts.fingerprint != first.facts.fingerprint


# ---- the loader ----


def epoch_of(loader: StatefulLoader) -> list[list[int]]:
    return [loader.next_indices().tolist() for _ in range(loader.steps_per_epoch)]


def test_every_row_once_an_epoch_in_an_order_of_seed_and_epoch(tmp_path, tokenizer):
    rows = numbered(tmp_path, tokenizer, 11)
    first, second, same = (StatefulLoader(rows, Split(4, 4), seed=seed) for seed in (1, 2, 1))
    epochs = [epoch_of(first), epoch_of(first)]
    assert [len(batch) for batch in epochs[0]] == [4, 4, 3]
    assert [sorted(chain.from_iterable(epoch)) for epoch in epochs] == [list(range(11))] * 2
    assert epochs[0] != epochs[1] != epoch_of(second)
    assert [epoch_of(same), epoch_of(same)] == epochs
    assert list(chain.from_iterable(epoch_of(StatefulLoader(rows, Split(4, 4), shuffle=False)))) == list(range(11))


def test_the_order_is_what_it_always_was():
    """Runs of before must be resumable: another generator would be noticed, and refused, only then."""
    assert order_of(12, 5, 3).tolist() == [0, 1, 9, 4, 10, 7, 3, 11, 8, 2, 6, 5]


def test_resume_in_the_middle_of_any_epoch(tmp_path, tokenizer):
    rows = numbered(tmp_path, tokenizer, 11)
    whole = StatefulLoader(rows, Split(4, 4), seed=1)
    states, batches = [], []
    for _ in range(8):
        states.append(json.loads(json.dumps(whole.state_dict())))
        batches.append(whole.next_indices().tolist())
    for i, state in enumerate(states):
        resumed = StatefulLoader(rows, Split(4, 4), seed=1)
        resumed.load_state_dict(state)
        assert [resumed.next_indices().tolist() for _ in range(8 - i)] == batches[i:]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_ranks_share_the_same_global_batches(tmp_path, tokenizer, world, batch):
    """Whatever the ranks, micro-batches and the epoch's short end; all batches have one shape."""
    rows = numbered(tmp_path, tokenizer, 11)
    reference = StatefulLoader(rows, Split(4, 4), seed=1)
    loaders = [StatefulLoader(rows, Split(4, batch, rank, world), seed=1) for rank in range(world)]
    shapes = set()
    for _ in range(6):
        want = texts(tokenizer, reference.rows.batch(reference.next_indices(), 4))
        got = [next(loader) for loader in loaders]
        assert [t for micro in got for b in micro for t in texts(tokenizer, b)] == want
        shapes |= {(len(micro), *b["input_ids"].shape) for micro in got for b in micro}
        assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
    assert len(shapes) == 1
    assert shapes.pop()[1] <= batch
    assert loaders[0].example()["input_ids"].shape == got[0][0]["input_ids"].shape


def test_a_resume_that_would_see_other_data_is_refused(tmp_path, tokenizer):
    rows = numbered(tmp_path, tokenizer, 11)
    loader = StatefulLoader(rows, Split(4, 4), seed=1)
    next(loader)
    state = loader.state_dict()
    other = numbered(tmp_path, tokenizer, 12)
    for changed, message in (
        (StatefulLoader(rows, Split(4, 4), seed=2), "another seed: 1 there, 2 here"),
        (StatefulLoader(other, Split(4, 4), seed=1), "another data"),
        (StatefulLoader(rows, Split(4, 4), seed=1, shuffle=False), "another data.shuffle: True there, False here"),
        (StatefulLoader(rows, Split(8, 4, 0, 2), seed=1), "of 4 sequences, this run's of 8.*set global_batch: 4"),
    ):
        with pytest.raises(ValueError, match=message):
            changed.load_state_dict(state)
    with pytest.raises(ValueError, match="shuffled otherwise"):
        loader.load_state_dict({**state, "order": state["order"] ^ 1})
    assert loader.state_dict() == state


def test_an_evaluation_sees_every_row_once(tmp_path, tokenizer):
    rows = numbered(tmp_path, tokenizer, 7)
    got, counts = [], []
    for parts in zip(*(in_order(rows, Split(4, 2, rank, 2)) for rank in range(2)), strict=True):
        assert len({valid for valid, _ in parts}) == 1
        counts.append(parts[0][0])
        got += [t for _, batch in parts for t in texts(tokenizer, batch)]
    assert got == texts(tokenizer, rows.batch(np.arange(7), 7))
    assert sum(counts) == rows.num_valid(np.arange(7))
