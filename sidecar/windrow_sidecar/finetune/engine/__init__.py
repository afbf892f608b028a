"""The tasklets of a job: their order, their size, and the tensors behind them."""
