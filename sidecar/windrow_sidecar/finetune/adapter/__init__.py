"""What is trained: the adapter, by peft."""
