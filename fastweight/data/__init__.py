"""Text into token shards, and token shards into training sequences."""

from fastweight.data.shards import Shards, open_shards
from fastweight.data.tokenizer import Tokenizer, load_tokenizer
from fastweight.data.windows import Windows

__all__ = ["Shards", "Tokenizer", "Windows", "load_tokenizer", "open_shards"]
