"""Readers: every published format from a small file, every bad file in one line."""

import bz2
import gzip
import json
import lzma

import pytest

from adlm.data import formats
from adlm.data.formats import files_under, read


def write(path, text, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return path


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".gz", gzip.open), (".xz", lzma.open), (".bz2", bz2.open)])
def test_compression_by_suffix(tmp_path, suffix, opener):
    path = write(tmp_path / f"a.jsonl{suffix}", '{"text": "één"}\n\n{"text": "two"}\n', opener)
    assert list(read(path, "auto", "text")) == ["één", "two"]
    assert formats.plain_name(path) == "a.jsonl"


def test_lines_and_wikitext(tmp_path):
    path = write(tmp_path / "ptb.txt", " a b \n\n c\n")
    assert list(read(path, "lines", "")) == ["a b", "", "c"]
    assert list(read(path, "wikitext", "")) == [" a b \n", "", " c\n"]


def test_ag_news(tmp_path):
    path = write(tmp_path / "test.csv", '"3","A ""title""","Some\\text, here"\n"1","B","two"\n')
    assert list(read(path, "ag_news", "")) == ['A "title" Some\\text, here', "B two"]
    bad = write(tmp_path / "bad.csv", "1,2\n")
    with pytest.raises(ValueError, match="row 1 has 2 fields"):
        list(read(bad, "ag_news", ""))


def test_scientific_papers_both_ways(tmp_path):
    path = write(tmp_path / "val.txt", json.dumps({"article_text": ["a .", "b ."]}) + "\n")
    assert list(read(path, "scientific_papers", "article")) == ["a .\nb ."]
    path = write(tmp_path / "x.jsonl", json.dumps({"article": "a .\nb ."}) + "\n")
    assert list(read(path, "scientific_papers", "article")) == ["a .\nb ."]


def test_stories_end_at_their_marker(tmp_path):
    path = write(tmp_path / "TinyStories-valid.txt", "One.\n\nMore.\n<|endoftext|>\nTwo.\n<|endoftext|>")
    assert list(read(path, "auto", "")) == ["One.\n\nMore.", "Two."]


def test_csv_tsv_json_array(tmp_path):
    assert list(read(write(tmp_path / "a.csv", 'id,text\n1,"x, y"\n2,z\n'), "auto", "text")) == ["x, y", "z"]
    assert list(read(write(tmp_path / "a.tsv", "id\ttext\n1\tx\n"), "auto", "text")) == ["x"]
    assert list(read(write(tmp_path / "a.json", ' [{"text": "x"},\n {"text": "y"}]'), "auto", "text")) == ["x", "y"]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_json_array_is_read_item_by_item(tmp_path, monkeypatch, chunk):
    """However the file is cut by reading; so one of gigabytes need not fit into memory."""
    monkeypatch.setattr(formats, "CHUNK", chunk)
    texts = [f'{i} "é", [{{' + "long " * (i % 5) for i in range(40)]
    for layout in ({}, {"indent": 2}):
        path = write(
            tmp_path / "a.json", "\n " + json.dumps([{"n": i, "text": t} for i, t in enumerate(texts)], **layout)
        )
        assert list(read(path, "auto", "text")) == texts
    assert list(read(write(tmp_path / "b.json", "[ ]\n"), "auto", "text")) == []


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x", "y"], "n": [1, 2]}), path)
    assert list(read(path, "auto", "body")) == ["x", "y"]
    assert list(read(path, "wikitext", "body")) == ["x", "y"], "a parquet copy of any corpus is read as parquet"
    with pytest.raises(ValueError, match=r"no column 'text' \(data.text_key\); it has body, n"):
        list(read(path, "auto", "text"))
    with pytest.raises(ValueError, match="is int, not text"):
        list(read(path, "auto", "n"))
    pq.write_table(pa.table({"text": ["x"] * 3000 + [None]}), path)
    with pytest.raises(ValueError, match="row 3001: field 'text'"):
        list(read(path, "auto", "text"))


@pytest.mark.parametrize("text", ["some words ", "é"])
def test_a_corrupt_parquet_page_names_file_and_row(tmp_path, text):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"{text} {i}" for i in range(4000)]})
    pq.write_table(table, path, row_group_size=1024, compression="snappy", use_dictionary=False)
    data = bytearray(path.read_bytes())
    at = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    data[at + 40 : at + 400] = b"\xff" * 360
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.parquet is corrupt after row 2048 \("):
        list(read(path, "auto", "text"))


def test_plain_text_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    paragraphs = [f"Paragraph {i} " + "word " * 100 for i in range(400)]
    text = "\n\n".join(paragraphs)
    found = list(read(write(tmp_path / "book.txt", text), "auto", ""))
    assert len(found) > 5
    assert all(len(piece) + 10 >= formats.PIECE for piece in found[:-1])
    assert all(len(piece) < 2 * formats.PIECE for piece in found[:-1])
    assert all(piece.startswith("Paragraph") for piece in found)
    assert " ".join(found).split() == text.split()


def test_text_without_any_break_is_still_bounded(tmp_path):
    found = list(read(write(tmp_path / "one.txt", "x" * (formats.PIECE * 10)), "auto", ""))
    assert max(map(len, found)) <= 4 * formats.PIECE
    assert sum(map(len, found)) == formats.PIECE * 10


def test_end_of_text_separates_even_across_read_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK", 7)
    path = write(tmp_path / "a.txt", "first one<|endoftext|>second<|endoftext|>third")
    assert list(read(path, "auto", "")) == ["first one", "second", "third"]


def test_small_file_is_one_document(tmp_path):
    assert list(read(write(tmp_path / "a.txt", "one\n\ntwo\n"), "auto", "")) == ["one\n\ntwo"]
    assert list(read(write(tmp_path / "b.txt", " \n\n"), "auto", "")) == []


def test_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\n')
    assert list(read(tmp_path / "a.jsonl", "auto", "text")) == ["x"]


@pytest.mark.parametrize("at", [0, 5, 100, (1 << 20) - 1, 1 << 20, (1 << 20) + 7])
def test_non_utf8_names_file_and_offset(tmp_path, at):
    data = bytearray(("é" * (1 << 20)).encode())
    at -= at % 2  # the first byte of a two-byte character
    data[at] = 0xFF
    (tmp_path / "latin.txt").write_bytes(data)
    with pytest.raises(ValueError, match=rf"latin.txt is not UTF-8 text \(first bad byte at offset {at}\)"):
        list(read(tmp_path / "latin.txt", "auto", ""))


def test_cut_character_at_the_end(tmp_path):
    (tmp_path / "cut.txt").write_bytes("aé".encode()[:-1])
    with pytest.raises(ValueError, match="offset 1"):
        list(read(tmp_path / "cut.txt", "lines", ""))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            '{"text": "x"}\n{"body": 1, "n": 2}\n',
            "record 2 has no field 'text' (data.text_key); it has body, n",
        ),
        ("a.jsonl", '{"text": "x"}\nnot json\n', "line 2 is not JSON"),
        ("a.jsonl", "3\n", "record 1 is not a JSON object"),
        ("a.jsonl", '{"text": null}\n', "is NoneType, not text"),
        ("a.jsonl", '{"text": "x"}\n{"text": "a\\ud83d b"}\n', "record 2: field 'text' holds half of a character"),
        ("a.json", '[{"text": ["x", "\\udc00"]}]', "record 1: field 'text' holds half of a character"),
        ("a.jsonl", '{"text": "x"}\n{"text": ' + "[" * 200_000 + "\n", "line 2 is not JSON (nested too deeply)"),
        ("a.jsonl", '{"text": "x", "n": ' + "1" * 5000 + "}\n", "line 1 is not JSON (Exceeds the limit"),
        ("a.json", '[{"text": "x"}, {"text": "y"', "record 2 is not JSON"),
        ("a.json", '[{"text": "x"} {"text": "y"}]', "record 1 is not followed by a comma"),
        ("a.json", "[{" + '"a": {' * 200_000 + "}]", "record 1 is not JSON (nested too deeply)"),
        ("a.csv", "id,body\n1,x\n", "row 2 has no field 'text' (data.text_key); it has id, body"),
        ("a.parquet", "nonsense", "is not a parquet file"),
        ("a.txt.gz", "not gzip", "is damaged or incomplete"),
        ("a.txt.xz", "not xz", "is damaged or incomplete"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    path = write(tmp_path / name, text)
    with pytest.raises(ValueError) as error:
        list(read(path, "auto", "text"))
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_truncated_compressed_file(tmp_path):
    whole = lzma.compress(b"some text\n" * 1000)
    (tmp_path / "a.txt.xz").write_bytes(whole[:-20])
    with pytest.raises(ValueError, match="damaged or incomplete"):
        list(read(tmp_path / "a.txt.xz", "auto", ""))


@pytest.mark.parametrize(("suffix", "module"), [("gz", gzip), ("xz", lzma), ("bz2", bz2)])
def test_compressed_file_with_a_changed_byte(tmp_path, suffix, module):
    """zlib has an error of its own, which is no OSError."""
    packed = bytearray(module.compress("\n".join(map(str, range(5000))).encode()))
    packed[20:40] = bytes(255 - byte for byte in packed[20:40])
    path = tmp_path / f"a.txt.{suffix}"
    path.write_bytes(packed)
    with pytest.raises(ValueError, match=f"a.txt.{suffix}"):
        list(read(path, "auto", ""))


def test_folders(tmp_path):
    for name in ("b.txt", "a.jsonl.gz", "sub/c.md", ".hidden/d.txt", "e.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [p.relative_to(tmp_path).as_posix() for p in files_under(tmp_path)] == ["a.jsonl.gz", "b.txt", "sub/c.md"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no \.txt"):
        files_under(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"data.valid_path='.*nothing' does not exist"):
        files_under(tmp_path / "nothing", "data.valid_path")
