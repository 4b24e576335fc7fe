"""The grammar of faults: an operator with its parameters, on a scope, paid for in bits."""
