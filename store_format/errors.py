"""What a user can get wrong, as exceptions whose message is one complete line."""

import re

# Line breaks, terminal escapes, and halves of characters that no encoding has.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def one_line(text: str) -> str:
    """Return `text` with everything escaped that would end the line or act on a terminal.

    File names and the content of hostile files get into messages.
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


class PrebakeError(ValueError):
    """A mistake or a bad input that a person can mend.

    The message is one line that says what is wrong (found, expected), where
    (file, shard, key, option) and what to do. The command line prints it without
    a traceback and exits with 1.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class NotAStoreError(PrebakeError):
    """The folder is no store, or one of another format or a later version."""


class StoreBusyError(PrebakeError):
    """Another process is writing the store."""


class OtherBakeError(PrebakeError):
    """The store holds another bake than the one asked for."""


class DamagedStoreError(PrebakeError):
    """Bytes are missing, too few, or differ from what the index says."""
