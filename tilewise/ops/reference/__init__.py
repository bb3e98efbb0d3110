"""The float64 oracles behind the launcher signatures of a kernel backend."""
