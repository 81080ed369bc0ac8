"""What a user can get wrong, as exceptions whose message is one complete line."""


class PrebakeError(ValueError):
    """A mistake or a bad input that a person can mend.

    The message is one line that says what is wrong (found, expected), where
    (file, shard, key, option) and what to do. The command line prints it without
    a traceback and exits with 1.
    """
