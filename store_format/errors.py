"""What a user can get wrong, as exceptions whose message is one complete line."""


class PrebakeError(ValueError):
    """A mistake or a bad input that a person can mend.

    The message is one line that says what is wrong (found, expected), where
    (file, shard, key, option) and what to do. The command line prints it without
    a traceback and exits with 1.
    """


class NotAStoreError(PrebakeError):
    """The folder is no store, or one of another format or a later version."""


class StoreBusyError(PrebakeError):
    """Another process is writing the store."""


class OtherBakeError(PrebakeError):
    """The store holds another bake than the one asked for."""


class DamagedStoreError(PrebakeError):
    """Bytes are missing, too few, or differ from what the index says."""
