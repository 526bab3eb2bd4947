"""How a model is spread over processes."""
