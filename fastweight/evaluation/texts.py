"""What the user names into documents to score: prepared data, text, or a known benchmark.

    documents_of_data("data/fineweb", "validation", ...)       the tokens that training validates on
    documents_of_texts(["book.txt", "hf:NAME:CONFIG:test"])    anything that `fastweight prepare` reads
    "wikitext", "lambada", "lambada=FILE"                      by name from the hub, or LAMBADA from JSON lines

Trap: prepared data is one stream in which end-of-text tokens are predicted too, as in training; elsewhere each text
starts afresh and its end is not predicted.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from fastweight.data import Tokenizer, open_shards
from fastweight.data.sources import HUB, find_sources
from fastweight.evaluation.perplexity import Document, Ending, as_document, as_ending

WIKITEXT = ("hf:EleutherAI/wikitext_document_level:wikitext-2-raw-v1:test", "page")
LAMBADA = "hf:EleutherAI/lambada_openai:default:test"
NAMES = ("wikitext", "lambada", "lambada=FILE", f"{HUB}NAME[:CONFIG[:SPLIT]]")


def documents_of_data(
    directory: str | Path, split: str, tokenizer: Tokenizer, limit: int | None = None
) -> list[Document]:
    """A split of prepared data, or its first `limit` documents, as one document with its end-of-text tokens.

    Raises ValueError when it was prepared with another tokenizer than the model's.
    """
    shards = open_shards(directory, split)
    told = shards.meta["tokenizer"]
    if told["fingerprint"] != tokenizer.fingerprint:
        raise ValueError(f"data: {directory} was prepared with {told['name']}, expected the model's tokenizer")
    if limit is None or limit >= shards.num_documents:
        counts = shards.meta["splits"][split]
        return [Document(shards.tokens(0, shards.num_tokens).tolist(), counts["bytes"], counts["words"])]
    ids = [shards.document(i).tolist() for i in range(limit)]
    texts = [tokenizer.decode(document[:-1]) for document in ids]
    num_bytes, num_words = sum(len(text.encode()) for text in texts), sum(len(text.split()) for text in texts)
    return [Document([i for document in ids for i in document], num_bytes, num_words)]


def documents_of_texts(
    specs: Sequence[str],
    tokenizer: Tokenizer,
    *,
    text_field: str = "text",
    separator: str | None = None,
    limit: int | None = None,
) -> list[Document]:
    """Texts of files, directories, patterns or hub datasets, each a document; white space alone is left out."""
    sources = find_sources(specs, text_field=text_field, separator=separator)
    texts = (text for source in sources for text, _ in source.read() if text.strip())
    return [as_document(tokenizer, text) for text in islice(texts, limit)]


def documents_of_dataset(name: str, tokenizer: Tokenizer, limit: int | None = None) -> list[Document] | list[Ending]:
    """A benchmark by its name (`NAMES`): documents, or endings for LAMBADA."""
    if name == "wikitext":
        return documents_of_texts(WIKITEXT[:1], tokenizer, text_field=WIKITEXT[1], limit=limit)
    if name == "lambada":
        texts = (text for source in find_sources([LAMBADA]) for text, _ in source.read())
        pairs = ((text[: len(text) - len(word)], word) for text in texts for word in [text.split(" ")[-1]])
        return [as_ending(tokenizer, *pair) for pair in islice(pairs, limit)]
    if name.startswith("lambada="):
        pairs = _pairs(Path(name.partition("=")[2]))
        return [as_ending(tokenizer, *pair) for pair in islice(pairs, limit)]
    if name.startswith(HUB):
        return documents_of_texts([name], tokenizer, limit=limit)
    raise ValueError(f"dataset: got {name!r}, expected one of {', '.join(NAMES)}")


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Contexts and last words of JSON lines with "context" and "continuation", or with "text"."""
    if not path.is_file():
        raise ValueError(f"dataset: got {path}, expected a file of JSON lines")
    # Not splitlines: text in JSON may hold the other separators of lines that Unicode knows.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"dataset: {path} line {number} is no JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"dataset: {path} line {number} is {type(row).__name__}, expected an object")
        if "text" in row:
            word = row["text"].split(" ")[-1]
            yield row["text"][: len(row["text"]) - len(word)], word
        elif "context" in row and "continuation" in row:
            apart = row["context"][-1:].isspace() or row["continuation"][:1].isspace()
            yield row["context"] + ("" if apart else " "), row["continuation"]
        else:
            raise ValueError(f"dataset: {path} line {number} has {', '.join(row)}, expected context and continuation")
