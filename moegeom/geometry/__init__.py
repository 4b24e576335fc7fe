"""Pure mathematics of routing: arrays in, arrays out, float64 unless a docstring says otherwise."""
