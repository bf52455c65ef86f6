"""A name or a path into a tokenizer that is fast, reproducible, and never reads special tokens out of text.

Sources: a tokenizer.json, a Hugging Face directory, a directory with GPT-2's encoder.json (vocab.json) and vocab.bpe
(merges.txt), or a name on the hub. Byte-level BPE in GPT-2's manner is run by tiktoken when it is installed (about ten
times faster on long text), everything else by tokenizers; the two are compared before tiktoken is trusted.

Traps: "<|endoftext|>" written in a text is text, which both libraries read as the special token by default; a
post-processor that adds a beginning-of-text token is left out, since documents are joined by end-of-text alone.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models
from tokenizers import pre_tokenizers as pre

if TYPE_CHECKING:
    import tiktoken
    from transformers import PreTrainedTokenizerFast

# The names under which tokenizers keep their end of text, where no configuration says which.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")
GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
OPENAI = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
OPENAI_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
PROBE = (
    "The 1st of 12,345 tests: don't they'll  it's\n\n\tdef f(x):\n        return x**2  # naïve café \u2013 “quotes” … "
    "中文 日本語 Ελληνικά русский 🙂👍🏽 <|endoftext|> </s> \r\n http://example.org/?a=1&b=2 e\u0301 \u00a0 end   "
)


class Tokenizer:
    """Text to ids and back, with one end-of-text token.

    Attributes:
        name: as it was asked for.
        vocab_size: one more than the largest id.
        end_of_text: id that ends every document.
        fingerprint: of the vocabulary and of what becomes of a probing text: equal tokenizers have equal ones.
        fast: whether tiktoken runs it.
    """

    def __init__(self, name: str, backend: tokenizers.Tokenizer, end: str) -> None:
        self.name, self.backend, self.end = name, backend, end
        backend.encode_special_tokens = True  # a special token written in a text stays text
        backend.no_padding()
        backend.no_truncation()
        end_of_text = backend.token_to_id(end)
        if end_of_text is None:
            raise ValueError(f"tokenizer: {name} has no token {end!r}, expected its end of text in the vocabulary")
        self.end_of_text: int = end_of_text
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        probe: list[int] = backend.encode(PROBE, add_special_tokens=False).ids
        told = json.dumps([sorted(vocabulary.items()), probe, self.end_of_text], ensure_ascii=True)
        self.fingerprint: str = hashlib.sha256(told.encode()).hexdigest()[:32]
        self._tiktoken = _tiktoken(backend)
        if self._tiktoken is not None and self._tiktoken.encode_ordinary(PROBE) != probe:
            self._tiktoken = None

    @property
    def fast(self) -> bool:
        return self._tiktoken is not None

    def encode(self, text: str) -> list[int]:
        """Ids of one text, no special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, no special tokens."""
        if self._tiktoken is not None:
            return [self._tiktoken.encode_ordinary(text) for text in texts]
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, end-of-text tokens written out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_transformers(self) -> "PreTrainedTokenizerFast":
        """The same as a Hugging Face tokenizer, whose save_pretrained goes beside a checkpoint."""
        from transformers import PreTrainedTokenizerFast

        # A copy, because transformers changes its settings; without a post-processor, which might add a token in front.
        told = json.loads(self.backend.to_str()) | {"post_processor": None}
        own = tokenizers.Tokenizer.from_str(json.dumps(told))
        return PreTrainedTokenizerFast(tokenizer_object=own, eos_token=self.end, bos_token=self.end, pad_token=self.end)

    def save(self, directory: str | Path) -> None:
        """Write the Hugging Face files that `load_tokenizer` and AutoTokenizer read."""
        self.to_transformers().save_pretrained(directory)


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer of a file, a directory or a hub name ("gpt2").

    Raises ValueError when there is none, or no end-of-text token can be told.
    """
    path = Path(name_or_path)
    if path.is_file():
        return _from_json(str(name_or_path), path)
    if (path / "tokenizer.json").is_file():
        return _from_json(str(name_or_path), path / "tokenizer.json")
    for vocabulary, merges in GPT2_FILES:
        if (path / vocabulary).is_file() and (path / merges).is_file():
            files = [(path / file).read_text(encoding="utf-8") for file in (vocabulary, merges)]
            return _from_gpt2(str(name_or_path), *files)
    if path.exists() or str(name_or_path).startswith((".", "/")):
        raise ValueError(
            f"tokenizer: got {name_or_path}, expected a tokenizer.json, a directory with one, or a directory with "
            "encoder.json and vocab.bpe"
        )
    return _from_hub(str(name_or_path))


def _from_json(name: str, path: Path) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"tokenizer: {path} cannot be read: {error}") from None
    return Tokenizer(name, backend, _end(name, path.parent, backend))


def _from_gpt2(name: str, vocabulary: str, merges: str) -> Tokenizer:
    """GPT-2's own two files: ids by token, and merges in order, one a line."""
    ids = json.loads(vocabulary)
    lines = [line.split(" ") for line in merges.splitlines() if line and not line.startswith("#version")]
    pairs = [(first, second) for first, second in lines]
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs))
    backend.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([ENDS[0]])
    return Tokenizer(name, backend, ENDS[0])


def _from_hub(name: str) -> Tokenizer:
    """By name; GPT-2's own files come from where tiktoken gets, and keeps, them."""
    from transformers import AutoTokenizer

    if name == "gpt2" and (files := _gpt2_files()) is not None:
        return _from_gpt2(name, *files)
    try:
        loaded: Any = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"tokenizer: got {name!r}, expected a path or a name on the hub ({reason})") from None
    if loaded.eos_token is None:
        raise ValueError(f"tokenizer: {name} names no end-of-text token, expected one")
    return Tokenizer(name, loaded.backend_tokenizer, loaded.eos_token)


def _gpt2_files() -> list[str] | None:
    """encoder.json and vocab.bpe through tiktoken, or None when it is not installed or cannot get them."""
    try:
        from tiktoken.load import read_file_cached

        return [read_file_cached(OPENAI + file, sha256).decode() for file, sha256 in OPENAI_FILES.items()]
    except (ImportError, OSError, ValueError):  # the network's errors are OSErrors
        return None


def _end(name: str, directory: Path, backend: tokenizers.Tokenizer) -> str:
    """The end-of-text token: what the configuration beside says, else a name that is known."""
    config = directory / "tokenizer_config.json"
    token = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        token = next((end for end in ENDS if backend.token_to_id(end) is not None), None)
    if token is None:
        raise ValueError(
            f"tokenizer: {name} has no end-of-text token, expected an eos_token or one of {', '.join(ENDS)}"
        )
    return token


def _tiktoken(backend: tokenizers.Tokenizer) -> "tiktoken.Encoding | None":
    """The same byte-level BPE in tiktoken, or None where tiktoken is missing or cannot express it."""
    try:
        import tiktoken
    except ImportError:
        return None
    told = json.loads(backend.to_str())
    pattern, added, model = _pattern(told["pre_tokenizer"]), told["added_tokens"], told["model"]
    plain = model["type"] == "BPE" and not any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    )
    if pattern is None or not plain or told["normalizer"] is not None or not all(token["special"] for token in added):
        return None
    specials = {token["content"]: token["id"] for token in added}
    ids = {token: i for token, i in model["vocab"].items() if token not in specials}
    merged = [ids.get("".join(pair if isinstance(pair, list) else pair.split(" ")), -1) for pair in model["merges"]]
    if merged != sorted(merged):  # tiktoken merges in the order of ids
        return None
    byte_of = _bytes_of_letters()
    try:
        ranks = {bytes(byte_of[letter] for letter in token): i for token, i in ids.items()}
    except KeyError:
        return None
    if len(ranks) != len(merged) + 256 or not all(bytes([byte]) in ranks for byte in range(256)):
        return None
    return tiktoken.Encoding("fastweight", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)


def _pattern(told: dict[str, Any] | None) -> str | None:
    """The regular expression by which a byte-level tokenizer cuts text into words, or None for other tokenizers."""
    steps = [] if told is None else told.get("pretokenizers", [told])
    *before, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if not before:
        return GPT2_PATTERN if last.get("use_regex", True) else None
    split = before[0]
    simple = len(before) == 1 and split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    return split["pattern"].get("Regex") if simple and not last.get("use_regex", True) else None


def _bytes_of_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies: itself if it can be seen, else from 256 up."""
    seen = {byte for low, high in (("!", "~"), ("¡", "¬"), ("®", "ÿ")) for byte in range(ord(low), ord(high) + 1)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
