"""The version of the package, for files that the facade `tilewise` imports."""

__all__ = ["__version__"]

__version__ = "0.1.0"
