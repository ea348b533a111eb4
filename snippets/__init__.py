"""What readers copy: one self-contained runnable module each."""
