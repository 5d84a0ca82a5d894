"""What the rooms share: version, checks of arguments, colours and figures, loading at first use, torch's versions."""

__version__ = "0.1.0"
