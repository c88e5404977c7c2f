"""Readers of published text: one for each format of local files, and one detokenizer for each way it was tokenised.

Readers yield documents of plain or compressed files (.gz, .xz, .bz2). All of them stream, so a file may be larger than
memory, and all of them report a bad file in one line that names the file and the place. tables.FORMATS and
tables.DETOKENIZERS list what a corpus may use.

Detokenizers undo the tokenisation that some public corpora were published with, exactly as the public ADLM release
does. Perplexities are only comparable if the text is the same to the character, so each is an ordered list of
replacements and nothing else.
"""

import bz2
import csv
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from adlm.errors import require
from adlm.tables import FORMATS

# Parts of every cache name: increase the first when the same file would give different documents, the second when a
# document would give different text.
READERS_VERSION = 1
DETOKENIZERS_VERSION = 1
COMPRESSED = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
# Suffixes of the files that are read from a folder.
SUFFIXES = (".txt", ".text", ".md", ".rst", ".raw", ".tokens", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
END_OF_TEXT = "<|endoftext|>"
# A plain text file is cut at blank lines into documents of about this many characters: a book becomes many documents,
# so that some can be held out and memory stays bounded.
PIECE = 16_384
CHUNK = 1 << 20
SPACE = re.compile(r"\s*")


def plain_name(path: Path) -> str:
    """The file name without a compression suffix."""
    return path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED else path.name


def files_under(path: Path, key: str = "data.path") -> list[Path]:
    """The file itself, or every readable file of a folder in a fixed order."""
    require(path.exists(), f"{key}={str(path)!r} does not exist")
    if path.is_file():
        return [path]
    found = [
        p for p in path.rglob("*")
        if p.is_file() and plain_name(p).endswith(SUFFIXES)
        and not any(part.startswith(".") for part in p.relative_to(path).parts)
    ]  # fmt: skip
    require(bool(found), f"{key}={str(path)!r} holds no {' '.join(SUFFIXES)} file (also .gz .xz .bz2)")
    return sorted(found, key=lambda p: p.relative_to(path).as_posix())


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """The file as UTF-8 text; an error while it is read becomes one line."""
    try:
        opener = COMPRESSED.get(path.suffix, open)
        # utf-8-sig: a byte order mark is not part of the text.
        with opener(path, "rt", encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text (first bad byte at offset {_first_bad_byte(path)})") from None
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged or incomplete ({error})") from None
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror or error})") from None


def _first_bad_byte(path: Path) -> int:
    """Offset of the first invalid byte in the uncompressed file; the slow search runs only after decoding failed."""
    offset, held = 0, b""
    with COMPRESSED.get(path.suffix, open)(path, "rb") as file:
        while chunk := file.read(CHUNK):
            held += chunk
            try:
                held.decode("utf-8")
                offset, held = offset + len(held), b""
            except UnicodeDecodeError as error:
                # The end of the chunk may cut a character: at most three of its bytes are in it.
                if len(held) - error.start > 3 or error.reason == "invalid start byte":
                    return offset + error.start
                offset, held = offset + error.start, held[error.start :]
    return offset


def stripped_lines(path: Path, text_key: str) -> Iterator[str]:
    """One document per line, without surrounding white space (PTB, LM1B)."""
    with open_text(path) as file:
        for line in file:
            yield line.strip()


def wikitext_lines(path: Path, text_key: str) -> Iterator[str]:
    """One document per line with its line break; a blank line is an empty document."""
    with open_text(path) as file:
        for line in file:
            yield line if line.strip() else ""


def text(path: Path, text_key: str) -> Iterator[str]:
    """Plain text: documents end at <|endoftext|> (as in TinyStories); long ones are cut at blank lines.

    A blank line alone does not end a document: in files without the marker it also separates paragraphs.
    """
    return pieces(_separated(_chunks(path), END_OF_TEXT))


def _chunks(path: Path) -> Iterator[str]:
    with open_text(path) as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _separated(chunks: Iterator[str], separator: str) -> Iterator[tuple[str, bool]]:
    """(text, whether a document ends after it), as the chunks arrive."""
    held = ""
    for chunk in chunks:
        *whole, held = (held + chunk).split(separator)
        for document in whole:
            yield document, True
        # Keep back what could be the beginning of a separator.
        safe = max(0, len(held) - len(separator) + 1)
        yield held[:safe], False
        held = held[safe:]
    yield held, True


def pieces(parts: Iterable[tuple[str, bool]], size: int = PIECE) -> Iterator[str]:
    """Cut long documents near every `size` characters: at a blank line, else at a line break, else at a space."""
    held = ""
    for part, ends in parts:
        held += part
        # Four sizes almost always hold a blank line after the first size.
        while len(held) > 4 * size or (ends and len(held) > 2 * size):
            marks = ((mark, held.find(mark, size, 4 * size)) for mark in ("\n\n", "\n", " "))
            cut = next((at + len(mark) for mark, at in marks if at >= 0), size)
            yield from _nonempty(held[:cut])
            held = held[cut:]
        if ends:
            yield from _nonempty(held)
            held = ""


def _nonempty(document: str) -> Iterator[str]:
    if stripped := document.strip():
        yield stripped


def records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON-lines file, or of a file that is one JSON array."""
    with open_text(path) as file:
        first = file.read(1)
        while first.isspace():
            first = file.read(1)
        if first == "[":
            for number, record in enumerate(_items(file, path), 1):
                yield number, _object(record, path, number)
            return
        line = first + file.readline()
        number = 1
        while line:
            if line.strip():
                yield number, _object(_parsed(line, path, number), path, number)
            line, number = file.readline(), number + 1


def _items(file: IO[str], path: Path) -> Iterator[Any]:
    """The items of a JSON array after its bracket, one at a time: the file may be larger than memory."""
    decode, held, at, size, number = json.JSONDecoder().raw_decode, "", 0, CHUNK, 1
    while True:
        start = SPACE.match(held, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        try:
            if number == 1 and held[start : start + 1] == "]":
                return
            item, end = decode(held, start)
            end = SPACE.match(held, end).end()  # type: ignore[union-attr]
            mark = held[end]
        except (json.JSONDecodeError, IndexError) as error:  # cut by the end of the chunk, or malformed
            more = file.read(size)
            problem = error.msg if isinstance(error, json.JSONDecodeError) else "the array does not end"
            require(more != "", f"{path} record {number} is not JSON ({problem})")
            held, at, size = held[start:] + more, 0, 2 * size  # doubled: a long item is parsed only a few times
            continue
        except RecursionError:
            raise ValueError(f"{path} record {number} is not JSON (nested too deeply)") from None
        except ValueError as error:
            raise ValueError(f"{path} record {number} is not JSON ({error})") from None
        require(mark in ",]", f"{path} record {number} is not followed by a comma")
        yield item
        if mark == "]":
            return
        at, size, number = end + 1, CHUNK, number + 1


def _parsed(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at column {error.colno}"
    except RecursionError:
        problem = "nested too deeply"
    except ValueError as error:  # a number with thousands of digits
        problem = str(error)
    raise ValueError(f"{path} line {number} is not JSON ({problem})")


def _object(record: Any, path: Path, number: int) -> dict[str, Any]:
    require(isinstance(record, dict), f"{path} record {number} is not a JSON object with named fields")
    return record


def field(record: dict[str, Any], key: str, where: str) -> str:
    """The text under `key`; a list of strings is joined by line breaks."""
    require(key in record, f"{where} has no field {key!r} (data.text_key); it has {', '.join(map(str, record))}")
    value: Any = record[key]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {key!r} (data.text_key) is {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can encode it, but no tokenizer can read it
        raise ValueError(
            f"{where}: field {key!r} holds half of a character (a lone surrogate) at character {error.start}"
        ) from None
    return value


def jsonl(path: Path, text_key: str) -> Iterator[str]:
    """One object per line, with the document under `text_key`."""
    for number, record in records(path):
        yield field(record, text_key, f"{path} record {number}")


def scientific_papers(path: Path, text_key: str) -> Iterator[str]:
    """jsonl with `article` (as on the hub) or `article_text`, a list of sentences (as first published)."""
    for number, record in records(path):
        yield field(record, "article_text" if "article_text" in record else text_key, f"{path} record {number}")


def ag_news_csv(path: Path, text_key: str) -> Iterator[str]:
    """csv of class, title and description without a header; the document is title and description."""
    csv.field_size_limit(2**31 - 1)
    with open_text(path) as file:
        for number, row in enumerate(csv.reader(file, skipinitialspace=True), 1):
            require(len(row) == 3, f"{path} row {number} has {len(row)} fields; AG News has class, title, description")
            yield f"{row[1]} {row[2]}"


def table(path: Path, text_key: str) -> Iterator[str]:
    """The column `text_key` of a csv or tsv file with a header."""
    csv.field_size_limit(2**31 - 1)
    delimiter = "\t" if plain_name(path).endswith(".tsv") else ","
    with open_text(path) as file:
        for number, row in enumerate(csv.DictReader(file, delimiter=delimiter), 2):
            yield field(row, text_key, f"{path} row {number}")


def parquet(path: Path, text_key: str) -> Iterator[str]:
    """One column of a parquet file, read in batches."""
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise ValueError(f"{path} needs pyarrow to be read (pip install 'adlm[data]')") from None
    try:
        file = pq.ParquetFile(path)
    except Exception as error:
        raise ValueError(f"{path} is not a parquet file ({str(error).splitlines()[0]})") from None
    columns = file.schema_arrow.names
    require(text_key in columns, f"{path} has no column {text_key!r} (data.text_key); it has {', '.join(columns)}")
    number, batches = 0, file.iter_batches(batch_size=1024, columns=[text_key])
    while True:
        try:
            batch = next(batches, None)
            values = None if batch is None else batch.column(0).to_pylist()
        except (OSError, ValueError, MemoryError) as error:  # pyarrow's errors derive from these
            raise ValueError(f"{path} is corrupt after row {number} ({str(error).splitlines()[0]})") from None
        if values is None:
            return
        for value in values:
            number += 1
            yield field({text_key: value}, text_key, f"{path} row {number}")


def by_suffix(path: Path, text_key: str) -> Iterator[str]:
    """The reader for the file's suffix: jsonl, csv, tsv, parquet, otherwise plain text."""
    name = plain_name(path)
    if name.endswith(".parquet"):
        return parquet(path, text_key)
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return jsonl(path, text_key)
    if name.endswith((".csv", ".tsv")):
        return table(path, text_key)
    return text(path, text_key)


def characters(path: Path) -> str:
    """A whole file as one string (text8 is one line of 100 million characters)."""
    with open_text(path) as file:
        return file.read()


def read(path: Path, form: str, text_key: str) -> Iterator[str]:
    """The documents of one file."""
    name = plain_name(path)
    if name.endswith(".parquet"):
        return parquet(path, text_key)
    if form in ("lines", "wikitext") and name.endswith((".jsonl", ".ndjson", ".json")):
        return jsonl(path, text_key)
    return FORMATS.load(form)(path, text_key)


# ---- detokenizers ---------------------------------------------------------------------------------------------------


class Replacement(NamedTuple):
    """Replacement of a string, or of the matches of a pattern by a template."""

    old: str | re.Pattern[str]
    new: str
    needle: str = ""
    """Part of every match: most texts do not contain it, and searching for it is far cheaper than matching."""


def _spaced(marks: str) -> list[Replacement]:
    """Remove the space before each mark."""
    return [Replacement(f" {mark} ", f"{mark} ") for mark in marks]


WIKITEXT_MARKS: list[Replacement] = [
    Replacement("s '", "s'"),
    Replacement(" @-@ ", "-"),
    Replacement(" @,@ ", ","),
    Replacement(" @.@ ", "."),
    *_spaced(":;.!?,"),
    Replacement(re.compile(r"\(\s*([^)]*?)\s*\)"), r"(\1)", "("),
    Replacement(re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]", "["),
    Replacement(re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}", "{"),
    Replacement(re.compile(r'"\s*([^"]*?)\s*"'), r'"\1"', '"'),
    Replacement(re.compile(r"'\s*([^']*?)\s*'"), r"'\1'", "'"),
    Replacement("= = = =", "===="),
    Replacement("= = =", "==="),
    Replacement("= =", "=="),
    Replacement(" ° ", "°"),
    Replacement(" \n", "\n"),
    Replacement("\n ", "\n"),
    Replacement(" N ", " 1 "),
    Replacement(" 's", "'s"),
]

PTB_MARKS: list[Replacement] = [
    Replacement(" 's", "'s"),
    Replacement("s ' ", "s' "),
    Replacement(" n't", "n't"),
    Replacement(" \n ", "\n"),
    Replacement("\\/", "/"),
    # Adjacent numbers share a space, so one pass misses every second number of a run.
    *[Replacement(" N ", " 1 ")] * 10,
    Replacement("$ 1", "$1"),
    Replacement("# 1", "#1"),
    Replacement("<unk>", "?"),
]

LM1B_MARKS: list[Replacement] = [
    Replacement("http : / / ", "http://"),
    Replacement("https : / / ", "https://"),
    Replacement(re.compile(r" '(\w+)"), r"'\1", " '"),
    Replacement(re.compile(r" (\w+) \. "), r" \1. ", " . "),
    Replacement(re.compile(r" (\w+) \.$"), r" \1.", " ."),
    Replacement(" ? ", "? "),
    Replacement(re.compile(r" \?$"), "?", " ?"),
    Replacement(" ! ", "! "),
    Replacement(re.compile(r" !$"), "!", " !"),
    *_spaced(",:;"),
    Replacement(" / ", "/"),
    Replacement(re.compile(r'" ([^"]+) "'), r'"\1"', '" '),
    Replacement(re.compile(r"' ([^']+) '"), r"'\1'", "' "),
    Replacement(re.compile(r"\( ([^()]+) \)"), r"(\1)", "( "),
    Replacement(re.compile(r"\[ ([^\[\]]+) \]"), r"[\1]", "[ "),
    Replacement("$ ", "$"),
    Replacement("£ ", "£"),
]


def replaced(replacements: list[Replacement], text: str) -> str:
    """The text after applying every replacement once, in order."""
    for old, new, needle in replacements:
        if isinstance(old, str):
            text = text.replace(old, new)
        elif needle in text:
            text = old.sub(new, text)
    return text


def unchanged(text: str) -> str:
    return text


def detokenize_wikitext(text: str) -> str:
    return replaced(WIKITEXT_MARKS, text)


def detokenize_ptb(text: str) -> str:
    return replaced(PTB_MARKS, text)


def detokenize_lm1b(text: str) -> str:
    return replaced(LM1B_MARKS, text)


def detokenize_lambada(text: str) -> str:
    """Straight double quotes; one line break before the passage and no other white space around it."""
    return "\n" + text.replace("“", '"').replace("”", '"').strip()


def detokenize_scientific_papers(text: str) -> str:
    return replaced(LM1B_MARKS, replaced(WIKITEXT_MARKS, text))
