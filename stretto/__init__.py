"""Stretto: a language-model serving engine in which every feature works with every other."""

__version__ = "0.1.0"
