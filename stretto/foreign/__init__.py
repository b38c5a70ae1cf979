"""What users of other engines write, in this engine's words: flags, options of Python, names of methods. No torch."""
