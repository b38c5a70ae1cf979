"""One module per family of models that the engine runs natively."""
