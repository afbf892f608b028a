"""Our small decode engine: Llama-family models on the host driver."""
