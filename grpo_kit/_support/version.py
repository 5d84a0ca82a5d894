"""The kit's version, known of a checkout that is not installed too."""

__version__ = "0.1.0"
