"""What the commands of the command line do. Each takes its parsed arguments, and loads what it needs when it runs."""


class CommandEnds(Exception):
    """A command that did not do what it was asked, and why. code: the process's exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code
