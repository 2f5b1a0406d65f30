"""The engine in a process of its own, and the links between it and fronts. Knows token ids; no text, no HTTP."""
