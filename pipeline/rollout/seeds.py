"""Seeds of episodes and requests: derived from text, so that a row does not depend on the engine that generates it."""

import hashlib


def seed_of(text: str) -> int:
    """Derive a seed from the text that identifies a request: a non-negative integer below 2^63."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
