"""Reference kernels: NumPy in float64, calling ``geometry``; slow, and right by inspection."""
