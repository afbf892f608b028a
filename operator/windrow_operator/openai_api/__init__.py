"""An endpoint with the calls of OpenAI's API for files, finetuning jobs and models."""
