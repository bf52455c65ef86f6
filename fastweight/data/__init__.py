"""Text into token shards, and token shards into training sequences."""
