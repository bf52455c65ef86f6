"""fastweight prepare: every document in its place, whatever the workers, and however often the run was killed."""

import bz2
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastweight import cli
from fastweight.data import load_tokenizer, open_shards
from fastweight.data import prepare as room
from fastweight.data.prepare import PrepareOptions, prepare
from fastweight.data.sources import find_sources
from tests.texts import END, byte_tokenizer, documents

MAIN = "from fastweight.cli import main; main()"
HALF = PrepareOptions(validation_fraction=0.4, shard_tokens=200)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


def rows(texts: Sequence[str]) -> str:
    return "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts))


def texts_of(out: Path, split: str) -> list[str]:
    shards, tokenizer = open_shards(out, split), load_tokenizer(out / "tokenizer")
    found = [shards.document(i) for i in range(shards.num_documents)]
    assert all(ids[-1] == tokenizer.end_of_text for ids in found)
    return [tokenizer.decode(ids[:-1].tolist()) for ids in found]


def files_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file()}


def quiet(text: str) -> None:
    pass


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    texts = [*documents(5), f"half {END} way", "naïve\r\n"]
    (tmp_path / "a.jsonl").write_text(rows(texts))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(rows(texts).encode()))
    (tmp_path / "c.json.bz2").write_bytes(bz2.compress(rows(texts).encode()))
    pq.write_table(pa.table({"text": texts, "id": range(7)}), tmp_path / "d.parquet", row_group_size=2)
    (tmp_path / "e.txt").write_bytes("\n===\n".join(texts).encode())
    folder = tmp_path / "f"
    (folder / "deep").mkdir(parents=True)
    for i, text in enumerate(texts):
        (folder / "deep" / f"{i}.txt").write_bytes(text.encode())
    (folder / ".hidden.txt").write_text("not this")
    (folder / "picture.png").write_text("nor this")
    for spec in ("a.jsonl", "b.jsonl.gz", "c.json.bz2", "d.parquet", "e.txt", "f", "f/deep/*.txt"):
        sources = find_sources([str(tmp_path / spec)], separator="\n===\n")
        assert [text for source in sources for text, _ in source.read()] == texts
        for source in sources:  # from every cursor on, the rest
            whole, cursors = [], [None]
            for text, position in source.read():
                whole.append(text)
                cursors.append(json.loads(json.dumps(source.cursor())))
                assert position <= (source.size or 0)
            for i, cursor in enumerate(cursors):
                assert [text for text, _ in source.read(cursor)] == whole[i:]


def test_documents_arrive_whole_in_order_and_on_one_side(tmp_path: Path, bpe: str) -> None:
    texts = documents(60)
    copies = [texts[i % 60] for i in range(100)]
    (tmp_path / "a.jsonl").write_text(rows([*copies[:50], "", " \n"]))
    (tmp_path / "b.jsonl").write_text(rows(copies[50:]))
    meta = prepare([str(tmp_path)], tmp_path / "out", tokenizer=bpe, options=HALF, say=quiet)
    train, validation = (texts_of(tmp_path / "out", split) for split in ("train", "validation"))
    assert not set(train) & set(validation)
    assert train == [text for text in copies if text in set(train)]
    assert validation == [text for text in copies if text in set(validation)]
    assert len(train) + len(validation) == 100
    assert 15 < len(validation) < 65
    assert meta["left_out"] == {"empty": 2, "validation": 0}
    for split, found in (("train", train), ("validation", validation)):
        counts = meta["splits"][split]
        assert counts["bytes"] == sum(len(text.encode()) for text in found)
        assert counts["words"] == sum(len(text.split()) for text in found)
        assert len(counts["shards"]) > 3
        assert all(shard["tokens"] < 200 + 200 for shard in counts["shards"])


def test_limits_cut_after_a_document(tmp_path: Path, bpe: str) -> None:
    (tmp_path / "a.jsonl").write_text(rows(documents(100)))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    prepare([str(tmp_path / "a.jsonl")], whole, tokenizer=bpe, options=HALF, say=quiet)
    limits = PrepareOptions(validation_fraction=0.4, validation_documents=3, max_tokens=500)
    meta = prepare([str(tmp_path / "a.jsonl")], cut, tokenizer=bpe, options=limits, say=quiet)
    train = texts_of(cut, "train")
    assert texts_of(whole, "train")[: len(train)] == train
    assert meta["splits"]["train"]["tokens"] >= 500
    assert meta["splits"]["train"]["tokens"] - len(open_shards(cut, "train").document(len(train) - 1)) < 500
    assert texts_of(cut, "validation") == texts_of(whole, "validation")[:3]
    assert meta["left_out"]["validation"] > 0


def test_half_characters_do_not_stop_it(tmp_path: Path, bpe: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud83d pair"}\n')
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer=bpe, options=PrepareOptions(0.0), say=quiet)
    assert texts_of(tmp_path / "out", "train") == ["half ? pair"]


def test_a_second_run_does_nothing_and_another_request_is_refused(tmp_path: Path, bpe: str) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text(rows(documents(40)))
    first = prepare([str(source)], out, tokenizer=bpe, options=HALF, say=quiet)
    before, times = files_of(out), {p: p.stat().st_mtime_ns for p in out.iterdir()}
    os.utime(source)  # a copy, as far as one can tell
    said: list[str] = []
    assert prepare([str(source)], out, tokenizer=bpe, options=HALF, say=said.append) == first
    assert "prepared already" in said[0]
    assert times == {p: p.stat().st_mtime_ns for p in out.iterdir()}
    other = str(byte_tokenizer(tmp_path / "other.json", vocab_size=290))
    (tmp_path / "b.jsonl").write_text(rows(documents(2)))
    changes: list[tuple[list[Path], dict[str, Any], str]] = [
        ([source], {"options": PrepareOptions(0.4, max_tokens=9, shard_tokens=200)}, "max_tokens: None -> 9"),
        ([source], {"tokenizer": other}, "tokenizer: .* -> .*other.json"),
        ([source, tmp_path / "b.jsonl"], {}, "source new or changed: b.jsonl"),
        ([tmp_path / "b.jsonl"], {}, "source gone or changed: a.jsonl"),
    ]
    for paths, change, message in changes:
        options: dict[str, Any] = {"tokenizer": bpe, "options": HALF, "say": quiet} | change
        with pytest.raises(ValueError, match=message):
            prepare(list(map(str, paths)), out, **options)
    source.write_text(rows(documents(40, seed=1)))
    with pytest.raises(ValueError, match=r"source new or changed: a\.jsonl"):
        prepare([str(source)], out, tokenizer=bpe, options=HALF, say=quiet)
    assert files_of(out) == before


@pytest.mark.parametrize("killed_after", [0, 1, 2, 5])
def test_a_killed_run_goes_on_to_the_same_bytes(
    killed_after: int, tmp_path: Path, bpe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after so many commits with more written, at borders of shards, batches and sources."""
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text(rows(documents(30, seed=ord(name))))
    specs = [str(tmp_path / "*.jsonl")]
    monkeypatch.setattr(room, "BATCH_DOCUMENTS", 7)
    prepare(specs, tmp_path / "whole", tokenizer=bpe, options=HALF, say=quiet)
    monkeypatch.setattr(room, "COMMIT_SECONDS", 0.0)
    updates = 0

    def kill(status: object) -> None:
        nonlocal updates
        updates += 1
        if updates > killed_after + 1:
            raise KeyboardInterrupt

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        prepare(specs, tmp_path / "cut", tokenizer=bpe, options=HALF, say=said.append, progress=kill)
    assert not (tmp_path / "cut" / "meta.json").exists()
    with pytest.raises(ValueError, match="expected a directory finished by"):
        open_shards(tmp_path / "cut", "train")
    prepare(specs, tmp_path / "cut", tokenizer=bpe, options=HALF, say=said.append)
    assert said == ([] if killed_after == 0 else [said[0]])
    assert all(text.startswith("Going on after") for text in said)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_kill_9_with_workers_leaves_no_process_and_the_same_bytes(tmp_path: Path, bpe: str) -> None:
    (tmp_path / "a.jsonl").write_text(rows(documents(20_000)))
    told = [str(tmp_path / "a.jsonl"), "--tokenizer", bpe, "--validation-fraction", "0.1", "--workers", "2"]
    command = [sys.executable, "-c", MAIN, "prepare", *told, "--out", str(tmp_path / "cut")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    shard = tmp_path / "cut" / "train-00000.bin"
    assert _soon(lambda: shard.exists() or process.poll() is not None)
    children = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert shard.exists()
    assert children
    assert _soon(lambda: not any(map(_alive, children)))
    options = PrepareOptions(validation_fraction=0.1)
    for out in ("cut", "whole"):
        prepare(told[:1], tmp_path / out, tokenizer=bpe, options=options, say=quiet)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_the_hub_streams_and_goes_on(tmp_path: Path, bpe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts = documents(50)
    for i in range(2):
        (tmp_path / "set" / f"train-{i}.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / "set" / f"train-{i}.jsonl").write_text(rows(texts[25 * i : 25 * i + 25]))
    (source,) = find_sources([f"hf:{tmp_path / 'set'}"])
    read = source.read()
    assert [next(read)[0] for _ in range(30)] == texts[:30]
    cursor = json.loads(json.dumps(source.cursor()))
    assert [text for text, _ in source.read(cursor)] == texts[30:]
    (named,) = find_sources(["hf:org/name:config:validation@v1"])
    assert named.identity() == {"name": "hf:org/name", "config": "config", "split": "validation", "revision": "v1"}

    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"source: hf:org/name cannot be read \(nobody answers\)"):
        next(named.read())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'needs datasets, which is not installed: pip install "fastweight\[data\]"'):
        next(named.read())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"text": "x"}\n{"text": 3}\n',
            r"a.jsonl line 2 has text \('text' is int\), expected text in 'text'",
        ),
        ("a.jsonl", '{"body": "x"}\n', "line 1 has body, expected text in 'text'"),
        ("a.jsonl", "\n{x}\n", "a.jsonl line 2 is no JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl line 1 is not UTF-8"),
        ("a.txt", b"ab\xff", "a.txt is not UTF-8 .* at 2"),
        ("a.txt.gz", "not packed", "a.txt.gz cannot be read .*Not a gzip"),
        ("a.txt.gz", gzip.compress(b"cut off", mtime=0)[:-9], "a.txt.gz cannot be read .*ended before"),
        ("a.txt.xz", "not packed", "a.txt.xz cannot be read"),
        ("a.txt.bz2", "not packed", "a.txt.bz2 cannot be read"),
        ("a.parquet", "PAR1", "a.parquet (is no parquet|needs pyarrow)"),
        ("a.csv", "x", "got .*a.csv, expected one of .txt"),
        ("a.jsonl", "", "train: got none of 0 documents"),
    ],
)
def test_bad_files_are_named(name: str, content: str | bytes, message: str, tmp_path: Path, bpe: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        prepare([str(tmp_path / name)], tmp_path / "out", tokenizer=bpe, say=quiet)
    assert not (tmp_path / "out" / "meta.json").exists()


def test_a_byte_order_mark_and_the_separators_of_unicode_are_read(tmp_path: Path, bpe: str) -> None:
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"text": "one"}\r\n\r\n{"text": "tw\u2028o\x85"}'.encode())
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer=bpe, options=PrepareOptions(0.0), say=quiet)
    assert texts_of(tmp_path / "out", "train") == ["one", "tw\u2028o\x85"]


def test_an_empty_split_is_refused_and_another_request_may_follow(tmp_path: Path, bpe: str) -> None:
    (tmp_path / "a.txt").write_text("one document\n\nor two")
    with pytest.raises(ValueError, match=r"(validation|train): got none of 1 documents, expected at least one"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer=bpe, say=quiet)
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer=bpe, options=PrepareOptions(0.0), say=quiet)
    assert texts_of(tmp_path / "out", "train") == ["one document\n\nor two"]
    with pytest.raises(ValueError, match="split: got 'validation', expected one of train"):
        open_shards(tmp_path / "out", "validation")


def test_other_directories_and_sources_are_refused(tmp_path: Path, bpe: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.doc").write_text("precious")
    source = str(tmp_path / "a.txt")
    for specs, out, message in (
        ([source], "mine", "holds other files"),
        ([source], "a.txt", "expected a directory"),
        ([source, source], "out", "twice"),
        ([str(tmp_path / "missing")], "out", "expected a file, a directory with text, a pattern or hf:NAME"),
        (["hf:"], "out", "expected hf:NAME"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(specs, tmp_path / out, tokenizer=bpe, say=quiet)
    bad: list[dict[str, Any]] = [
        {"validation_fraction": 1.0},
        {"max_tokens": 0},
        {"validation_documents": 0},
        {"separator": ""},
    ]
    for options in bad:
        with pytest.raises(ValueError, match=f"{next(iter(options))}: got"):
            PrepareOptions(**options)


def test_the_command_says_what_it_wrote(
    tmp_path: Path, bpe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(rows(documents(40)))
    words = ["fastweight", "prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", bpe]
    monkeypatch.delattr("os.sched_getaffinity", raising=False)  # which only Linux has
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("sys.argv", [*words, "--validation-fraction", "0.3"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    said = capsys.readouterr().out
    assert "preparing" not in said, "the bar belongs to stderr"
    for split in ("train", "validation"):
        assert f"{meta['splits'][split]['tokens']:,}" in said
    assert said.splitlines()[-1] == str(tmp_path / "out")

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "prepare", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
    assert "The same command goes on" in capsys.readouterr().err


def _soon(holds: Callable[[], bool]) -> bool:
    """Whether it holds within minutes, which a busy machine may need to start a process; a second elsewhere."""
    deadline = time.monotonic() + 240
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def _children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
