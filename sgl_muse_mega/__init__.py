"""Muse Spark Open decoded with one persistent GPU kernel per decoder layer."""

__version__ = "0.1.0"
