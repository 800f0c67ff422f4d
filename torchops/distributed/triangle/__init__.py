"""The triangle multiplicative update of ``DTensor``."""
