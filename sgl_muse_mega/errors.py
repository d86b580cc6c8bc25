"""The one exception that is meant for the person at the terminal."""


class UserError(Exception):
    """Input that cannot be served, as one sentence: what is wrong, what was found, what to do.

    The command line prints the sentence and exits with code 2.
    """
