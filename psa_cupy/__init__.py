"""Position-sensitive attention (YOLO's PSA / C2PSA block) on NumPy and CuPy arrays, forward and backward."""

__version__ = "0.1.0"
